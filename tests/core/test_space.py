"""The mapping between named tensors and a vector: exact, in place, without copies."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from fl_lightning.core.errors import ConfigurationError
from fl_lightning.core.space import Space

shapes = st.lists(st.lists(st.integers(0, 4), max_size=3).map(tuple), min_size=1, max_size=6)


def network(dtype=torch.float32):
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2)).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@given(shapes=shapes, seed=st.integers(0, 99))
@settings(max_examples=30)
def test_what_was_read_is_written_back_bitwise(dtype, shapes, seed):
    generator = torch.Generator().manual_seed(seed)
    tensors = {
        str(i): torch.randn(s, dtype=dtype, generator=generator) for i, s in enumerate(shapes)
    }
    originals = [tensor.clone() for tensor in tensors.values()]
    space = Space(tensors)
    vector = space.read()
    assert vector.dtype == dtype
    assert vector.tolist() == [x for tensor in originals for x in tensor.flatten().tolist()]
    space.write(torch.zeros_like(vector))
    assert not any(tensor.any() for tensor in tensors.values())
    space.write(vector)
    assert all(map(torch.equal, tensors.values(), originals))


def test_a_vector_is_a_copy_and_writing_is_in_place():
    module = network()
    space, weight = Space.of_parameters(module), module[0].weight
    vector = space.read()
    space.write(vector + 1)
    assert module[0].weight is weight
    assert weight.requires_grad
    assert weight.grad_fn is None
    assert torch.equal(space.read(), vector + 1)
    assert not torch.equal(space.read(), vector)


def test_views_share_the_vectors_memory():
    space = Space.of_parameters(network())
    vector = space.read()
    views = space.named_views(vector)
    assert list(views) == space.names == [name for name, _ in network().named_parameters()]
    assert views["0.weight"].shape == (4, 3)
    assert all(v.untyped_storage().data_ptr() == vector.data_ptr() for v in views.values())
    views["2.bias"].fill_(7.0)
    assert vector[-2:].tolist() == [7.0, 7.0]


def test_a_half_precision_module_has_float32_vectors():
    module = network(torch.bfloat16)
    space = Space.of_parameters(module)
    vector = space.read()
    assert vector.dtype == torch.float32
    assert not space.is_lossless
    assert Space.of_parameters(network()).is_lossless
    space.write(vector)
    assert torch.equal(space.read(), vector)
    space.write(vector + 2**-20)  # below bfloat16's resolution of values near one
    assert module[0].weight.dtype == torch.bfloat16


def test_one_double_makes_the_vector_double():
    module = nn.ModuleList([nn.Linear(1, 1), nn.Linear(1, 1).double()])
    space = Space.of_parameters(module)
    assert space.dtype == torch.float64
    assert not space.is_lossless


def test_shared_parameters_count_once():
    module = nn.ModuleDict({"in": nn.Linear(2, 2), "out": nn.Linear(2, 2)})
    module["out"].weight = module["in"].weight
    space = Space.of_parameters(module)
    assert space.names == ["in.weight", "in.bias", "out.bias"]
    space.write(torch.full((8,), 3.0))
    assert torch.equal(module["out"].weight, torch.full((2, 2), 3.0))


def test_any_memory_layout_reads_in_logical_order():
    tensor = torch.arange(6.0).view(2, 3).T
    space = Space({"transposed": tensor})
    assert space.read().tolist() == [0.0, 3.0, 1.0, 4.0, 2.0, 5.0]
    space.write(torch.arange(6.0))
    assert tensor.tolist() == [[0.0, 1.0], [2.0, 3.0], [4.0, 5.0]]


def test_a_tensor_with_other_memory_is_read_where_it_is():
    weight = nn.Parameter(torch.zeros(2, 2))
    space = Space({"weight": weight, "bias": torch.zeros(1)})
    with torch.inference_mode():
        assert space.read().tolist() == [0, 0, 0, 0, 0]
    weight.data = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
    assert space.read().tolist() == [1, 2, 3, 4, 0]
    weight.data = weight.data.t()
    assert space.read().tolist() == [1, 3, 2, 4, 0]
    weight.data.mul_(2)
    assert space.read().tolist() == [2, 6, 4, 8, 0]
    assert not space.read().requires_grad


def test_frozen_parameters_are_left_out():
    module = network()
    module[0].requires_grad_(False)
    before = module[0].weight.clone()
    space = Space.of_parameters(module)
    assert "0.weight" not in space.names
    space.write(torch.zeros(space.size))
    assert torch.equal(module[0].weight, before)


def test_buffers_are_the_floating_ones():
    module = network()
    space = Space.of_buffers(module)
    assert space.names == ["1.running_mean", "1.running_var"]
    space.write(torch.arange(8.0))
    assert module[1].running_var.tolist() == [4.0, 5.0, 6.0, 7.0]
    assert module[1].num_batches_tracked == 0


def test_no_buffers_are_an_empty_vector():
    space = Space.of_buffers(nn.Linear(1, 1))
    assert space.read().shape == (0,)
    space.write(space.read())
    assert space.named_views(torch.empty(0)) == {}


class TestFingerprint:
    def test_is_of_names_and_shapes_alone(self):
        one, other, double = network(), network(), network(torch.float64)
        found = {Space.of_parameters(m).fingerprint() for m in (one, other, double)}
        assert len(found) == 1

    @pytest.mark.parametrize(
        "tensors",
        [
            {"a": torch.zeros(2, 3), "c": torch.zeros(1)},
            {"a": torch.zeros(3, 2), "b": torch.zeros(1)},
            {"a": torch.zeros(6), "b": torch.zeros(1)},
            {"b": torch.zeros(1), "a": torch.zeros(2, 3)},
            {"a": torch.zeros(2, 3)},
        ],
    )
    def test_changes_with_either(self, tensors):
        reference = Space({"a": torch.zeros(2, 3), "b": torch.zeros(1)})
        assert Space(tensors).fingerprint() != reference.fingerprint()


def test_nothing_to_train_is_refused():
    module = nn.Linear(1, 1).requires_grad_(False)
    with pytest.raises(ConfigurationError, match="Linear has no parameter with requires_grad"):
        Space.of_parameters(module)


def test_several_devices_are_refused():
    module = nn.ModuleList([nn.Linear(1, 1), nn.Linear(1, 1, device="meta")])
    with pytest.raises(ConfigurationError, match=r"several devices, \['cpu', 'meta'\]"):
        Space.of_parameters(module)


@pytest.mark.parametrize("shape", [(2,), (4,), (1, 3), ()])
def test_another_shape_is_refused_and_nothing_is_written(shape):
    module = nn.Linear(2, 1)
    space = Space.of_parameters(module)
    before = space.read()
    with pytest.raises(ValueError, match=r"expected a vector of shape \(3,\), got"):
        space.write(torch.zeros(shape))
    assert torch.equal(space.read(), before)
