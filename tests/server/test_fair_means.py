"""q-FedAvg and the tilted mean: the paper's step, and the mean where they are switched off."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fl_lightning.core.errors import RoundFailure
from fl_lightning.core.update import ClientUpdate
from fl_lightning.server.means.fair_means import QFedAvg, TiltedMean
from fl_lightning.server.means.mean import Mean

clients = st.lists(
    st.tuples(
        st.lists(st.floats(-5, 5, width=32), min_size=2, max_size=2),
        st.floats(0, 8, width=32),
        st.integers(1, 500),
    ),
    min_size=1,
    max_size=6,
)


def updates(entries):
    for client, (delta, loss, num_examples) in enumerate(entries):
        metrics = {} if loss is None else {"train/loss": torch.tensor(loss)}
        yield ClientUpdate(client, torch.tensor(delta), torch.empty(0), num_examples, 1, metrics)


def opened(aggregator, entries=()):
    aggregator.open(torch.empty(2))
    for update in updates(entries):
        aggregator.add(update)
    return aggregator


@settings(max_examples=25, deadline=None)
@given(entries=clients, q=st.floats(0, 4), lr=st.floats(0.01, 1))
def test_q_fedavg_is_the_papers_step(entries, q, lr):
    deltas = np.array([delta for delta, _, _ in entries])
    losses = np.array([loss for _, loss, _ in entries]) + 1e-10
    steps = deltas / lr
    numerator = (losses[:, None] ** q * steps).sum(0)
    squares = (steps**2).sum(1)
    denominator = (q * losses ** (q - 1) * squares + losses**q / lr).sum()
    found = opened(QFedAvg(q, lr), entries).close()
    np.testing.assert_allclose(found, numerator / denominator, rtol=1e-3, atol=1e-5)


@settings(max_examples=25, deadline=None)
@given(entries=clients, by_examples=st.booleans())
@pytest.mark.parametrize("make", [lambda w: QFedAvg(0.0, 0.1, w), lambda w: TiltedMean(0.0, w)])
def test_switched_off_they_are_the_mean_bit_for_bit(make, entries, by_examples):
    found = opened(make(by_examples), entries).close()
    assert torch.equal(found, opened(Mean(by_examples), entries).close())


@settings(max_examples=25, deadline=None)
@given(entries=clients, tilt=st.floats(0, 3))
def test_the_tilted_mean_by_numpy(entries, tilt):
    deltas, losses, counts = (np.array(part) for part in zip(*entries, strict=True))
    expected = np.average(deltas, axis=0, weights=counts * np.exp(tilt * losses))
    found = opened(TiltedMean(tilt), entries).close()
    np.testing.assert_allclose(found, expected, rtol=1e-3, atol=1e-5)


def test_a_large_tilt_follows_the_client_that_is_worst_off():
    entries = [([1.0, 0.0], 1.0, 900), ([0.0, 1.0], 2.0, 10)]
    assert opened(TiltedMean(100.0), entries).close().tolist() == pytest.approx([0.0, 1.0])


def test_losses_that_cannot_be_used_are_told():
    with pytest.raises(RoundFailure, match="client 0's is -1"):
        opened(QFedAvg(1.0, 0.1), [([0.0, 0.0], -1.0, 1)])
    with pytest.raises(RoundFailure, match="no train/loss"):
        opened(QFedAvg(1.0, 0.1), [([0.0, 0.0], None, 1)])
    with pytest.raises(RoundFailure, match="lower the tilt"):
        opened(TiltedMean(1000.0), [([0.0, 0.0], 1.0, 1)])
