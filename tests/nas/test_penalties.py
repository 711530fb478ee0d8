"""Penalties of the expected cost: the published forms, on one table of latencies."""

import pytest
import torch

from fl_lightning.core.errors import ConfigurationError
from fl_lightning.nas import LinearPenalty, LogPenalty

LATENCIES = torch.tensor([[1.0, 2, 4], [0, 3, 5]], dtype=torch.float64)


def loss_and_gradient(penalty, task=1.5):
    theta = torch.tensor([[0.0, 0, 0], [1, 0, -1]], dtype=torch.float64, requires_grad=True)
    expected = (theta.softmax(1) * LATENCIES).sum()
    assert expected.item() == pytest.approx(3.517672, abs=1e-6)
    loss = penalty(torch.tensor(task, dtype=torch.float64), expected)
    loss.backward()
    return loss.item(), theta.grad


@pytest.mark.parametrize(
    ("penalty", "expected", "first_row"),
    [
        (LogPenalty(), 0.344261, (-0.020749, -0.005187, 0.025936)),
        (LogPenalty(5.0, exponent=0.3), 0.278614, (-0.008396, -0.002099, 0.010495)),
        (LinearPenalty(5.0), 1.470353, (-0.008889, -0.002222, 0.011111)),
        # only the absolute one pushes up a cost below the reference
        (LinearPenalty(5.0, absolute=True), 1.529647, (0.008889, 0.002222, -0.011111)),
    ],
    ids=lambda value: type(value).__name__,
)
def test_the_published_forms(penalty, expected, first_row):
    loss, gradient = loss_and_gradient(penalty)
    assert loss == pytest.approx(expected, abs=1e-6)
    assert gradient[0].tolist() == pytest.approx(first_row, abs=1e-6)
    if penalty == LogPenalty():
        assert gradient[1].tolist() == pytest.approx((-0.036781, 0.020744, 0.016037), abs=1e-6)


def test_off_and_at_the_reference_it_is_the_loss_of_the_task():
    loss, cost, reference = torch.tensor(1.5), torch.tensor(3.0), torch.tensor(5.0)
    for penalty in (
        *(LinearPenalty(5.0, weight=0), LinearPenalty(5.0, 0, absolute=True)),
        *(LogPenalty(scale=1.0, exponent=0), LogPenalty(2.0, scale=1.0, exponent=0)),
    ):
        assert penalty(loss, cost) == loss
    assert LinearPenalty(5.0)(loss, reference) == loss
    assert LinearPenalty(5.0, absolute=True)(loss, reference) == loss
    torch.testing.assert_close(LogPenalty(5.0, scale=1.0)(loss, reference), loss)


@pytest.mark.parametrize("penalty", [LogPenalty(), LogPenalty(5.0)])
@pytest.mark.parametrize("cost", [1.0, 0.3, float("nan")])
def test_a_logarithm_that_means_nothing_is_refused(penalty, cost):
    with pytest.raises(ValueError, match="smaller unit"):
        penalty(torch.tensor(1.0), torch.tensor(cost))


@pytest.mark.parametrize(
    "make",
    [
        lambda: LogPenalty(1.0),
        lambda: LogPenalty(5.0, scale=0.0),
        lambda: LogPenalty(exponent=-1.0),
        lambda: LinearPenalty(0.0),
        lambda: LinearPenalty(5.0, weight=-0.1),
        lambda: LinearPenalty(float("nan"), absolute=True),
    ],
)
def test_settings_out_of_range_are_refused(make):
    with pytest.raises(ConfigurationError):
        make()
