import math
from dataclasses import FrozenInstanceError
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fl_lightning.core.errors import ConfigurationError
from fl_lightning.models import Schedule


def factors(schedule, num_rounds):
    return [schedule.factor(round, num_rounds) for round in range(num_rounds)]


HALF = math.sqrt(0.5)


@pytest.mark.parametrize(
    ("schedule", "expected"),
    [
        (Schedule(), [1.0] * 5),  # the identity
        (Schedule(warmup_rounds=3), [0.25, 0.5, 0.75, 1, 1, 1]),
        (Schedule("cosine"), [1, (1 + HALF) / 2, 0.5, (1 - HALF) / 2]),
        (Schedule("cosine"), [1]),
        (Schedule("cosine", final_factor=0.2), [1, 0.6]),
        (Schedule("cosine", warmup_rounds=1, final_factor=0.1), [0.5, 1, 0.55]),
        # a run as short as its warmup ends at full rate
        (Schedule("cosine", warmup_rounds=2), [1 / 3, 2 / 3, 1]),
        (Schedule("cosine", warmup_rounds=3), [0.25, 0.5, 0.75]),
        # steps are counted from the end of the warmup
        (
            Schedule("step", warmup_rounds=1, step_every=2, step_factor=0.5),
            [0.5, 1, 1, 0.5, 0.5, 0.25, 0.25],
        ),
        (
            Schedule("exponential", step_every=2, step_factor=0.25, final_factor=0.2),
            [1, 0.5, 0.25, 0.2, 0.2],
        ),
        (
            Schedule("exponential", warmup_rounds=1, step_every=1, step_factor=0.5),
            [0.5, 1, 0.5, 0.25],
        ),
    ],
)
def test_factors_by_hand(schedule, expected):
    assert factors(schedule, len(expected)) == pytest.approx(expected)


def test_cosine_is_torchs_own_and_stays_at_the_final_factor_after_the_last_round():
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0)
    torchs, found = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=7), []
    for _ in range(7):
        found.append(torchs.get_last_lr()[0])
        optimizer.step()
        torchs.step()
    assert factors(Schedule("cosine"), 7) == pytest.approx(found)
    assert Schedule("cosine").factor(4, 4) == pytest.approx(0, abs=1e-12)
    assert Schedule("cosine", final_factor=0.1).factor(9, 4) == pytest.approx(0.1)


def test_only_the_cosine_needs_a_last_round():
    assert Schedule().factor(3, -1) == 1.0
    for kind in ("step", "exponential"):
        assert Schedule(kind, step_every=3).factor(3, -1) == pytest.approx(0.1)
    with pytest.raises(ConfigurationError, match=r"number of rounds \(got -1\).*max_epochs"):
        Schedule("cosine").factor(0, -1)


@given(
    st.sampled_from(["constant", "cosine", "step", "exponential"]),
    st.integers(0, 20),
    st.integers(1, 60),
    st.floats(0, 1),
)
def test_factors_are_positive_and_at_most_one_and_fall_after_the_warmup(
    kind, warmup, num_rounds, final
):
    schedule = Schedule(kind, warmup_rounds=warmup, step_every=7, final_factor=final)
    values = factors(schedule, num_rounds)
    assert all(0 < value <= 1 + 1e-12 for value in values)  # no round trains nothing
    after = values[warmup:]
    assert all(later <= earlier + 1e-12 for earlier, later in pairwise(after))


def test_a_schedule_is_frozen_and_all_faults_are_told_at_once():
    with pytest.raises(ConfigurationError, match=r"(?s)warmup_rounds.*step_every"):
        Schedule(warmup_rounds=-1, step_every=0)
    with pytest.raises(FrozenInstanceError):
        Schedule().kind = "cosine"
