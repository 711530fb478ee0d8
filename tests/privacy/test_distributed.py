"""Whole-number noise and what it costs: distributions, bounds, exact divergences."""

import math

import mpmath
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.special import ive
from scipy.stats import chisquare

from fl_lightning import (
    AllClients,
    ConfigurationError,
    DistributedDP,
    PoissonCohort,
    UniformCohort,
)
from fl_lightning.privacy.accounting.gaussian import ReleaseCost, gaussian_epsilon
from fl_lightning.privacy.distributed import _tail_table, skellam_noise
from fl_lightning.privacy.mechanism import AccountedRun
from fl_lightning.privacy.noise.grid import norm_bound, to_integers
from fl_lightning.privacy.noise.noise_source import NoiseSource


@pytest.mark.parametrize("variance", [0.3, 7.0, 900.0])
def test_noise_has_the_distribution(variance):
    drawn = skellam_noise(variance, 100_000, NoiseSource(0).stream(1))
    reach = math.ceil(8 * math.sqrt(variance)) + 8
    at = np.arange(-reach, reach + 1)
    expected = 100_000 * ive(np.abs(at), variance)
    seen = np.bincount(drawn + reach, minlength=len(at))
    often = expected > 20
    rest = [np.array([x[~often].sum()]) for x in (seen, expected)]
    seen, expected = (np.append(x[often], r) for x, r in zip((seen, expected), rest, strict=True))
    assert chisquare(seen, expected * seen.sum() / expected.sum()).pvalue > 1e-4


@pytest.mark.parametrize("variance", [0.01, 1.0, 9.7, 1234.5])
def test_chances_are_exact_to_127_bits(variance):
    first, second = _tail_table(variance)
    found = [(int(a) << 64) + int(b) for a, b in zip(first, second, strict=True)]
    with mpmath.workdps(60):
        masses = [mpmath.besseli(i, variance) for i in range(len(found) + 150)]
        tails, scale = [mpmath.mpf(0)], 2 * mpmath.exp(-mpmath.mpf(variance))
        for mass in reversed(masses):
            tails.append(tails[-1] + scale * mass)
        exact = [mpmath.mpf(1), *tails[-2::-1]][: len(found) + 1]
        worst = max(abs(f - e * mpmath.mpf(2) ** 127) for f, e in zip(found, exact, strict=False))
        assert worst <= 1
        assert exact[len(found)] < mpmath.mpf(2) ** -126


def test_what_a_first_word_leaves_open_the_second_one_decides():
    first, second = _tail_table(9.0)
    for i in (1, 5, 20):
        words = [int(first[i]) << 1, int(second[i]) - 1]
        assert skellam_noise(9.0, 1, fixed(*words)) == i
        assert skellam_noise(9.0, 1, fixed(words[0], int(second[i]))) == i - 1


def fixed(*words):
    left = [np.uint64(word) for word in words]
    return lambda count: np.array([left.pop(0) for _ in range(count)], np.uint64)


def test_shares_add_up_to_the_noise_of_the_sum():
    shares = [skellam_noise(5.0, 50_000, NoiseSource(0).stream(i)) for i in range(10)]
    assert np.sum(shares, axis=0).var() == pytest.approx(50.0, rel=0.03)
    assert skellam_noise(0.0, 3, NoiseSource(0).stream()).tolist() == [0, 0, 0]
    with pytest.raises(ValueError, match="coarser steps"):
        skellam_noise(1e11, 3, NoiseSource(0).stream())


@given(
    delta=st.lists(st.floats(-1, 1), min_size=1, max_size=20).map(torch.tensor),
    step=st.floats(0.01, 2.0),
    seed=st.integers(0, 9),
)
@settings(max_examples=50)
def test_rounding_is_within_a_step_and_of_bounded_norm(delta, step, seed):
    norm = float(delta.double().norm()) + 1e-9
    whole = to_integers(delta, norm, step, NoiseSource(seed).stream())
    assert np.abs(whole * step - delta.double().numpy()).max() <= step * (1 + 1e-9)
    assert np.linalg.norm(whole) <= norm_bound(norm, step, len(delta)) * (1 + 1e-8)


@pytest.mark.parametrize(("variance", "shift"), [(4.0, 1), (25.0, 3), (400.0, 10)])
def test_the_bound_on_skellams_divergence_holds_and_is_tight(variance, shift):
    """In one dimension the divergence can be summed up; the bound may be above it, never below."""
    orders = np.array([2, 3, 5, 8])
    at = np.arange(-400, 401)
    here, there = ive(np.abs(at), variance), ive(np.abs(at - shift), variance)
    bound = ReleaseCost(shift, variance, skellam_size=1).divergence(orders)
    for order, limit in zip(orders.tolist(), bound.tolist(), strict=True):
        both = (here > 0) & (there > 0)
        terms = order * np.log(there[both]) - (order - 1) * np.log(here[both])
        exact = np.logaddexp.reduce(terms) / (order - 1)
        assert exact <= limit
    assert bound[0] == pytest.approx(shift**2 / variance, rel=4 / variance + 0.02)


def mechanism(num_clients=100, size=1000, rounds=10, cohort=None, source=None, **options):
    setting = DistributedDP(**{"clip_norm": 0.5, "noise_multiplier": 6.0, **options})
    cohort = cohort or AllClients()
    setting.check_cohort(cohort)
    run = AccountedRun(cohort, num_clients, rounds, seed=0, num_coordinates=size)
    return setting.mechanism(run, source or NoiseSource(0))


def test_it_costs_a_little_more_than_gaussian_noise():
    skellam, gaussian = mechanism().epsilon(10), gaussian_epsilon(3 / math.sqrt(10), 1e-5)
    assert gaussian < skellam < 1.1 * gaussian
    found = mechanism(noise_multiplier=None, epsilon=2.0)
    assert found.epsilon(10) == pytest.approx(2.0, abs=1e-3)


@pytest.mark.parametrize("source", [NoiseSource(0), NoiseSource()])
def test_the_sum_of_whole_numbers_is_the_noisy_sum(source):
    shares = mechanism(num_clients=20, source=source)
    deltas = [torch.full((1000,), 0.01 * i / 20) for i in range(20)]

    whole = sum(shares.client_integers(delta, 0.5, 0, i) for i, delta in enumerate(deltas))
    assert np.abs(whole).max() < 2 ** (shares.num_bits(20) - 1)
    noise = shares.decoded(whole, 0.5, deltas[0]) - sum(deltas)
    assert float(noise.std()) == pytest.approx(6.0 * 0.5, rel=0.1)
    assert abs(float(noise.mean())) < 5 * 3.0 / 1000**0.5


def test_shares_are_for_the_fewest_replies():
    few = mechanism(cohort=UniformCohort(size=50), min_shares=25)
    assert few.fewest_replies == 25
    assert few.noise_per_round == pytest.approx(6.0 * math.sqrt(2))
    with pytest.raises(ConfigurationError, match="set min_shares"):
        mechanism(cohort=PoissonCohort(fraction=0.5))
    with pytest.raises(ConfigurationError, match="at least 1, got 0"):
        mechanism(min_shares=0)
