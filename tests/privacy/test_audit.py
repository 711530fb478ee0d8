"""The audit: bounds that hold, that find a mechanism with too little noise, and real transcripts."""

import math

import numpy as np
import pytest

from benchmarks.audits.canaries import canary_scores, epsilon_lower_bound
from fl_lightning import AllClients, CentralDP
from fl_lightning.privacy.accounting.gaussian import gaussian_epsilon
from fl_lightning.privacy.mechanism import AccountedRun


def scores(sigma, seed, shift):
    return np.random.default_rng(seed).normal(shift, sigma, 4000)


@pytest.mark.parametrize("sigma", [0.5, 1.0, 3.0])
@pytest.mark.parametrize("seed", range(3))
def test_the_bound_is_below_the_truth(sigma, seed):
    bound = epsilon_lower_bound(scores(sigma, seed, 1), scores(sigma, seed + 100, 0), 1e-5)
    assert bound <= gaussian_epsilon(sigma, 1e-5)


def test_too_little_noise_is_found():
    """Noise of an eighth of what was accounted: the bound exceeds the accounted ε."""
    bound = epsilon_lower_bound(scores(0.5, 0, 1), scores(0.5, 1, 0), 1e-5)
    assert bound > gaussian_epsilon(4.0, 1e-5)


def test_what_is_released_has_the_canary_and_the_noise_that_was_asked_for():
    privacy = CentralDP(clip_norm=0.5, noise_multiplier=2.0)
    run = AccountedRun(AllClients(), num_clients=3, num_rounds=2, seed=0)
    present, absent = (
        canary_scores(privacy, run, has_canary=has, num_worlds=300) for has in (True, False)
    )
    stddev = 2.0 * 0.5 / 3 * math.sqrt(2)
    assert np.std(absent) == pytest.approx(stddev, rel=0.15)
    shift = np.mean(present) - np.mean(absent)  # two rounds of the clip norm, whatever was sent
    assert shift == pytest.approx(2 * 0.5 / 3, abs=5 * stddev * math.sqrt(2 / 300))
