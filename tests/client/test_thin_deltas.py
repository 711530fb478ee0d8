"""Deltas as factors: norms and means are those of the numbers they stand for."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from fl_lightning.core.errors import NotFinite
from fl_lightning.core.update import Updates
from fl_lightning.engines.slots.results import usable_rows
from fl_lightning.engines.slots.thin import Factors, Numbers, ThinDeltas
from fl_lightning.kernels.layers import reason_against_direct_layers
from fl_lightning.kernels.linear import dense_fold, dense_step
from fl_lightning.server.means.mean import Mean
from fl_lightning.server.means.running_mean import RunningMean, new_mean
from fl_lightning.updates.message import bytes_up

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
    return Updates(list(range(m)), deltas, torch.empty(m, 0), counts, [1] * m, losses)


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
    squares = dense_fold(mean, errors, inputs, torch.tensor(shares[:clients]))
    assert torch.equal(mean.flatten(), expected)
    torch.testing.assert_close(squares, numbers.square().sum(1))
    assert room[out * size :].isinf().all()


def test_only_single_precision_is_folded():
    with pytest.raises(TypeError, match=r"float32, got torch\.float64"):
        dense_fold(torch.zeros(2, 8).double(), draws(1, 3, 2), draws(1, 3, 8), torch.ones(1))


@given(
    m=st.integers(1, 4),
    examples=st.integers(1, 5),
    out=st.integers(1, 4),
    size=st.integers(8, 20),
    others=st.sampled_from([0, 3, 7, 8, 13, 4096, 4097]),
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
    torch.testing.assert_close(deltas.norms, whole.norm(dim=1))
    for rows in (slice(1), [m - 1, 0]):
        some = deltas.of(rows)
        torch.testing.assert_close(some.whole, whole[rows])
        torch.testing.assert_close(some.norms, whole[rows].norm(dim=1))
        folded, mean, expected = deltas.of(rows), *draws(1, whole.shape[1]).expand(2, -1).clone()
        folded.fold(mean, [0.3] * len(some.whole))
        for delta in some.whole:
            expected.lerp_(delta, 0.3)
        assert torch.equal(mean, expected)
        torch.testing.assert_close(folded.norms, whole[rows].norm(dim=1))
        assert "whole" not in vars(folded)


@pytest.mark.parametrize("offset", [0, 1, 10, 100])
def test_norms_where_examples_cancel_out(offset):
    """Errors that sum to 0, on inputs that have a lot in common."""
    errors = draws(6, 16, 20)
    errors -= errors.mean(1, keepdim=True)
    product = Factors(errors, torch.rand(6, 16, 90) + offset)
    expected = (product.errors.double().mT @ product.inputs.double()).flatten(1).norm(dim=1)
    deltas = thin(product)
    deltas.fold(torch.zeros(1800), [1.0] * 6)
    torch.testing.assert_close(deltas.norms.double(), expected, rtol=1e-4, atol=0)


def test_a_product_of_zeros_has_norm_0():
    deltas = thin(Factors(torch.zeros(2, 3, 4), torch.zeros(2, 3, 8)))
    deltas.fold(torch.zeros(32), [1.0, 0.5])
    assert deltas.norms.tolist() == [0, 0]


def received(update, mean):
    """Have a mean take in a group, and return (who was taken in, who was not)."""
    usable, failures = usable_rows(update)
    mean.add_rows(usable.deltas, usable.num_examples)
    return usable.client_ids, [failure.client_id for failure in failures]


@given(
    place=st.sampled_from(["errors", "inputs", "values"]),
    bad=st.sampled_from([torch.nan, torch.inf, -torch.inf]),
    zeros=st.booleans(),
    exact=st.booleans(),
)
def test_a_client_that_is_not_finite_leaves_no_trace(place, bad, zeros, exact):
    """Also where what is not finite meets zeros. The mean has been used before."""
    make = torch.zeros if zeros else torch.ones
    tensors = {"errors": make(3, 3, 2), "inputs": make(3, 3, 8), "values": make(3, 5)}
    parts = Factors(tensors["errors"], tensors["inputs"]), Numbers(tensors["values"])
    first = thin(*SOME).whole[:1, :21]
    mean, expected = (new_mean(torch.empty(21), exact=exact) for _ in range(2))
    for some in (mean, expected):
        some.add_rows(first, [3])
    expected.add_rows(thin(*parts).of([0, 2]), [1, 4])
    tensors[place][1, 2] = bad
    assert received(group(thin(*parts), [1, 2, 4]), mean) == ([0, 2], [1])
    assert torch.equal(mean.value(), expected.value())


@pytest.mark.parametrize("ask", ["whole", "norms"])
def test_nobody_gets_a_number_that_is_not_finite(ask):
    deltas = thin(Factors(torch.ones(2, 1, 2), torch.tensor([[[1.0] * 8], [[torch.nan] * 8]])))
    assert deltas.numbers.isnan().all(1).tolist() == [False, True]
    with pytest.raises(NotFinite):
        getattr(deltas, ask)
    with pytest.raises(NotFinite):
        deltas.fold(torch.zeros(16), [1.0, 0.5])
    assert getattr(deltas.of([0]), ask).isfinite().all()


@pytest.mark.parametrize(("error", "value"), [(1e-20, 1e20), (1e-30, 1e30)])
def test_large_inputs_of_small_errors_are_no_failure(error, value):
    """Squares of the inputs are beyond the largest number, those of their product are not."""
    deltas = thin(Factors(torch.full((2, 1, 2), error), torch.full((2, 1, 8), value)))
    assert received(group(deltas, [1, 1]), RunningMean(torch.empty(16))) == ([0, 1], [])
    torch.testing.assert_close(deltas.norms, torch.tensor([4.0, 4.0]))


def test_numbers_that_are_finite_one_by_one_may_have_no_finite_norm():
    """What cannot be used without factors cannot be used with them."""
    deltas = thin(Factors(torch.full((1, 2, 1), 1e15), torch.full((1, 2, 8), 1e15)))
    for some in (deltas, deltas.numbers):
        mean = RunningMean(torch.empty(8))
        assert received(group(some, [1]), mean) == ([], [0])
        assert torch.equal(mean.value(), torch.zeros(8))


@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("by_examples", [True, False])
def test_every_mean_has_the_bits_of_the_numbers(by_examples, exact):
    deltas = thin(*SOME)
    means = []
    for some, first in ((deltas, deltas.of([0, 1])), (deltas.whole, deltas.whole[:2])):
        mean = Mean(weight_by_examples=by_examples, exact=exact)
        mean.open(torch.empty(47))
        mean.receive(group(some, [3, 1, 7]))
        mean.receive(group(first, [2, 2]))
        means.append(mean.close())
    assert torch.equal(*means)


def test_clients_without_weight_count_for_nothing():
    mean = RunningMean(torch.empty(47))
    mean.add_rows(thin(*SOME), [0, 0, 0])
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
