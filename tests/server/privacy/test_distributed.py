"""Whole-number noise and what it costs: distributions, bounds, exact divergences."""

import itertools
import math

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
from fl_lightning.server.privacy.gaussian import gaussian_epsilon
from fl_lightning.server.privacy.noise_source import SecureNoise, SeededNoise
from fl_lightning.server.privacy.run import Run
from fl_lightning.server.privacy.skellam import skellam_rdp
from fl_lightning.updates.discrete_noise import discrete_noise
from fl_lightning.updates.integer_vector import norm_bound, to_integers


def mass(distribution, at, variance):
    if distribution == "skellam":
        return ive(np.abs(at), variance)
    weights = np.exp(-(at.astype(float) ** 2) / (2 * variance))
    return weights / weights.sum()


@pytest.mark.parametrize("distribution", ["skellam", "discrete gaussian"])
@pytest.mark.parametrize("variance", [0.3, 7.0, 900.0])
def test_noise_has_the_distribution(distribution, variance):
    drawn = discrete_noise(distribution, variance, SeededNoise(0).words(100_000, 1))
    reach = math.ceil(8 * math.sqrt(variance)) + 8
    at = np.arange(-reach, reach + 1)
    expected = 100_000 * mass(distribution, at, variance)
    seen = np.bincount(drawn + reach, minlength=len(at))
    often = expected > 20
    rest = [np.array([x[~often].sum()]) for x in (seen, expected)]
    seen, expected = (np.append(x[often], r) for x, r in zip((seen, expected), rest, strict=True))
    assert chisquare(seen, expected * seen.sum() / expected.sum()).pvalue > 1e-4


def test_shares_add_up_to_the_noise_of_the_sum():
    shares = [discrete_noise("skellam", 5.0, SeededNoise(0).words(50_000, i)) for i in range(10)]
    assert np.sum(shares, axis=0).var() == pytest.approx(50.0, rel=0.03)
    assert discrete_noise("skellam", 0.0, SeededNoise(0).words(3)).tolist() == [0, 0, 0]
    with pytest.raises(ValueError, match="coarser steps"):
        discrete_noise("skellam", 1e11, SeededNoise(0).words(3))


@given(
    delta=st.lists(st.floats(-1, 1), min_size=1, max_size=20).map(torch.tensor),
    step=st.floats(0.01, 2.0),
    seed=st.integers(0, 9),
)
@settings(max_examples=50, deadline=None)
def test_rounding_is_within_a_step_and_of_bounded_norm(delta, step, seed):
    draws = (SeededNoise(seed).words(len(delta), n) for n in itertools.count())
    norm = float(delta.double().norm()) + 1e-9
    whole = to_integers(delta, norm, step, draws)
    assert np.abs(whole * step - delta.double().numpy()).max() <= step * (1 + 1e-9)
    assert np.linalg.norm(whole) <= norm_bound(norm, step, len(delta)) * (1 + 1e-8)


def test_rounding_is_right_on_average():
    delta = torch.tensor([0.3, -0.7, 0.1])
    draws = (SeededNoise(0).words(3, n) for n in itertools.count())
    mean = np.mean([to_integers(delta, 10.0, 1.0, draws) for _ in range(3000)], axis=0)
    assert mean == pytest.approx([0.3, -0.7, 0.1], abs=4 * 0.5 / 3000**0.5)


@pytest.mark.parametrize(("variance", "shift"), [(4.0, 1), (25.0, 3), (400.0, 10)])
def test_the_bound_on_skellams_divergence_holds_and_is_tight(variance, shift):
    """In one dimension the divergence can be summed up; the bound may be above it, never below."""
    orders = np.array([2, 3, 5, 8])
    at = np.arange(-400, 401)
    here, there = ive(np.abs(at), variance), ive(np.abs(at - shift), variance)
    bound = skellam_rdp(orders, variance, l2=shift, l1=shift)
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
    run = Run(cohort, num_clients, rounds, seed=0, num_coordinates=size)
    return setting.mechanism(run, source or SeededNoise(0))


def test_it_costs_a_little_more_than_gaussian_noise():
    skellam, gaussian = mechanism().epsilon(10), gaussian_epsilon(3 / math.sqrt(10), 1e-5)
    assert gaussian < skellam < 1.1 * gaussian
    found = mechanism(noise_multiplier=None, epsilon=2.0)
    assert found.epsilon(10) == pytest.approx(2.0, abs=1e-3)


@pytest.mark.parametrize("source", [SeededNoise(0), SecureNoise()])
def test_the_sum_of_whole_numbers_is_the_noisy_sum(source):
    shares = mechanism(num_clients=20, source=source)
    code, deltas = shares.code, [torch.full((1000,), 0.01 * i / 20) for i in range(20)]

    def draws(client):
        return (source.words(1000, client, n) for n in itertools.count())

    whole = sum(code.encode(delta, 0.5, draws(i)) for i, delta in enumerate(deltas))
    assert np.abs(whole).max() < 2 ** (code.num_bits(20) - 1)
    noise = code.decode(whole, 0.5, deltas[0]) - sum(deltas)
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
