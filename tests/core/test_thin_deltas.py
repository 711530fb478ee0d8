"""Deltas as factors: norms and sums are those of the numbers they stand for."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fl_lightning.client.slot_results import usable_rows
from fl_lightning.core.thin_deltas import Factors, Numbers, ThinDeltas
from fl_lightning.core.update import GroupUpdate
from fl_lightning.server.aggregators import Mean, RunningMean
from fl_lightning.updates.traffic import bytes_up


def draws(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def multiplied(part):
    return part.values if isinstance(part, Numbers) else (part.errors.mT @ part.inputs).flatten(1)


def thin(*parts):
    return ThinDeltas(parts, lambda: torch.cat([*map(multiplied, parts)], 1))


def group(deltas, counts):
    m = deltas.shape[0]
    losses = {"train/loss": torch.ones(m)}
    return GroupUpdate(list(range(m)), deltas, torch.empty(m, 0), counts, [1] * m, losses)


@given(
    m=st.integers(1, 4),
    examples=st.integers(1, 5),
    out=st.integers(1, 4),
    size=st.integers(1, 6),
    others=st.integers(0, 3),
)
def test_norms_sums_and_rows_are_those_of_the_numbers(m, examples, out, size, others):
    parts = [
        Numbers(draws(m, others)),
        Factors(draws(m, examples, out, seed=1), draws(m, examples, size, seed=2)),
        Numbers(draws(m, 1, seed=3)),
    ]
    deltas = thin(*parts)
    whole = torch.cat([parts[0].values, multiplied(parts[1]), parts[2].values], 1)
    assert deltas.shape == whole.shape
    assert deltas.dtype == whole.dtype
    torch.testing.assert_close(deltas.whole, whole)
    torch.testing.assert_close(deltas.norms, whole.norm(dim=1))
    weights = draws(m, seed=4)
    torch.testing.assert_close(deltas.total(weights), weights @ whole)
    for rows in (slice(1), [m - 1, 0]):
        some = deltas.of(rows)
        torch.testing.assert_close(some.whole, whole[rows])
        torch.testing.assert_close(some.norms, whole[rows].norm(dim=1))
        torch.testing.assert_close(some.total(weights[rows]), weights[rows] @ whole[rows])


def test_examples_that_cancel_out_have_norm_0():
    errors = torch.tensor([[[1.0], [-1.0]]])
    deltas = thin(Factors(errors, torch.rand(1, 1, 7).expand(1, 2, 7)))
    torch.testing.assert_close(deltas.norms, torch.zeros(1), rtol=0, atol=1e-3)


@given(
    place=st.sampled_from(["errors", "inputs", "values"]),
    bad=st.sampled_from([torch.nan, torch.inf, -torch.inf]),
    zeros=st.booleans(),
)
def test_a_norm_is_finite_only_if_every_number_is(place, bad, zeros):
    """Also where what is not finite meets zeros."""
    make = torch.zeros if zeros else torch.ones
    tensors = {"errors": make(2, 3, 2), "inputs": make(2, 3, 4), "values": make(2, 5)}
    tensors[place][1, 2] = bad
    deltas = thin(Factors(tensors["errors"], tensors["inputs"]), Numbers(tensors["values"]))
    assert deltas.norms.isfinite().tolist() == [True, False]
    assert deltas.whole.isfinite().all(1).tolist() == [True, False]
    usable, failures = usable_rows(group(deltas, [1, 1]))
    assert usable.client_ids == [0]
    assert [failure.client_id for failure in failures] == [1]


def test_a_client_is_not_lost_whose_norm_alone_is_too_large():
    """The inputs' squares are beyond the largest number, their product with errors is not."""
    deltas = thin(Factors(torch.full((2, 1, 2), 1e-20), torch.full((2, 1, 2), 1e20)))
    assert not deltas.norms.isfinite().any()
    usable, failures = usable_rows(group(deltas, [1, 1]))
    assert (usable.client_ids, failures) == ([0, 1], [])
    torch.testing.assert_close(usable.norms, torch.tensor([2.0, 2.0]))


@pytest.mark.parametrize("by_examples", [True, False])
def test_the_mean_of_a_group(by_examples):
    parts = Factors(draws(3, 4, 5), draws(3, 4, 6, seed=1)), Numbers(draws(3, 2, seed=2))
    means = []
    for deltas in (thin(*parts), thin(*parts).whole):
        mean = Mean(weight_by_examples=by_examples)
        mean.open(torch.empty(32, dtype=torch.float64))
        mean.add_group(deltas, [3, 1, 7])
        mean.add_group(
            deltas[:2] if isinstance(deltas, torch.Tensor) else deltas.of([0, 1]), [2, 2]
        )
        means.append(mean.close())
    torch.testing.assert_close(*means)


def test_an_exact_mean_has_the_bits_of_the_numbers():
    deltas = thin(Factors(draws(3, 4, 5).float(), draws(3, 4, 6, seed=1).float()))
    means = []
    for given_deltas in (deltas, deltas.whole):
        mean = Mean(exact=True)
        mean.open(torch.empty(30))
        mean.add_group(given_deltas, [3, 1, 7])
        means.append(mean.close())
    assert torch.equal(*means)


def test_clients_without_weight_count_for_nothing():
    mean = RunningMean(torch.empty(6))
    mean.add_group(thin(Factors(torch.ones(2, 1, 2), torch.ones(2, 1, 3))), [0, 0])
    assert torch.equal(mean.value(), torch.zeros(6))


def test_a_group_reads_like_one_with_numbers():
    deltas = thin(Factors(draws(2, 4, 5).float(), draws(2, 4, 6, seed=1).float()))
    found, expected = group(deltas, [1, 2]), group(deltas.whole, [1, 2])
    assert bytes_up(found) == bytes_up(expected)
    torch.testing.assert_close(found.norms, expected.norms)
    for one, other in zip(found, expected, strict=True):
        assert torch.equal(one.delta, other.delta)
    assert found.rows([1]).client_ids == [1]
    assert torch.equal(found.rows([1]).whole, deltas.whole[1:])
