"""Deltas as factors: norms and means are those of the numbers they stand for."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from fl_lightning.client.direct_layers import reason_against_direct_layers
from fl_lightning.client.direct_linear import dense_fold, dense_step
from fl_lightning.client.slot_results import usable_rows
from fl_lightning.client.thin_deltas import Factors, Numbers, ThinDeltas
from fl_lightning.core.update import GroupUpdate
from fl_lightning.server.aggregators import Mean, RunningMean
from fl_lightning.updates.traffic import bytes_up

pytestmark = pytest.mark.skipif(
    reason_against_direct_layers(nn.Conv2d(1, 1, 1)) is not None, reason="no compiler"
)


def draws(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def multiplied(part):
    """The numbers, as slots make them."""
    if isinstance(part, Numbers):
        return part.values
    to = torch.empty(len(part.errors), part.errors.shape[2], part.inputs.shape[2])
    given = {"keep": 0.0, "lr": -1.0, "momentum": 0.0, "decay": 0.0}
    dense_step(to, None, torch.zeros_like(to[:1]), part.errors, part.inputs, **given)
    return to.flatten(1)


def thin(*parts):
    return ThinDeltas(parts, lambda: torch.cat([*map(multiplied, parts)], 1))


def group(deltas, counts):
    m = deltas.shape[0]
    losses = {"train/loss": torch.ones(m)}
    return GroupUpdate(list(range(m)), deltas, torch.empty(m, 0), counts, [1] * m, losses)


SOME = Factors(draws(3, 4, 5), draws(3, 4, 9, seed=1)), Numbers(draws(3, 2, seed=2))


@given(
    clients=st.integers(1, 4),
    examples=st.integers(1, 12),
    size=st.integers(8, 60),
    out=st.integers(1, 14),
    shares=st.lists(st.sampled_from([0.0, 0.1, 0.4999, 0.5, 0.7, 1.0]), min_size=4, max_size=4),
)
def test_a_mean_gets_the_bits_of_the_numbers(clients, examples, size, out, shares):
    """What lies behind it is infinite, and stays so."""
    errors, inputs = draws(clients, examples, out), draws(clients, examples, size, seed=1)
    numbers = multiplied(Factors(errors, inputs))
    room = torch.full((out * size + 9,), torch.inf)
    room[: out * size] = draws(out * size, seed=2)
    expected = room[: out * size].clone()
    for delta, share in zip(numbers, shares, strict=False):
        expected.lerp_(delta, share)
    mean = room[: out * size].view(out, size)
    dense_fold(mean, errors, inputs, shares[:clients])
    assert torch.equal(mean.flatten(), expected)
    assert room[out * size :].isinf().all()


def test_only_single_precision_is_folded():
    with pytest.raises(TypeError, match=r"float32, got torch\.float64"):
        dense_fold(torch.zeros(2, 8).double(), draws(1, 3, 2), draws(1, 3, 8), [1.0])


@given(
    m=st.integers(1, 4),
    examples=st.integers(1, 5),
    out=st.integers(1, 4),
    size=st.integers(8, 20),
    others=st.integers(0, 3),
)
def test_shapes_norms_and_rows_are_those_of_the_numbers(m, examples, out, size, others):
    parts = [
        Numbers(draws(m, others)),
        Factors(draws(m, examples, out, seed=1), draws(m, examples, size, seed=2)),
        Numbers(draws(m, 1, seed=3)),
    ]
    deltas = thin(*parts)
    product = (parts[1].errors.mT @ parts[1].inputs).flatten(1)
    whole = torch.cat([parts[0].values, product, parts[2].values], 1)
    assert deltas.shape == whole.shape
    assert deltas.dtype == whole.dtype
    torch.testing.assert_close(deltas.whole, whole)
    torch.testing.assert_close(deltas.norms, whole.norm(dim=1), rtol=1e-4, atol=1e-6)
    for rows in (slice(1), [m - 1, 0]):
        some = deltas.of(rows)
        torch.testing.assert_close(some.whole, whole[rows])
        torch.testing.assert_close(some.norms, whole[rows].norm(dim=1), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("offset", [0, 1, 10, 100, 1e4])
def test_norms_where_examples_cancel_out(offset):
    """Errors that sum to 0, on inputs that have a lot in common."""
    errors = draws(6, 16, 20)
    errors -= errors.mean(1, keepdim=True)
    product = Factors(errors, torch.rand(6, 16, 90) + offset)
    expected = (product.errors.double().mT @ product.inputs.double()).flatten(1).norm(dim=1)
    found = thin(product).norms.double()
    # at the last one numbers of single precision differ by 0.1 from one another
    torch.testing.assert_close(found, expected, rtol=1e-4 if offset < 1e4 else 0.1, atol=0)


def test_a_product_of_zeros_has_norm_0():
    deltas = thin(Factors(torch.zeros(2, 3, 4), torch.zeros(2, 3, 8)))
    assert deltas.norms.tolist() == [0, 0]


@given(
    place=st.sampled_from(["errors", "inputs", "values"]),
    bad=st.sampled_from([torch.nan, torch.inf, -torch.inf]),
    zeros=st.booleans(),
)
def test_a_norm_is_finite_only_if_every_number_is(place, bad, zeros):
    """Also where what is not finite meets zeros."""
    make = torch.zeros if zeros else torch.ones
    tensors = {"errors": make(2, 3, 2), "inputs": make(2, 3, 8), "values": make(2, 5)}
    tensors[place][1, 2] = bad
    deltas = thin(Factors(tensors["errors"], tensors["inputs"]), Numbers(tensors["values"]))
    assert deltas.norms.isfinite().tolist() == [True, False]
    assert deltas.whole.isfinite().all(1).tolist() == [True, False]
    usable, failures = usable_rows(group(deltas, [1, 1]))
    assert usable.client_ids == [0]
    assert [failure.client_id for failure in failures] == [1]


def test_a_client_is_not_lost_whose_norm_alone_is_too_large():
    """The inputs' squares are beyond the largest number, their product with errors is not."""
    deltas = thin(Factors(torch.full((2, 1, 2), 1e-20), torch.full((2, 1, 8), 1e20)))
    assert not deltas.norms.isfinite().any()
    usable, failures = usable_rows(group(deltas, [1, 1]))
    assert (usable.client_ids, failures) == ([0, 1], [])
    torch.testing.assert_close(usable.norms, torch.tensor([4.0, 4.0]))


@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("by_examples", [True, False])
def test_every_mean_has_the_bits_of_the_numbers(by_examples, exact):
    deltas = thin(*SOME)
    means = []
    for some, first in ((deltas, deltas.of([0, 1])), (deltas.whole, deltas.whole[:2])):
        mean = Mean(weight_by_examples=by_examples, exact=exact)
        mean.open(torch.empty(47))
        mean.add_group(some, [3, 1, 7])
        mean.add_group(first, [2, 2])
        means.append(mean.close())
    assert torch.equal(*means)


def test_clients_without_weight_count_for_nothing():
    mean = RunningMean(torch.empty(47))
    mean.add_group(thin(*SOME), [0, 0, 0])
    assert torch.equal(mean.value(), torch.zeros(47))


def test_a_group_reads_like_one_with_numbers():
    deltas = thin(*SOME)
    found, expected = group(deltas, [1, 2, 3]), group(deltas.whole, [1, 2, 3])
    assert bytes_up(found) == bytes_up(expected)
    torch.testing.assert_close(found.norms, expected.norms)
    for one, other in zip(found, expected, strict=True):
        assert torch.equal(one.delta, other.delta)
    assert found.rows([1]).client_ids == [1]
    assert torch.equal(found.rows([1]).whole, deltas.whole[1:2])


@pytest.mark.parametrize(
    ("examples", "out", "size", "pays"),
    [(20, 62, 784, True), (10, 200, 784, True), (64, 10, 784, False), (64, 200, 784, False)],
)
def test_norms_of_many_examples_take_as_long_as_the_numbers(examples, out, size, pays):
    assert Factors(torch.empty(1, examples, out), torch.empty(1, examples, size)).pays == pays
