"""AFL: the projection by scipy, the minimax point of two quadratics, and the mean where it is off."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import LinearConstraint, minimize
from test_fair_means import clients, opened, updates

from fl_lightning.core.errors import RoundFailure
from fl_lightning.core.update import ClientUpdate
from fl_lightning.server import AFL
from fl_lightning.server.means.fair_means import on_simplex
from fl_lightning.server.means.mean import Mean

vectors = st.lists(st.floats(-3, 3), min_size=1, max_size=6).map(np.array)
few = settings(max_examples=25, deadline=None)


@few
@given(vectors, st.floats(0.1, 5))
def test_the_projection_is_scipys(vector, total):
    found = on_simplex(vector, total)
    expected = minimize(
        lambda x: np.square(x - vector).sum(),
        np.full(len(vector), total / len(vector)),
        jac=lambda x: 2 * (x - vector),
        bounds=[(0, None)] * len(vector),
        constraints=LinearConstraint(np.ones((1, len(vector))), total, total),
        method="SLSQP",
        options={"ftol": 1e-14},
    )
    np.testing.assert_allclose(found, expected.x, atol=1e-5)
    assert found.sum() == pytest.approx(total)
    np.testing.assert_allclose(on_simplex(found, total), found, atol=1e-12)


@given(st.floats(-3, 3), st.floats(-3, 3))
def test_the_projection_of_two_numbers(first, second):
    share = min(1, max(0, (1 + first - second) / 2))
    found = on_simplex(np.array([first, second]))
    np.testing.assert_allclose(found, [share, 1 - share], atol=1e-12)


def test_two_quadratics_meet_where_their_losses_are_equal():
    """max(x² / 2, 2 (x - 10)²) is least at 20/3; the mean of their gradients is 0 at 8."""
    x, aggregator, path = torch.zeros(1, dtype=torch.float64), AFL(step=1e-3), []
    for _ in range(3000):
        aggregator.open(x)
        for client, (a, centre) in enumerate(((1.0, 0.0), (4.0, 10.0))):
            loss, gradient = a / 2 * (x - centre) ** 2, a * (x - centre)
            metrics = {"train/loss": loss.squeeze()}
            delta = 0.05 * gradient
            aggregator.add(ClientUpdate(client, delta, torch.empty(0), 1, 1, metrics))
        x = x - aggregator.close()
        path.append(float(x))
    assert np.mean(path[-500:]) == pytest.approx(20 / 3, abs=1e-3)
    # and λ has made the gradient 0: λ x = (1 - λ) 4 (10 - x)
    assert aggregator.weights[0] == pytest.approx(2 / 3, abs=1e-2)


@few
@given(entries=clients)
def test_without_a_step_it_is_the_mean_bit_for_bit(entries):
    aggregator, mean = AFL(0.0), Mean(weight_by_examples=False)
    for _ in range(2):
        assert torch.equal(opened(aggregator, entries).close(), opened(mean, entries).close())


@few
@given(entries=clients, step=st.floats(0.01, 0.5))
def test_weights_move_along_the_losses_and_weigh_the_next_round(entries, step):
    aggregator = AFL(step)
    opened(aggregator, entries).close()
    losses = np.array([loss for _, loss, _ in entries])
    expected = on_simplex(1 / len(entries) + step * losses)
    np.testing.assert_allclose(list(aggregator.weights.values()), expected, atol=1e-9)
    deltas = np.array([delta for delta, _, _ in entries])
    found = opened(aggregator, entries).close()
    np.testing.assert_allclose(found, expected @ deltas, rtol=1e-4, atol=1e-5)


def test_a_client_that_comes_later_begins_with_the_mean_weight():
    aggregator = AFL(0.1)
    opened(aggregator, [([1.0, 0.0], 3.0, 1), ([0.0, 1.0], 1.0, 1)]).close()
    assert aggregator.weights == pytest.approx({0: 0.6, 1: 0.4})
    aggregator.open(torch.empty(2))
    *_, late = updates([([0.0, 0.0], 0.0, 1)] * 2 + [([6.0, 3.0], 2.0, 1)])
    aggregator.add(late)
    assert aggregator.close().tolist() == [6.0, 3.0]
    expected = on_simplex(np.array([0.4, 0.8 / 3, 1 / 3 + 0.2]))
    assert list(aggregator.weights.values()) == pytest.approx(expected)


def test_clients_without_weight_leave_the_model_where_it_is():
    aggregator = AFL(10.0)
    opened(aggregator, [([1.0, 0.0], 0.0, 1), ([0.0, 1.0], 1.0, 1)]).close()
    assert aggregator.weights == {0: 0.0, 1: 1.0}
    assert opened(aggregator, [([5.0, 5.0], 1.0, 1)]).close().tolist() == [0.0, 0.0]


def test_refuses():
    with pytest.raises(RoundFailure, match="no train/loss"):
        opened(AFL(), [([0.0, 0.0], None, 1)])
