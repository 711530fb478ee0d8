"""Means of a round: NumPy's, in constant memory; exact ones in the same bits in any order and grouping."""

import weakref
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fl_lightning.core.errors import ConfigurationError, RoundFailure
from fl_lightning.core.update import ClientUpdate
from fl_lightning.server.means.mean import Mean, NormalisedMean
from fl_lightning.server.means.running_mean import LARGEST_SUM, ExactMean, RunningMean

numbers = st.floats(-1e4, 1e4, width=32)
vectors = st.lists(numbers, min_size=3, max_size=3)
entries = st.lists(st.tuples(vectors, st.integers(1, 5000)), min_size=1, max_size=9)


def filled(entries, kind=ExactMean):
    mean = kind(torch.empty(3))
    for values, weight in entries:
        mean.add(torch.tensor(values), weight)
    return mean


def added_up(means):
    """What the processes that hold these means all have after an all-reduce."""
    total, *_ = means
    total.load_sums(
        [torch.stack(parts).sum(0) for parts in zip(*(m.sums() for m in means), strict=False)]
    )
    return total


def grouped(entries, kind=ExactMean):
    mean = kind(torch.empty(3))
    vectors, weights = zip(*entries, strict=True)
    mean.add_rows(torch.tensor(vectors), weights)
    return mean


@given(entries=entries, by_examples=st.booleans(), exact=st.booleans())
def test_the_mean_is_numpys_and_begins_anew_each_round(entries, by_examples, exact):
    aggregator = Mean(weight_by_examples=by_examples, exact=exact)
    values, weights = zip(*entries, strict=True)
    for _ in range(2):
        aggregator.open(torch.empty(3))
        for client, (delta, num_examples) in enumerate(entries):
            update = ClientUpdate(client, torch.tensor(delta), torch.empty(0), num_examples, 1)
            aggregator.add(update)
        expected = np.average(values, axis=0, weights=weights if by_examples else None)
        np.testing.assert_allclose(aggregator.close(), expected, rtol=1e-5, atol=1e-2)
    aggregator.open(torch.empty(3))
    assert aggregator.close().tolist() == [0.0, 0.0, 0.0]


def test_a_thousand_updates_take_the_memory_of_one():
    aggregator = Mean()
    aggregator.open(torch.empty(3))
    for client in range(1000):
        one = ClientUpdate(client, torch.ones(3), torch.empty(0), client + 1, 1)
        traces = weakref.ref(one), weakref.ref(one.delta)
        aggregator.add(one)
        del one
        assert [trace() for trace in traces] == [None, None]


@given(data=st.data(), entries=entries)
def test_order_grouping_and_processes_do_not_change_a_bit(data, entries):
    expected = filled(entries).value()
    shuffled = data.draw(st.permutations(entries))
    assert torch.equal(filled(shuffled).value(), expected)
    assert torch.equal(grouped(shuffled).value(), expected)
    owners = data.draw(st.lists(st.integers(0, 2), min_size=len(entries), max_size=len(entries)))
    shares = [[e for e, o in zip(shuffled, owners, strict=True) if o == r] for r in range(3)]
    assert torch.equal(added_up([filled(share) for share in shares]).value(), expected)


@given(entries=entries)
def test_exact_means_are_rounded_once(entries):
    values, weights = (np.array(part, np.float64) for part in zip(*entries, strict=True))
    expected = weights @ values / weights.sum()
    # float64's own rounding: of the oracle's sums, and of the result
    sizes = weights @ np.abs(values) / weights.sum()
    mean = ExactMean(torch.empty(3, dtype=torch.float64))
    mean.add_rows(torch.tensor(values), weights.tolist())
    bound = len(entries) * 2.0**-61 + 2.0**-50 * sizes
    assert (np.abs(mean.value().numpy() - expected) <= bound).all()
    found = filled(entries).value().double().numpy()
    bound = 2.0**-24 * np.abs(expected) + 2.0**-49 * sizes + 1e-18
    assert (np.abs(found - expected) <= bound).all()


@given(
    values=st.lists(numbers.filter(lambda x: x == 0 or abs(x) >= 2**-37), min_size=1),
    weight=st.integers(1, 2**28),
)
def test_one_vector_comes_out_bit_for_bit(values, weight):
    """Of a mean that is not exact where the weight is a power of two, which rounding leaves alone."""
    vector = torch.tensor(values)
    for kind, times in ((ExactMean, weight), (RunningMean, 2 ** (weight % 13))):
        mean = kind(vector)
        mean.add(vector, times)
        assert torch.equal(mean.value(), vector)
    double = vector.double() * 0.1
    mean = RunningMean(double)
    mean.add(double, 1)
    assert torch.equal(mean.value(), double)


@given(entries=entries, zeros=st.lists(st.integers(0, 8), max_size=3))
@pytest.mark.parametrize("kind", [RunningMean, ExactMean])
def test_a_group_is_its_members_one_by_one(kind, entries, zeros):
    expected = filled(entries, kind).value()
    padded = list(entries)
    for place in zeros:  # of weight 0
        padded.insert(place, ([0.0, 0.0, 0.0], 0))
    assert torch.equal(grouped(padded, kind).value(), expected)


@pytest.mark.parametrize("kind", [RunningMean, ExactMean])
def test_a_group_of_nothing_is_nothing(kind):
    assert grouped([([1.0, 2.0, 3.0], 0)], kind).value().tolist() == [0.0, 0.0, 0.0]
    assert added_up([kind(torch.empty(3)), kind(torch.empty(3))]).value().tolist() == [0.0] * 3


def test_sums_beyond_the_range_are_refused():
    mean = ExactMean(torch.empty(1))
    mean.add(torch.tensor([1e9]), 4000)
    mean.add(torch.tensor([1.0]), 1)
    assert mean.value().tolist() == pytest.approx([1e9 * 4000 / 4001])
    mean.add(torch.tensor([-1e9]), 4000)
    with pytest.raises(RoundFailure, match="exact: false"):
        mean.value()


def test_an_exact_mean_refuses_weights_that_are_not_whole_numbers():
    class Halves(Mean):
        def weight(self, update):
            return 0.5 * update.num_examples

    for exact, count in ((True, 4), (False, 3)):
        mean = Halves(exact=exact)
        mean.open(torch.empty(1))
        mean.add(ClientUpdate(0, torch.ones(1), torch.empty(0), count, 1))
        assert mean.close().tolist() == [1.0]
    mean = Halves(exact=True)
    mean.open(torch.empty(1))
    with pytest.raises(
        ConfigurationError, match=r"Halves.weight returned 1.5 for client 7: .* whole number"
    ):
        mean.add(ClientUpdate(7, torch.ones(1), torch.empty(0), 3, 1))


@pytest.mark.parametrize("aggregator", [Mean(exact=True), NormalisedMean(exact=True)])
def test_no_round_of_updates_that_were_checked_is_beyond_the_range(aggregator):
    most = LARGEST_SUM / 4 / 10  # of the entries of 4 clients with 10 examples each
    about = {"num_examples": 10, "num_steps": 1, "effective_steps": 1.0}
    aggregator.open(torch.empty(1, dtype=torch.float64))
    for _ in range(4):
        delta = torch.tensor([-most], dtype=torch.float64)
        aggregator.check(update := ClientUpdate(0, delta, torch.empty(0), **about), 4)
        aggregator.add(update)
    assert aggregator.close().tolist() == [-most]
    large = torch.tensor([0.0, 1.001 * most])
    for delta, buffers in ((large, torch.empty(0)), (torch.zeros(2), large)):
        with pytest.raises(
            RoundFailure, match="too large for an exact mean: with weight 10, one of 4"
        ):
            aggregator.check(ClientUpdate(0, delta, buffers, **about), 4)
    if aggregator.needs_effective_steps:
        with pytest.raises(RoundFailure, match="too large for an exact mean"):
            aggregator.check(replace(update, effective_steps=1e12), 4)
