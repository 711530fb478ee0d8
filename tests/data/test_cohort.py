"""Cohorts: sizes, distinct and sorted ids, pure functions of (seed, round)."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fl_lightning.core.errors import ConfigurationError
from fl_lightning.data.cohort import AllClients, PoissonCohort, Population, UniformCohort

SAMPLERS = [
    UniformCohort(fraction=0.3),
    UniformCohort(size=4),
    PoissonCohort(fraction=0.3),
    PoissonCohort(fraction=0.3, min_size=2),
    AllClients(),
]


def population(num_clients):
    return Population(np.arange(1, num_clients + 1))


@pytest.mark.parametrize("sampler", SAMPLERS, ids=repr)
class TestEverySampler:
    @given(
        num_clients=st.integers(10, 60),
        round_index=st.integers(0, 10_000),
        seed=st.integers(0, 2**62),
    )
    def test_ids_are_distinct_increasing_and_a_pure_function(
        self, sampler, num_clients, round_index, seed
    ):
        ids = sampler.sample(round_index, population(num_clients), seed)
        assert ids.dtype == np.int64
        assert (np.diff(ids) > 0).all()
        assert set(ids) <= set(range(num_clients))
        again = sampler.sample(round_index, population(num_clients), seed)
        np.testing.assert_array_equal(ids, again)

    def test_leaves_the_global_generator_alone(self, sampler):
        before = np.random.get_state()[1].copy()
        sampler.sample(0, population(20), 0)
        np.testing.assert_array_equal(np.random.get_state()[1], before)


@pytest.mark.parametrize("sampler", SAMPLERS[:-1], ids=repr)
def test_rounds_and_seeds_draw_differently(sampler):
    def draws(keys):
        return {tuple(sampler.sample(r, population(50), seed).tolist()) for r, seed in keys}

    assert len(draws((r, 0) for r in range(20))) == 20
    assert len(draws((0, seed) for seed in range(20))) == 20


class TestUniformCohort:
    @given(num_clients=st.integers(1, 500), fraction=st.floats(1e-3, 1))
    def test_has_the_nearest_size_and_at_least_one(self, num_clients, fraction):
        sampler = UniformCohort(fraction=fraction)
        size = len(sampler.sample(0, population(num_clients), 0))
        assert size == sampler.expected_size(num_clients)
        assert size >= 1
        assert abs(size - fraction * num_clients) <= (0.5 if size > 1 else 1)

    def test_size_is_exact(self):
        assert [len(UniformCohort(size=7).sample(r, population(9), 0)) for r in range(9)] == [7] * 9

    def test_all_of_them(self):
        expected = AllClients().sample(0, population(9), 0).tolist()
        assert expected == list(range(9))
        for sampler in (UniformCohort(size=9), UniformCohort(fraction=1.0)):
            assert sampler.sample(3, population(9), 0).tolist() == expected

    def test_min_size_lifts_a_small_fraction_only(self):
        sampler = UniformCohort(fraction=0.1, min_size=3)
        assert [sampler.expected_size(n) for n in (10, 30, 100)] == [3, 3, 10]

    def test_every_client_is_as_likely(self):
        draws = [UniformCohort(size=5).sample(r, population(20), 0) for r in range(2000)]
        counts = np.bincount(np.concatenate(draws), minlength=20)
        np.testing.assert_allclose(counts, 500, atol=100)  # five standard deviations

    @given(
        num_clients=st.integers(10_001, 10**7),
        size=st.integers(1, 200),
        seed=st.integers(0, 2**62),
    )
    def test_of_many_clients_is_distinct_and_increasing(self, num_clients, size, seed):
        many = Population(np.broadcast_to(np.int64(1), num_clients))
        ids = UniformCohort(size=size).sample(0, many, seed)
        assert len(ids) == size
        assert (np.diff(ids) > 0).all()
        assert ids[0] >= 0
        assert ids[-1] < num_clients

    def test_of_many_clients_every_region_is_as_likely(self):
        many = Population(np.broadcast_to(np.int64(1), 1_000_000))
        ids = np.concatenate([UniformCohort(size=100).sample(r, many, 0) for r in range(400)])
        counts = np.bincount(ids // 50_000, minlength=20)
        np.testing.assert_allclose(counts, 2000, atol=220)  # five standard deviations

    @pytest.mark.parametrize(
        ("settings", "message"),
        [
            ({}, "either fraction or size"),
            ({"fraction": 0.5, "size": 3}, "either fraction or size"),
            ({"fraction": 0.0}, r"fraction must be in \(0, 1\], got 0.0"),
            ({"fraction": 1.5}, r"fraction must be in \(0, 1\], got 1.5"),
            ({"fraction": float("nan")}, r"fraction must be in \(0, 1\], got nan"),
            ({"size": 0}, "size must be at least 1 client, got 0"),
            ({"fraction": 0.5, "min_size": 0}, "min_size must be at least 1 client, got 0"),
        ],
    )
    def test_refuses(self, settings, message):
        with pytest.raises(ConfigurationError, match=message):
            UniformCohort(**settings)

    @pytest.mark.parametrize("settings", [{"size": 11}, {"fraction": 0.1, "min_size": 11}])
    def test_refuses_more_clients_than_there_are(self, settings):
        with pytest.raises(ConfigurationError, match="the cohort has 11 clients but there are"):
            UniformCohort(**settings).sample(0, population(10), 0)


class TestPoissonCohort:
    def test_size_has_the_binomials_mean_and_variance(self):
        sampler = PoissonCohort(fraction=0.2)
        sizes = [len(sampler.sample(r, population(50), 0)) for r in range(3000)]
        assert np.mean(sizes) == pytest.approx(10, abs=0.26)  # five standard errors
        assert np.var(sizes) == pytest.approx(8, abs=1.1)
        assert sampler.expected_size(50) == 10

    def test_clients_join_independently(self):
        sampler, joined = PoissonCohort(fraction=0.4), np.zeros((3000, 6))
        for row in range(3000):
            joined[row, sampler.sample(row, population(6), 0)] = 1
        correlation = np.corrcoef(joined.T) - np.eye(6)
        assert np.abs(correlation).max() < 0.09  # five standard deviations

    def test_rounds_are_independent(self):
        sampler, joined = PoissonCohort(fraction=0.4), np.zeros(3000)
        for row in range(3000):
            joined[row] = 2 in sampler.sample(row, population(6), 0)
        assert abs(np.corrcoef(joined[1:], joined[:-1])[0, 1]) < 0.09

    def test_fraction_one_is_everybody(self):
        assert PoissonCohort(fraction=1.0).sample(0, population(7), 0).tolist() == list(range(7))

    def test_a_round_may_be_empty_and_its_expected_size_is_not(self):
        sampler = PoissonCohort(fraction=0.01)
        assert {len(sampler.sample(r, population(3), 0)) for r in range(20)} >= {0}
        assert sampler.expected_size(3) == 1

    def test_min_size_is_kept_and_nothing_else_changes(self):
        free, least = PoissonCohort(fraction=0.1), PoissonCohort(fraction=0.1, min_size=2)
        for round_index in range(200):
            one, other = (s.sample(round_index, population(10), 0) for s in (free, least))
            assert len(other) >= 2
            if len(one) >= 2:
                np.testing.assert_array_equal(one, other)

    def test_a_hopeless_min_size_gives_up_with_a_way_out(self):
        with pytest.raises(ConfigurationError, match=r"min_size=4 of 3 clients .* raise fraction"):
            PoissonCohort(fraction=0.5, min_size=4).sample(0, population(3), 0)

    @pytest.mark.parametrize(
        ("settings", "message"),
        [
            ({"fraction": 0.0}, "fraction must be in"),
            ({"fraction": 0.5, "min_size": -1}, "min_size must not be negative, got -1"),
        ],
    )
    def test_refuses(self, settings, message):
        with pytest.raises(ConfigurationError, match=message):
            PoissonCohort(**settings)
