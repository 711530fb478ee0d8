"""The mean of a round's updates: against NumPy, in any order, in constant memory."""

import weakref

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fl_lightning.core.update import ClientUpdate
from fl_lightning.server.means.mean import Mean
from fl_lightning.server.means.running_mean import RunningMean

vectors = st.lists(st.floats(-100, 100, width=32), min_size=3, max_size=3)
rounds = st.lists(st.tuples(vectors, st.integers(1, 10_000)), min_size=1, max_size=8)


def update(values, num_examples=1, client_id=0):
    delta = torch.as_tensor(values, dtype=torch.float32)
    return ClientUpdate(client_id, delta, torch.empty(0), num_examples, num_steps=1)


def aggregate(updates, **options):
    aggregator = Mean(**options)
    aggregator.open(torch.empty(3))
    for each in updates:
        aggregator.add(each)
    return aggregator.close()


@given(entries=rounds)
def test_the_weighted_mean_is_numpys(entries):
    values, num_examples = zip(*entries, strict=True)
    found = aggregate(update(*entry) for entry in entries)
    expected = np.average(np.array(values), axis=0, weights=num_examples)
    np.testing.assert_allclose(found.numpy(), expected, rtol=1e-5, atol=1e-4)


@given(entries=rounds)
def test_without_weights_every_client_counts_alike(entries):
    found = aggregate((update(*entry) for entry in entries), weight_by_examples=False)
    expected = np.mean([values for values, _ in entries], axis=0)
    np.testing.assert_allclose(found.numpy(), expected, rtol=1e-5, atol=1e-4)


@given(values=vectors, num_examples=st.integers(1, 10_000), num_clients=st.integers(1, 5))
def test_identical_updates_are_their_own_mean(values, num_examples, num_clients):
    found = aggregate(update(values, num_examples) for _ in range(num_clients))
    torch.testing.assert_close(found, torch.tensor(values), rtol=1e-6, atol=1e-30)


@given(values=vectors, power=st.integers(0, 12))
def test_one_update_passes_through(values, power):
    """Bit by bit where the weight is a power of two, which rounding leaves alone."""
    assert torch.equal(aggregate([update(values, 2**power)]), torch.tensor(values))


def test_three_clients_by_hand():
    entries = [([2.0, 0.0, 1.0], 1), ([4.0, 0.0, 1.0], 1), ([6.0, 8.0, 1.0], 2)]
    assert aggregate(update(*e) for e in entries).tolist() == [4.5, 4.0, 1.0]
    unweighted = aggregate((update(*e) for e in entries), weight_by_examples=False)
    assert unweighted.tolist() == pytest.approx([4.0, 8 / 3, 1.0])


def test_every_round_starts_from_zero():
    aggregator = Mean()
    for value in (1.0, 5.0):
        aggregator.open(torch.empty(3))
        aggregator.add(update([value] * 3))
        assert aggregator.close().tolist() == [value] * 3


def test_nothing_added_gives_zeros():
    assert aggregate([]).tolist() == [0.0, 0.0, 0.0]


def test_double_stays_double():
    mean = RunningMean(torch.empty(1, dtype=torch.float64))
    mean.add(torch.tensor([0.1], dtype=torch.float64), 1)
    assert mean.value().tolist() == [0.1]


def test_a_thousand_updates_take_the_memory_of_one():
    aggregator = Mean()
    aggregator.open(torch.empty(3))
    for client in range(1000):
        one = update([1.0, 2.0, 3.0], client + 1, client)
        traces = weakref.ref(one), weakref.ref(one.delta)
        aggregator.add(one)
        del one
        assert [trace() for trace in traces] == [None, None]
