"""The matrix mechanism: optimal factors, sensitivity, and noise that is what the matrix says."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fl_lightning import AllClients, BandedMatrixDP, ConfigurationError, LocalDP, PoissonCohort
from fl_lightning.data.cohorts.population import Population
from fl_lightning.data.cohorts.weighted_cohorts import BySizeCohort, RoundRobinCohort
from fl_lightning.privacy.accounting.gaussian import gaussian_epsilon
from fl_lightning.privacy.banded import (
    CorrelatedSums,
    banded_factor,
    dense,
)
from fl_lightning.privacy.mechanism import AccountedRun
from fl_lightning.privacy.noise.noise_source import NoiseSource


def mean_squared_error(columns):
    """Mean variance of the noise in running sums, ‖A C⁻¹‖²_F / n, at z = 1."""
    matrix = dense(columns)
    noise = np.linalg.solve(matrix.T, np.tril(np.ones_like(matrix)).T)
    return (noise**2).sum() / len(matrix)


# found with another solver over C^T C of unit diagonal, to four digits
BEST_OF_4 = [
    [0.82472, 0, 0, 0],
    [0.44956, 0.88544, 0, 0],
    [0.30105, 0.41309, 0.93771, 0],
    [0.1646, 0.21294, 0.34742, 1],
]


def test_the_best_factor_of_prefix_sums():
    assert np.allclose(dense(banded_factor(4, 4)), BEST_OF_4, atol=2e-4)
    assert mean_squared_error(banded_factor(4, 4)) == pytest.approx(1.71854, abs=1e-5)
    assert mean_squared_error(banded_factor(8, 8)) == pytest.approx(2.23327, abs=1e-5)
    assert mean_squared_error(banded_factor(8, 3)) == pytest.approx(2.56778, abs=1e-5)
    assert mean_squared_error(banded_factor(8, 1)) == pytest.approx(4.5)


def test_long_runs_are_close_to_the_best(monkeypatch):
    best = mean_squared_error(banded_factor(60, 8))
    monkeypatch.setattr("fl_lightning.privacy.banded.MOST_OPTIMISED", 50)
    assert best < mean_squared_error(banded_factor(60, 8)) < 1.2 * best


@given(num_rounds=st.integers(1, 20), data=st.data())
@settings(max_examples=15)
def test_sensitivity_is_the_root_of_the_number_of_turns(num_rounds, data):
    """Whatever a client sends in turns at least b rounds apart, C G moves by ≤ S √P."""
    bands = data.draw(st.integers(1, num_rounds))
    matrix = dense(banded_factor(num_rounds, bands))
    assert np.allclose(np.linalg.norm(matrix, axis=0), 1)
    assert np.allclose(np.triu(matrix, 1), 0)
    assert np.allclose(np.tril(matrix, -bands), 0)
    first = data.draw(st.integers(0, num_rounds - 1))
    turns = np.arange(first, num_rounds, bands)
    sent = np.random.default_rng(0).normal(size=(len(turns), 3))
    sent /= np.linalg.norm(sent, axis=1, keepdims=True)
    assert np.linalg.norm(matrix[:, turns] @ sent) <= math.sqrt(len(turns)) + 1e-9


def test_more_bands_than_rounds_are_refused():
    with pytest.raises(ConfigurationError, match="bands must be in"):
        banded_factor(4, 5)


def whole_numbers(*shape, seed, most=10**9):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-most, most, shape, generator=generator)


def test_released_rows_are_the_inverse_times_exact_whole_numbers_also_when_resumed():
    columns = banded_factor(6, 3)
    total, noise = whole_numbers(6, 5, seed=0), whole_numbers(6, 5, seed=1, most=10**12)
    sums, rows = CorrelatedSums(columns, 1e9, 1e9), []
    for index in range(6):
        if index == 4:
            state, sums = sums.state_dict(), CorrelatedSums(columns, 1e9, 1e9)
            sums.load_state_dict(state)
        rows.append(sums.next(total[index], noise[index]).numpy())
        sums.advance()
    whole = np.round(dense(np.trunc(columns * sums.scale))).astype(np.int64)
    exact = whole @ total.numpy() + noise.numpy()
    assert np.allclose(whole @ np.array(rows), exact, rtol=1e-12)
    assert np.allclose(np.array(rows), total.numpy() + np.linalg.solve(whole, noise.numpy()))


def test_a_row_depends_on_sums_and_noise_only_through_whole_numbers_with_noise():
    """Two histories with the same C G + Z release the same bits."""
    columns = banded_factor(3, 2)
    one, other = CorrelatedSums(columns, 1e6, 1e6), CorrelatedSums(columns, 1e6, 1e6)
    whole = np.trunc(dense(columns) * one.scale).astype(np.int64)
    total, noise = whole_numbers(3, 4, seed=0, most=10**6), whole_numbers(3, 4, seed=1)
    moved = whole_numbers(3, 4, seed=2, most=10**6)
    made_up = noise - torch.from_numpy(whole @ moved.numpy())
    for index in range(3):
        first = one.next(total[index], noise[index])
        assert torch.equal(first, other.next(total[index] + moved[index], made_up[index]))
        one.advance()
        other.advance()


@pytest.mark.parametrize(("stddev", "largest"), [(1e6, 1e9), (2.0**40, 1e9), (1.0, 2.0**45)])
@pytest.mark.parametrize("bands", [1, 4])
def test_rounded_columns_are_no_longer_than_one(stddev, largest, bands):
    sums = CorrelatedSums(banded_factor(20, bands), stddev, largest)
    norms = (sums._whole.astype(object) ** 2).sum(1) / sums.scale**2
    assert max(norms) <= 1
    assert min(norms) > 1 - 4 * bands / sums.scale


def test_numbers_that_64_bits_do_not_hold_are_refused():
    with pytest.raises(ConfigurationError, match="lower noise_multiplier, or the cohort's size"):
        CorrelatedSums(banded_factor(4, 2), 2.0**44, 1.0)


def mechanism(setting, cohort, num_clients=12, num_rounds=6):
    return setting.mechanism(AccountedRun(cohort, num_clients, num_rounds, seed=0), NoiseSource(0))


def test_cost_is_that_of_the_turns_so_far():
    banded = mechanism(
        BandedMatrixDP(clip_norm=1.0, noise_multiplier=3.0), RoundRobinCohort(size=4)
    )
    assert "turns of 2 in 6 rounds at least 3 apart, 3 bands" in str(banded)
    once, twice = gaussian_epsilon(3.0, 1e-5), gaussian_epsilon(3.0 / math.sqrt(2), 1e-5)
    exact = [0.0, once, once, once, twice, twice, twice]
    found = [banded.epsilon(n) for n in range(7)]
    assert found == pytest.approx(exact, rel=1e-6)
    assert all(one >= other for one, other in zip(found, exact, strict=True))  # of the rounding


def test_noise_for_a_budget_and_less_noise_in_the_model_than_independent():
    setting = BandedMatrixDP(clip_norm=1.0, epsilon=1.0)
    banded = mechanism(setting, RoundRobinCohort(size=1), num_clients=50, num_rounds=100)
    assert banded.epsilon(100) == pytest.approx(1.0, abs=1e-3)
    assert mean_squared_error(banded.columns) < 0.15 * 50.5  # of independent noise, per unit


@pytest.mark.parametrize(
    ("bands", "cohort", "reason"),
    [
        (4, RoundRobinCohort(size=4), "some wait only 3"),
        (2, AllClients(), "some wait only 1"),
        (1, BySizeCohort(size=2), "how often a client is sampled"),
    ],
)
def test_turns_that_are_too_close_are_refused(bands, cohort, reason):
    with pytest.raises(ConfigurationError, match=reason):
        mechanism(BandedMatrixDP(clip_norm=1.0, noise_multiplier=1.0, bands=bands), cohort)


def test_turns_are_counted_over_the_cohorts_that_will_be():
    cohort = PoissonCohort(fraction=0.3)
    run = AccountedRun(cohort, 12, 6, seed=0)

    everybody = Population(np.ones(12, np.int64))
    counts = sum(np.bincount(cohort.sample(r, everybody, 0), minlength=12) for r in range(6))
    assert run.most_turns(6) == counts.max()


def test_local_noise_costs_two_clip_norms_for_each_turn():
    local = mechanism(LocalDP(clip_norm=1.0, noise_multiplier=8.0), RoundRobinCohort(size=4))
    for num_rounds, plain in (
        (1, gaussian_epsilon(4.0, 1e-5)),
        (6, gaussian_epsilon(4.0 / math.sqrt(2), 1e-5)),
    ):
        assert plain < local.epsilon(num_rounds) < plain * (1 + 1e-6)
    found = mechanism(LocalDP(clip_norm=1.0, epsilon=2.0), RoundRobinCohort(size=4))
    assert found.epsilon(6) == pytest.approx(2.0, abs=1e-3)


def test_local_noise_is_each_clients_own():
    local = mechanism(LocalDP(clip_norm=0.5, noise_multiplier=2.0), AllClients())
    release = local.client_release(0, 0.5)
    zeros = torch.zeros(20_000)
    one, other = release(zeros, 3), release(zeros, 4)
    assert float(one.std()) == pytest.approx(1.0, rel=0.03)
    assert abs(float((one * other).mean())) < 0.04
    assert torch.equal(one, local.client_release(0, 0.5)(zeros, 3))
    assert not torch.equal(one, local.client_release(1, 0.5)(zeros, 3))
