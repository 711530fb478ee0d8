"""ε against published and computed values, closed forms and sums done here; noise for a budget.

The table was computed with dp-accounting 0.6 (PLD and RDP at its default orders), add/remove,
Poisson sampling; opacus 1.6 agrees with its RDP column, pfl 0.6 with the first row.
"""

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.integrate import quad
from scipy.stats import norm

from fl_lightning import AllClients, ConfigurationError, PoissonCohort, UniformCohort
from fl_lightning.data.cohorts.weighted_cohorts import BySizeCohort, RoundRobinCohort
from fl_lightning.privacy.accounting.accountant import (
    Accountant,
    Sampling,
    most_rounds,
    noise_for_budget,
    sampling_of,
)
from fl_lightning.privacy.accounting.gaussian import (
    gaussian_delta,
    gaussian_epsilon,
    turns_epsilon,
)
from fl_lightning.privacy.central import CentralDP
from fl_lightning.privacy.mechanism import AccountedRun
from fl_lightning.privacy.private_mean import AdaptiveClip

# noise multiplier, rate, rounds, δ, ε by RDP, ε by PLD
TABLE = [
    (1.0, 0.01, 1000, 1e-5, 2.101367, 1.828244),
    (0.8, 0.01, 1000, 1e-5, 3.695613, 3.141018),
    (1.1, 256 / 60000, 14062, 1e-5, 2.596556, 2.381686),
    (1.0, 0.1, 100, 1e-5, 7.903850, 7.046603),
    (1.0, 0.1, 500, 1e-5, 18.159142, 16.561775),
    (2.0, 0.1, 500, 1e-5, 6.034562, 5.555470),
    (0.5, 0.01, 1000, 1e-5, 15.472133, 13.360826),
    (4.0, 0.01, 10000, 1e-6, 1.169469, 1.084772),
    (1.0, 1.0, 1, 1e-5, 4.728507, 4.377178),
    (5.0, 1.0, 100, 1e-5, 10.725510, 9.997256),
]


def sampling(rate):
    return Sampling("poisson" if rate < 1 else "all", 60_000, rate * 60_000)


def privacy(noise_multiplier, cohort, num_clients, rounds, **options):
    setting = CentralDP(clip_norm=1.0, noise_multiplier=noise_multiplier, **options)
    return setting.mechanism(AccountedRun(cohort, num_clients, rounds, seed=0))


@pytest.mark.parametrize(("z", "rate", "rounds", "delta", "rdp", "pld"), TABLE)
def test_every_row_of_the_table(z, rate, rounds, delta, rdp, pld):
    exact = Accountant(sampling(rate), z).epsilon(rounds, delta)
    assert exact == pytest.approx(pld, abs=1e-5)
    assert Accountant(sampling(rate), z, "rdp").epsilon(rounds, delta) == pytest.approx(
        rdp, abs=1e-5
    )


@pytest.mark.parametrize(
    ("clients", "size", "rounds", "epsilon"), [(100, 10, 500, 36.5963), (1000, 10, 1000, 3.576111)]
)
def test_fixed_size_compares_replacements_which_move_a_sum_by_two_clip_norms(
    clients, size, rounds, epsilon
):
    of_ratio_1 = Accountant(Sampling("fixed", clients, size), noise_ratio=1.0)
    assert of_ratio_1.epsilon(rounds, 1e-5) == pytest.approx(epsilon, abs=1e-4)
    of_noise_2 = privacy(2.0, UniformCohort(size=size), clients, rounds)
    assert of_noise_2.epsilon(rounds) == pytest.approx(epsilon, abs=1e-4)
    assert "one client replaced" in str(of_noise_2)
    assert "RDP" in str(of_noise_2)


def test_the_quick_epsilon_is_a_little_too_high():
    accountant = Accountant(sampling(0.01), 4.0)
    assert 0 <= accountant.epsilon(1000, 1e-5, quick=True) - accountant.epsilon(1000, 1e-5) < 0.01


@pytest.mark.parametrize(("z", "exact"), [(0.2, 271.990328), (0.35, 73.450161), (0.5, 31.370995)])
def test_little_noise_has_a_bound_in_closed_form(z, exact):
    """By dp-accounting's PLD on a grid of 1e-4, 100 rounds at rate 0.1; below 0.2 it needs gigabytes."""
    accounted = Accountant(sampling(0.1), z).epsilon(100, 1e-5)
    bound = turns_epsilon(z, 0.1, 100, 1e-5)
    assert accounted == pytest.approx(exact, rel=1e-6)
    assert accounted <= bound <= 2.2 * accounted
    below = [Accountant(sampling(0.1), least * z).epsilon(100, 1e-5) for least in (0.01, 0.1, 0.39)]
    assert below == sorted(below, reverse=True)
    assert bound < below[-1]
    assert turns_epsilon(z, 1.0, 100, 1e-5) == pytest.approx(gaussian_epsilon(z / 10, 1e-5))


@given(sigma=st.floats(0.3, 20), epsilon=st.floats(0, 8))
@settings(max_examples=20)
def test_gaussian_delta_is_the_area_between_two_bells(sigma, epsilon):
    def excess(x):
        return max(0.0, norm.pdf(x, 1, sigma) - math.exp(epsilon) * norm.pdf(x, 0, sigma))

    crossing = 0.5 + epsilon * sigma**2
    area, _ = quad(excess, crossing, max(crossing, 1) + 12 * sigma)
    assert gaussian_delta(sigma, epsilon) == pytest.approx(area, abs=1e-8)


@pytest.mark.parametrize(
    ("method", "target", "rate", "rounds", "expected"),
    [
        ("pld", 1, 0.1, 100, 3.94165),
        ("pld", 1, 1.0, 100, 37.30632),
        ("rdp", 2, 0.1, 100, 2.42240),
    ],
)
def test_noise_for_a_budget(method, target, rate, rounds, expected):
    def epsilon_of(z, quick):
        return Accountant(sampling(rate), z, method).epsilon(rounds, 1e-5, quick=quick)

    z = noise_for_budget(epsilon_of, target)
    assert z == pytest.approx(expected, abs=1e-3)
    assert epsilon_of(z, quick=False) <= target


@given(budget=st.floats(0, 30), limit=st.integers(0, 50), cost=st.floats(0.1, 3))
def test_most_rounds_is_the_last_that_fits(budget, limit, cost):
    rounds = most_rounds(lambda n: cost * n**0.7, budget, limit)
    assert rounds == max(n for n in range(limit + 1) if cost * n**0.7 <= budget)


def test_the_sampler_that_is_used_is_accounted():
    assert sampling_of(AllClients(), 9).kind == "all"
    assert sampling_of(UniformCohort(fraction=1.0), 9).kind == "all"
    assert sampling_of(PoissonCohort(fraction=1.0), 9).kind == "all"
    assert sampling_of(UniformCohort(fraction=0.26), 10) == Sampling("fixed", 10, 3.0)
    assert sampling_of(PoissonCohort(fraction=0.26), 10) == Sampling("poisson", 10, 2.6)


class Firsts(UniformCohort):
    """Draws in another way than the cohort from which it derives."""

    def sample(self, round_index, population, seed):
        return population.available_ids[: self.size]


@pytest.mark.parametrize(
    ("cohort", "reason"),
    [
        (Firsts(size=2), "Firsts cannot be accounted for"),
        (RoundRobinCohort(size=2), "RoundRobinCohort cannot be accounted for"),
        (BySizeCohort(size=2), "BySizeCohort cannot be accounted for"),
        (PoissonCohort(fraction=0.5, min_size=1), "do not join independently"),
    ],
)
def test_other_samplers_are_refused(cohort, reason):
    with pytest.raises(ConfigurationError, match=reason):
        sampling_of(cohort, 10)


def test_adaptive_clipping_costs_no_more_and_its_count_is_accounted():
    """Both releases together, z_Δ⁻² + (2 s)⁻² = z⁻², are one Gaussian of noise z."""
    both = privacy(1.0, AllClients(), 100, 1, adaptive_clip=AdaptiveClip())
    assert both.noise_per_round == pytest.approx(1.005037815259, abs=1e-12)
    ratios = both.noise_per_round**-2 + (2 * both.bits_stddev) ** -2
    plain = gaussian_epsilon(ratios**-0.5, 1e-5)
    assert plain < both.epsilon(1) < plain * (1 + 1e-6)
    assert both.epsilon(1) == privacy(1.0, AllClients(), 100, 1).epsilon(1)
