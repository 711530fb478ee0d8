"""Devices in virtual time: closed forms, deadlines, partial work, and that without them all is plain."""

from functools import partial

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from lightning.pytorch import Callback
from toys import ToyModule, federated, toy_data, weights

from fl_lightning import ConfigurationError, RoundFailure
from fl_lightning.client import Devices, GivenSpeeds, LogNormalSpeeds, SpeedTiers
from fl_lightning.client.devices import Fleet


class Facts(Callback):
    def __init__(self):
        self.rows = []

    def on_train_epoch_end(self, trainer, module):
        names = ("virtual_seconds", "total_virtual_seconds", "lost", "cohort_size", "staleness")
        metrics = trainer.callback_metrics
        self.rows.append(
            {n: float(metrics[f"round/{n}"]) for n in names if f"round/{n}" in metrics}
        )


def run(devices, *callbacks, ckpt_path=None, max_epochs=3, **options):
    facts, make = Facts(), partial(ToyModule, dropout=0.3, scheduler=False)
    options = {"devices": devices, "seed": 3, **options}
    limit = {"max_epochs": max_epochs}
    fitted = federated(make, *callbacks, facts, ckpt_path=ckpt_path, trainer=limit, **options)
    return fitted.module, facts.rows, fitted.federation


def test_without_deadline_and_loss_the_weights_are_plain():
    plain, *_ = run(None, local_epochs=2)
    timed, rows, _ = run(Devices(speeds=LogNormalSpeeds()), local_epochs=2)
    relaxed, *_ = run(Devices(speeds=LogNormalSpeeds(), deadline=1e9), local_epochs=2)
    assert torch.equal(weights(plain), weights(timed))
    assert torch.equal(weights(plain), weights(relaxed))
    totals = np.cumsum([row["virtual_seconds"] for row in rows])
    np.testing.assert_allclose([row["total_virtual_seconds"] for row in rows], totals)


def test_virtual_time_is_that_of_the_slowest():
    speeds = GivenSpeeds([1.0, 2.0, 3.0, 1.0, 0.5, 2.5])
    _, rows, _ = run(Devices(speeds=speeds, latency=10.0), local_steps=4)
    assert [row["total_virtual_seconds"] for row in rows] == [22.0, 44.0, 66.0]


def test_partial_work_is_the_first_steps():
    """A deadline that lets everybody take two of five steps is a federation of two steps."""
    devices = Devices(speeds=GivenSpeeds([2.0]), deadline=5.0)
    cut, rows, _ = run(devices, local_steps=5)
    two, *_ = run(None, local_steps=2)
    assert torch.equal(weights(cut), weights(two))
    assert [row["virtual_seconds"] for row in rows] == [4.0] * 3


def test_who_is_late_is_dropped_or_counted_with_what_it_managed():
    speeds = GivenSpeeds([1.0, 1.0, 1.0, 1.0, 1.0, 9.0])
    dropped, rows, _ = run(Devices(speeds=speeds, deadline=8.0, late="drop"), local_steps=3)
    assert [(row["lost"], row["cohort_size"], row["virtual_seconds"]) for row in rows] == [
        (1, 6, 8)
    ] * 3
    for late in ("drop", "partial"):  # the slow one cannot take a single step
        other, *_ = run(Devices(speeds=speeds, deadline=8.0, late=late), local_steps=3)
        assert torch.equal(weights(other), weights(dropped))


def test_accumulated_batches_are_one_step():
    devices = Devices(speeds=GivenSpeeds([1.0]), deadline=2.0)

    def end(**options):
        trainer = {"max_epochs": 2, "accumulate_grad_batches": 2}
        return weights(federated(data=toy_data(batch_size=2), trainer=trainer, **options).module)

    assert torch.equal(end(devices=devices, local_steps=5), end(local_steps=2))


def test_lost_updates_come_at_the_stated_rate():
    devices = Devices(speeds=LogNormalSpeeds(), drop_rate=0.4, jitter=0.3, deadline=6.0)
    fleet = Fleet(devices, 100, seed=0)
    lost = [fleet.result(c, 1, draw=r).is_lost for c in range(100) for r in range(20)]
    seconds = fleet._seconds
    in_time = np.array([s < 6 for s in seconds]).mean()
    assert in_time > 0.95
    assert np.mean(lost) == pytest.approx(0.4, abs=0.06)


def test_a_round_in_which_all_are_lost_stops_the_run():
    with pytest.raises(RoundFailure, match="0 of 6 clients sent a valid update"):
        run(Devices(speeds=GivenSpeeds([9.0]), deadline=1.0), local_steps=1)


@given(
    num_steps=st.integers(1, 50),
    speed=st.floats(1e-3, 100),
    latency=st.floats(0, 5),
    wait=st.floats(1e-3, 100),
)
def test_partial_work_fits_and_one_step_more_would_not(num_steps, speed, latency, wait):
    devices = Devices(speeds=GivenSpeeds([speed]), latency=latency, deadline=latency + wait)
    result = Fleet(devices, 1, 0).result(0, num_steps, 0)
    if result.is_lost:
        assert latency + speed > devices.deadline
    else:
        assert result.seconds <= devices.deadline * (1 + 1e-9)
        assert 1 <= result.num_steps <= num_steps
        more = latency + (result.num_steps + 1) * speed
        assert result.num_steps == num_steps or more > devices.deadline * (1 - 1e-9)


def test_speeds_have_the_stated_law():
    seconds = LogNormalSpeeds(median=2.0, sigma=0.7).seconds_per_step(40_000, seed=1)
    assert np.median(seconds) == pytest.approx(2.0, rel=0.03)
    assert np.log(seconds).std() == pytest.approx(0.7, rel=0.03)
    tiers = SpeedTiers(seconds=[1.0, 2.0, 8.0], shares=[0.5, 0.3, 0.2]).seconds_per_step(10, seed=1)
    assert sorted(tiers) == [1.0] * 5 + [2.0] * 3 + [8.0] * 2


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda s: Devices(speeds=s, latency=3.0, deadline=3.0),
            "deadline must be finite and longer than",
        ),
        (lambda s: SpeedTiers(seconds=[1.0], shares=[1, 2]), "shares needs one number"),
    ],
)
def test_refuses(make, message):
    with pytest.raises(ConfigurationError, match=message):
        make(GivenSpeeds([1.0]))
