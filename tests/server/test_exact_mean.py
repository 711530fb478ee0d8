"""Exact means: the same bits in any order, grouping and number of processes; close to float64."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fl_lightning.core.errors import RoundFailure
from fl_lightning.core.update import ClientUpdate, GlobalModel, Updates
from fl_lightning.server.means.mean import Mean, NormalisedMean
from fl_lightning.server.means.running_mean import LARGEST_SUM, ExactMean, RunningMean
from fl_lightning.server.server import Server

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
def test_the_error_is_within_its_bound(entries):
    values, weights = zip(*entries, strict=True)
    expected = np.array(weights, np.float64) @ np.array(values, np.float64) / sum(weights)
    mean = ExactMean(torch.empty(3, dtype=torch.float64))
    for value, weight in entries:
        mean.add(torch.tensor(value, dtype=torch.float64), weight)
    # float64's own rounding: of the oracle's sums, and of the result
    sizes = np.array(weights) @ np.abs(np.array(values)) / sum(weights)
    bound = len(entries) * 2.0**-61 + 2.0**-50 * sizes
    assert (np.abs(mean.value().numpy() - expected) <= bound).all()


@given(entries=entries)
def test_float32_is_rounded_once(entries):
    values, weights = zip(*entries, strict=True)
    expected = np.array(weights, np.float64) @ np.array(values, np.float64) / sum(weights)
    found = filled(entries).value().double().numpy()
    sizes = np.array(weights) @ np.abs(np.array(values)) / sum(weights)
    assert (
        np.abs(found - expected) <= 2.0**-24 * np.abs(expected) + 2.0**-49 * sizes + 1e-18
    ).all()


@given(
    values=st.lists(numbers.filter(lambda x: x == 0 or abs(x) >= 2**-37), min_size=1),
    weight=st.integers(1, 2**28),
)
def test_one_vector_comes_out_bit_for_bit(values, weight):
    vector = torch.tensor(values)
    mean = ExactMean(vector)
    mean.add(vector, weight)
    assert torch.equal(mean.value(), vector)


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


@given(entries=entries)
def test_running_means_add_up_as_well(entries):
    expected = filled(entries, RunningMean).value()
    shares = [filled(entries[rank::2], RunningMean) for rank in range(2)]
    torch.testing.assert_close(added_up(shares).value(), expected, rtol=1e-5, atol=1e-3)


@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("by_examples", [False, True])
def test_the_aggregator_takes_groups(exact, by_examples):
    deltas = torch.tensor([[2.0], [4.0]])
    aggregator = Mean(weight_by_examples=by_examples, exact=exact)
    aggregator.open(torch.empty(1))
    aggregator.receive(Updates([0, 1], deltas, torch.empty(2, 0), [1, 3], [1, 1]))
    assert aggregator.close().tolist() == [3.5 if by_examples else 3.0]


def test_sums_beyond_the_range_are_refused():
    mean = ExactMean(torch.empty(1))
    mean.add(torch.tensor([1e9]), 4000)
    mean.add(torch.tensor([1.0]), 1)
    assert mean.value().tolist() == pytest.approx([1e9 * 4000 / 4001])
    mean.add(torch.tensor([-1e9]), 4000)
    with pytest.raises(RoundFailure, match="exact: false"):
        mean.value()


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


@pytest.mark.parametrize(("exact", "num_collectives"), [(False, 1), (True, 2)])
def test_servers_meet_in_a_few_collectives(exact, num_collectives):
    """Two servers with a client each, stepped together, are one server with two."""

    def server():
        model = GlobalModel(torch.tensor([1.0, 2.0]), torch.tensor([5.0]))
        opened = Server(model, Mean(exact=exact))
        opened.open_round()
        return opened

    replies = [
        ClientUpdate(k, torch.tensor([0.5, k]), torch.tensor([k + 1.0]), 2 * k + 1, 1)
        for k in range(2)
    ]
    together, one, other = server(), server(), server()
    for reply in replies:
        together.receive(reply)
    one.receive(replies[0])
    other.receive(replies[1])
    sent = []
    other.reduce(sent.append, list)  # what the other process contributes
    sent = [vector.clone() for vector in sent]
    assert len(sent) == num_collectives
    others = iter(sent)
    one.reduce(lambda vector: vector.add_(next(others)), list)
    assert one.num_replies == 2
    for each in (together, one):
        each.close_round()
    torch.testing.assert_close(one.model.params, together.model.params, rtol=1e-6, atol=0)
    torch.testing.assert_close(one.model.buffers, together.model.buffers, rtol=1e-6, atol=0)
    if exact:
        assert torch.equal(one.model.params, together.model.params)
