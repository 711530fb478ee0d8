"""Task arithmetic: the algebra, models that get what they should, files, and pairs compared."""

import copy

import pytest
import torch
from networks import two_layers
from torch import nn

from fl_lightning.core.container import write
from fl_lightning.core.errors import ConfigurationError
from fl_lightning.core.space import Space
from fl_lightning.sparsity import (
    Mask,
    TaskVector,
    compare_masks,
    compare_tasks,
    load_task_vector,
    merge,
    save_task_vector,
)


def fine_tuned(module, seed, density=1.0):
    """A copy of a module with some of its entries moved."""
    generator = torch.Generator().manual_seed(seed)
    other = copy.deepcopy(module)
    with torch.no_grad():
        for p in other.parameters():
            moved = torch.rand(p.shape, generator=generator) < density
            p += moved * torch.randn(p.shape, generator=generator)
    return other


def flat(module):
    return torch.cat([p.detach().flatten() for p in module.parameters()])


def test_a_task_added_and_taken_back():
    start = two_layers()
    end = fine_tuned(start, seed=1)
    task = TaskVector.between(start, end)
    assert torch.equal(task.vector, flat(end) - flat(start))
    assert task.fingerprint() == Space.of_parameters(start).fingerprint()
    module = copy.deepcopy(start)
    task.apply_to(module)
    torch.testing.assert_close(flat(module), flat(end))
    (-task).apply_to(module)
    torch.testing.assert_close(flat(module), flat(start))
    task.apply_to(module, scale=0.5)
    torch.testing.assert_close(flat(module), (flat(start) + flat(end)) / 2)


def test_merging_is_a_weighted_sum():
    start = two_layers()
    one, two = (TaskVector.between(start, fine_tuned(start, seed)) for seed in (1, 2))
    total = merge([one, two], weights=[0.3, -2.0])
    torch.testing.assert_close(total.vector, 0.3 * one.vector - 2 * two.vector)
    assert torch.equal((one + two).vector, one.vector + two.vector)
    assert torch.equal((one - two).vector, one.vector - two.vector)
    assert torch.equal((one * 3).vector, (3 * one).vector)
    assert torch.equal(merge([one]).vector, one.vector)


def test_of_some_parameters_only():
    start, end = two_layers(), nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 7))
    with pytest.raises(ConfigurationError, match=r"shapes of 2\.weight, 2\.bias"):
        TaskVector.between(start, end)
    task = TaskVector.between(start, end, names=["0.bias", "0.weight"])
    head = start[2].weight.clone()
    task.apply_to(start)
    torch.testing.assert_close(start[0].weight, end[0].weight)
    torch.testing.assert_close(start[0].bias, end[0].bias)
    assert torch.equal(start[2].weight, head)


def test_a_file_gives_the_task_back(tmp_path):
    start = two_layers()
    task = TaskVector.between(start, fine_tuned(start, 1), names=["2.bias", "0.weight"])
    save_task_vector(task, tmp_path / "new" / "task.safetensors")
    again = load_task_vector(tmp_path / "new" / "task.safetensors")
    assert list(again.shapes.items()) == list(task.shapes.items())
    assert torch.equal(again.vector, task.vector)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"names": ["b"]}, "do not match its list of names"),
        ({"names": 3}, "do not match its list of names"),
        ({"fingerprint": "0"}, "shapes do not match its fingerprint"),
        ({"code": 0}, "unknown field 'code'"),
    ],
)
def test_damaged_files_are_refused(fields, message, tmp_path):
    path = tmp_path / "task"
    good = {"names": ["a"], "fingerprint": ""}
    path.write_bytes(write("task vector", {**good, **fields}, {"a": torch.ones(2)}))
    with pytest.raises(ConfigurationError, match=message):
        load_task_vector(path)
    path.write_bytes(write("mask", good, {"a": torch.ones(2)}))
    with pytest.raises(ConfigurationError, match="of kind 'task vector', got 'mask'"):
        load_task_vector(path)


def test_what_does_not_fit_is_refused(tmp_path):
    start = two_layers()
    task = TaskVector.between(start, fine_tuned(start, 1))
    small = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 4))
    before = flat(small)
    with pytest.raises(
        ConfigurationError, match=r"the shapes of 0\.weight, 0\.bias, 2\.weight differ"
    ):
        task.apply_to(small)
    assert torch.equal(before, flat(small))
    with pytest.raises(ConfigurationError, match="has no parameters"):
        task.apply_to(nn.Linear(1, 1))
    with pytest.raises(ConfigurationError, match=r"differ in 2\.bias"):
        task + TaskVector.between(start, start, names=["0.weight", "0.bias", "2.weight"])
    with pytest.raises(ConfigurationError, match="1 vectors and 2 weights"):
        merge([task], weights=[1.0, 2.0])
    with pytest.raises(ConfigurationError, match=r"shape \(44,\), got \(3,\)"):
        TaskVector(task.shapes, torch.ones(3))
    with pytest.raises(ConfigurationError, match="does not exist"):
        load_task_vector(tmp_path / "nothing")
    (tmp_path / "text").write_text("hello")
    with pytest.raises(ConfigurationError, match="no file of a task vector"):
        load_task_vector(tmp_path / "text")


def test_pairs_are_compared():
    start = two_layers()
    tasks = {n: TaskVector.between(start, fine_tuned(start, i, 0.4)) for i, n in enumerate("abc")}
    tasks["-a"] = -2 * tasks["a"]
    tasks["none"] = 0 * tasks["a"]
    rows = {(row.one, row.other): row for row in compare_tasks(tasks)}
    assert len(rows) == 10
    assert rows["a", "-a"].cosine == pytest.approx(-1)
    assert rows["a", "-a"].overlap == 1
    assert (rows["a", "none"].cosine, rows["a", "none"].overlap) == (0, 0)
    a, b = tasks["a"].vector, tasks["b"].vector
    expected = torch.cosine_similarity(a, b, dim=0)
    assert rows["a", "b"].cosine == pytest.approx(float(expected), abs=1e-6)
    both, either = ((a != 0) & (b != 0)).sum(), ((a != 0) | (b != 0)).sum()
    assert rows["a", "b"].overlap == pytest.approx(int(both) / int(either))
    masks = {name: task.support() for name, task in tasks.items()}
    assert [row.overlap for row in compare_masks(masks)] == [row.overlap for row in rows.values()]
    assert isinstance(masks["a"], Mask)
