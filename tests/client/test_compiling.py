"""A compiled step is a matter of speed: without a graph the same function runs as it is."""

import gc
import weakref
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

import numpy as np
import pytest
import torch
import typed

from fl_lightning.engines.compiler import compiling
from fl_lightning.engines.compiler.compiling import Compiled, HasChanged

X = torch.arange(4.0)
FACTOR = 2
CHILDREN = Path("/proc/thread-self/children")


class Scaled:
    def __init__(self, factor):
        self.factor = factor

    def times(self, x):
        return x * self.factor

    def by_value(self, x):
        return x * self.factor if float(x.sum()) > 0 else x


@pytest.mark.slow
def test_engines_do_not_take_each_others_graphs():
    runs = [Compiled(Scaled(factor).times) for factor in range(10)]
    for factor, run in enumerate(runs):
        assert torch.equal(run(X), X * factor)
        assert not run.is_given_up


def test_a_function_that_cannot_be_one_graph_runs_as_it_is():
    run = Compiled(Scaled(3).by_value)
    with pytest.warns(UserWarning, match="not compiled from here on"):
        assert torch.equal(run(X), 3 * X)
    assert run.is_given_up
    assert torch.equal(run(X), 3 * X)


@pytest.mark.parametrize(
    ("message", "told"),
    [
        (
            "backend='inductor' raised:\nKeyError: 'width'\n\nSet TORCH_LOGS for more",
            r"here on: backend='inductor' raised: KeyError: 'width'$",
        ),
        (
            "Reconstruction failure\n  Explanation: Dynamo cannot make x.\n  Hint: none",
            r"Reconstruction failure; Dynamo cannot make x\.$",
        ),
    ],
)
def test_the_compilers_explanation_is_told(message, told):
    with pytest.warns(UserWarning, match=told):
        Compiled(Scaled(3).times).give_up(RuntimeError(message))


def test_what_other_modules_hold_is_checked(monkeypatch):
    run = Compiled(lambda x: x * FACTOR)
    assert torch.equal(run(X), 2 * X)
    monkeypatch.setattr(f"{__name__}.FACTOR", 3)
    run.recheck()
    assert torch.equal(run(X), 3 * X)


def test_code_of_pytorch_and_of_this_library_is_not_checked(monkeypatch):
    names = {
        "self.network._modules['0'].training": True,
        "G['FACTOR']": True,
        "G['__import_tests_dot_client_dot_test_compiling'].torch.float32": True,
        "G['__import_torchvision_dot_ops'].misc": True,
        "dict(type(self.network).__dict__)": True,
        "G['__import_torch'].nn": False,
        "G['__import_torch_dot_nn_dot_functional'].linear": False,
        "dict(type(G['__import_torch_dot_utils_dot__pytree']._LEAF_SPEC).__dict__)": True,
        "list(dict.keys(__import__('torch').utils._pytree.SUPPORTED_NODES))[1]": False,
        "G['__import_fl_lightning_dot_client_dot_direct_layers'].dense": False,
    }
    entries = [SimpleNamespace(name=name) for name in names]
    checks, chosen = compiling._checks, []
    assert checks(entries) == list(names.values())
    monkeypatch.setattr(
        compiling, "_checks", lambda some: chosen.extend(checks(some)) or checks(some)
    )
    Compiled(lambda x: torch.func.vmap(torch.sin)(x * FACTOR))(X)
    assert set(chosen) == {True, False}


def test_where_checks_cannot_be_left_out_none_are():
    """PyTorch builds them twice then, and with arrays fails at the second time."""
    array = np.full(4, 3.0, np.float32)
    run = Compiled(lambda x: x * torch.as_tensor(array))
    assert torch.equal(run(X), 3 * X)
    assert not run.is_given_up


def test_a_change_may_be_refused():
    """What depends on what Python reads besides the graph can then follow first."""
    scaled = Scaled(2)
    run = Compiled(scaled.times)
    run.recheck(refuse=True)
    for _ in range(2):
        with pytest.raises(HasChanged, match="no graph"):
            run(X)
    run.recheck()
    assert torch.equal(run(X), 2 * X)
    run.recheck(refuse=True)
    assert torch.equal(run(X), 2 * X)
    scaled.factor = 5
    run.recheck(refuse=True)
    for _ in range(2):
        with pytest.raises(HasChanged, match="what it reads has changed"):
            run(X)
    run.recheck()
    assert torch.equal(run(X), 5 * X)
    assert not run.is_given_up


def test_a_value_that_changes_every_round_is_given_up_in_time():
    scaled = Scaled(0)
    run = Compiled(scaled.times)

    def rounds():
        for factor in range(12):
            scaled.factor = factor
            run.recheck()
            assert torch.equal(run(X), X * factor)

    with pytest.warns(UserWarning, match="not compiled from here on"):
        rounds()
    assert run.is_given_up


class Pair(NamedTuple):
    one: torch.Tensor
    other: list[torch.Tensor]


class Layer:
    def __init__(self):
        self.weight = torch.full((4,), 2.0)

    def run(self, given):
        """Return parts of every kind, in an order of their own, and move the state."""
        state, pair, number = given
        total = pair.one + sum(pair.other)
        state["count"].add_(1)
        return {
            "weighted": total * self.weight,
            "given": pair.one,  # as it came in
            "pair": Pair(total - 1, [total, total]),
            "plain": (None, number),
        }


def arguments(seed):
    draws = torch.randn(3, 4, generator=torch.Generator().manual_seed(seed))
    return {"count": torch.zeros(())}, Pair(draws[0].clone(), list(draws[1:].clone())), 7


class TestAFunctionThatIsAlone:
    """Between two checks nothing is looked at but the kinds of its first argument."""

    def run(self):
        layer = Layer()
        run = Compiled(layer.run, is_alone=True)
        for seed in range(2):  # the second call is checked
            run(arguments(seed))
        return layer, run

    def test_other_arguments_give_what_the_function_gives(self):
        layer, run = self.run()
        for seed in (1, 2):
            args, others = arguments(seed), arguments(seed)
            found, expected = run(args), layer.run(others)
            torch.testing.assert_close(found, expected)
            assert type(found["pair"]) is Pair
            assert found["given"] is args[1].one
            assert args[0]["count"] == others[0]["count"] == 1

    def test_what_python_holds_may_change_its_numbers(self):
        layer, run = self.run()
        layer.weight.fill_(5.0)
        torch.testing.assert_close(run(arguments(1)), layer.run(arguments(1)))

    @pytest.mark.parametrize("is_alone", [False, True])
    def test_of_several_graphs_the_right_one_runs(self, is_alone):
        """A hook may replace what a step reads, e.g. how examples are mixed."""
        layer = Layer()
        run = Compiled(layer.run, is_alone=is_alone)
        for factor in (1.0, 3.0, 2.0, 3.0):
            layer.weight = torch.full((4,), factor)
            if is_alone:  # else each call looks for itself
                run.recheck()
            for seed in range(3):
                torch.testing.assert_close(run(arguments(seed)), layer.run(arguments(seed)))

    @pytest.mark.parametrize(
        "other",
        [
            {"x": torch.ones(4), "y": torch.full((4,), 3.0, dtype=torch.float64)},
            {"x": torch.ones(4), "y": torch.full((1,), 3.0)},
            {"y": torch.full((4,), 3.0), "x": torch.ones(4)},
            {"x": torch.ones(4), "y": torch.full((4,), 3.0), "z": None},
            dict.fromkeys("xy", torch.full((4,), 3.0)),
        ],
        ids=range(5),
    )
    def test_arguments_of_two_kinds_may_alternate(self, other):
        scaled = Scaled(2)
        run = Compiled(lambda b: scaled.times(b["x"] - 2 * b["y"]), is_alone=True)
        one = {"x": torch.ones(4), "y": torch.ones(4)}
        for _ in range(3):
            for batch in (one, other):
                torch.testing.assert_close(run(batch), 2 * (batch["x"] - 2 * batch["y"]))
        scaled.factor = 5  # both are seen as they were, until they are to be checked
        for factor in (2, 2, 5, 5):
            if factor == 5:
                run.recheck()
            for batch in (one, other):
                torch.testing.assert_close(run(batch), factor * (batch["x"] - 2 * batch["y"]))
            assert not run.is_given_up

    def test_told_to_refuse_it_makes_no_graph_of_another_kind(self):
        layer, run = self.run()
        state, pair, number = arguments(1)
        doubles = Pair(pair.one.double(), pair.other)
        run.recheck(refuse=True)
        with pytest.raises(HasChanged):
            run([state, doubles, number])
        assert state["count"] == 0
        run(arguments(1))  # nothing else has changed
        expected = layer.run([{"count": torch.zeros(())}, doubles, number])
        torch.testing.assert_close(run([state, doubles, number]), expected)

    def test_a_tensor_made_for_one_call_is_that_calls(self):
        """An array's tensor is the graph's input, and there is another one at every call."""
        run = Compiled(lambda x, array: x * torch.as_tensor(array), is_alone=True)
        for factor in (2.0, 3.0, 5.0):
            assert torch.equal(run(X, np.full(4, factor, np.float32)), factor * X)

    def test_it_holds_no_calls_tensors(self):
        _, run = self.run()
        held = []
        for check in (True, False):
            args = arguments(2)
            if check:
                run.recheck()
            result = run(args)
            held += [weakref.ref(args[1].other[0]), weakref.ref(result["weighted"])]
            del args, result
        gc.collect()
        assert [reference() for reference in held] == [None] * 4


@pytest.mark.skipif(torch.accelerator.is_available(), reason="Triton's processes are for GPUs")
@pytest.mark.skipif(not CHILDREN.exists(), reason="/proc does not tell a process's children")
def test_compiling_starts_no_process_that_stays(tmp_path):
    code = f"""
import torch
from pathlib import Path
from fl_lightning.engines.compiler.compiling import Compiled
run = Compiled(lambda x: 3 * x, is_alone=True)
assert torch.equal(run(torch.ones(4)), 3 * torch.ones(4)) and not run.is_given_up
print("children:", Path("{CHILDREN}").read_text())
"""
    assert typed.said_by(code, folder=tmp_path)[0].split() == ["children:"]
