"""Cohorts: sizes, distinct and sorted ids, pure functions of (seed, round)."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fl_lightning.core.errors import ConfigurationError
from fl_lightning.data.cohorts.availability import AvailableCohort, Diurnal, Stretches
from fl_lightning.data.cohorts.cohort import AllClients, Cohort, PoissonCohort, UniformCohort
from fl_lightning.data.cohorts.population import Population
from fl_lightning.data.cohorts.weighted_cohorts import (
    ByLossCohort,
    BySizeCohort,
    LeastRecentCohort,
    OortCohort,
    PowerOfChoiceCohort,
    RoundRobinCohort,
)

SAMPLERS = [
    UniformCohort(fraction=0.3),
    UniformCohort(size=4),
    PoissonCohort(fraction=0.3),
    PoissonCohort(fraction=0.3, min_size=2),
    BySizeCohort(size=4),
    ByLossCohort(size=4, temperature=0.5),
    PowerOfChoiceCohort(size=4, num_candidates=7),
    OortCohort(size=4),
    LeastRecentCohort(size=4),
    AvailableCohort(UniformCohort(size=4), Stretches(fraction=0.5)),
    AvailableCohort(OortCohort(size=4), Diurnal()),
    RoundRobinCohort(size=4),
    AllClients(),
]
FIXED = [s for s in SAMPLERS if s.has_fixed_size and s.expected_size(100) == 4]


def population(num_clients):
    return Population(np.arange(1, num_clients + 1))


def known(num_clients):
    """A population of which two thirds have been seen, with losses, rounds and durations."""
    one, random = population(num_clients), np.random.default_rng(0)
    seen = np.flatnonzero(random.random(num_clients) < 0.66).tolist()
    for client in seen:
        losses, durations = {client: random.random()}, {client: random.random()}
        round_index = int(random.integers(20))
        one.note([client], round_index=round_index, losses=losses, durations=durations)
    return one


def shares(sampler, clients, num_draws=2000):
    """How often each client is drawn."""
    draws = [sampler.sample(r, clients, 0) for r in range(num_draws)]
    return np.bincount(np.concatenate(draws), minlength=clients.num_clients) / num_draws


@pytest.mark.parametrize("sampler", SAMPLERS[:-2], ids=repr)
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

    def test_every_client_is_as_likely(self):
        expected, found = 1 / 4, shares(UniformCohort(size=5), population(20))
        np.testing.assert_allclose(found, expected, atol=0.05)  # five standard deviations

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


def test_a_fraction_has_a_least_and_a_largest_size():
    sampler = UniformCohort(fraction=0.05, min_size=3, max_size=20)
    for num_clients, size in [(10, 3), (100, 5), (1000, 20)]:
        assert sampler.expected_size(num_clients) == size
        assert len(sampler.sample(0, population(num_clients), 0)) == size


class TestPoissonCohort:
    def test_clients_and_rounds_are_independent_coins(self):
        sampler, joined = PoissonCohort(fraction=0.4), np.zeros((3000, 6))
        for row in range(3000):
            joined[row, sampler.sample(row, population(6), 0)] = 1
        # five standard errors of the binomial's mean and variance, and of correlations
        assert joined.sum(1).mean() == pytest.approx(2.4, abs=0.11)
        assert joined.sum(1).var() == pytest.approx(1.44, abs=0.19)
        assert np.abs(np.corrcoef(joined.T) - np.eye(6)).max() < 0.09
        assert abs(np.corrcoef(joined[1:, 2], joined[:-1, 2])[0, 1]) < 0.09

    def test_a_round_may_be_empty_and_its_expected_size_is_not(self):
        assert PoissonCohort(fraction=0.2).expected_size(50) == 10
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


@pytest.mark.parametrize("sampler", [*FIXED, PoissonCohort(fraction=0.3), AllClients()], ids=repr)
class TestAvailability:
    @settings(max_examples=15)
    @given(round_index=st.integers(0, 200), seed=st.integers(0, 2**62))
    def test_all_available_is_the_sampler_itself(self, sampler, round_index, seed):
        wrapped = AvailableCohort(sampler, Stretches(fraction=1.0))
        expected = sampler.sample(round_index, known(23), seed)
        np.testing.assert_array_equal(wrapped.sample(round_index, known(23), seed), expected)

    @settings(max_examples=15)
    @given(
        num_clients=st.integers(7, 40),
        round_index=st.integers(0, 200),
        fraction=st.floats(0.05, 1),
        length=st.integers(1, 9),
    )
    def test_only_who_is_there_and_as_many_as_asked_for(
        self, sampler, num_clients, round_index, fraction, length
    ):
        availability = Stretches(fraction=fraction, length=length)
        there = availability.available(round_index, num_clients, 0)
        ids = AvailableCohort(sampler, availability).sample(round_index, known(num_clients), 0)
        assert there[ids].all()
        if sampler in FIXED:
            assert len(ids) == min(4, there.sum())


def test_patterns_of_availability_may_be_nested():
    """Whoever keeps to both can be asked."""
    night, away = Diurnal(mean=0.5, amplitude=0.3), Stretches(fraction=0.6, length=3)
    sampler = AvailableCohort(AvailableCohort(AllClients(), away), night)
    for index in range(20):
        there = night.available(index, 30, seed=2) & away.available(index, 30, seed=2)
        assert sampler.sample(index, population(30), 2).tolist() == np.flatnonzero(there).tolist()


class TestStretches:
    def test_the_share_and_the_length_are_the_ones_asked_for(self):
        trace = np.array(
            [Stretches(fraction=0.3, length=5).available(r, 400, 0) for r in range(100)]
        )
        assert trace.mean() == pytest.approx(0.3, abs=0.03)  # 8000 coins
        changes = (trace[1:] != trace[:-1]).mean()
        assert changes == pytest.approx(2 * 0.3 * 0.7 / 5, abs=0.01)
        for client in trace.T[:20]:  # who is there or away is so for whole stretches
            borders = np.flatnonzero(np.diff(client.astype(int)))
            assert (np.diff(borders) % 5 == 0).all()


class TestDiurnal:
    def test_is_the_stated_probability(self):
        day = Diurnal(mean=0.4, amplitude=0.3, period=8)
        for hour in range(16):
            share = day.available(hour, 20_000, 1).mean()
            assert share == pytest.approx(0.4 + 0.3 * np.sin(2 * np.pi * hour / 8), abs=0.018)

    def test_around_the_globe_it_is_always_day_somewhere(self):
        day = Diurnal(mean=0.4, amplitude=0.4, period=8, spread=1.0)
        there = np.array([day.available(hour, 20_000, 1) for hour in range(8)])
        np.testing.assert_allclose(there.mean(1), 0.4, atol=0.02)
        assert there.mean(0).std() > 0.1


def successive_inclusion(weights, size):
    """The probability that each is among ``size`` draws without replacement, by enumeration."""
    chances = np.zeros(len(weights))
    for order in itertools.permutations(range(len(weights)), size):
        left, chance = sum(weights), 1.0
        for one in order:
            chance *= weights[one] / left
            left -= weights[one]
        chances[list(order)] += chance
    return chances


class TestWeightedCohorts:
    def test_by_size_has_the_law_of_successive_draws(self):
        weights = np.array([1, 2, 3, 10, 4])
        expected = successive_inclusion(weights.tolist(), 2)
        found = shares(BySizeCohort(size=2), Population(weights), 4000)
        np.testing.assert_allclose(found, expected, atol=0.04)  # five standard errors

    def test_by_loss_is_a_softmax(self):
        clients = population(4)
        losses = dict(enumerate([0.1, 1.0, 2.0, 0.5]))
        clients.note(list(losses), round_index=0, losses=losses)
        expected = np.exp(np.array(list(losses.values())) / 0.7)
        sampler = ByLossCohort(size=1, temperature=0.7)
        found = shares(sampler, clients, 4000)
        np.testing.assert_allclose(found, expected / expected.sum(), atol=0.04)

    def test_unknown_losses_count_as_the_highest(self):
        clients = population(3)
        clients.note([0, 1], round_index=0, losses={0: 1.0, 1: 3.0})
        found = shares(ByLossCohort(size=1), clients)
        assert found[1] == pytest.approx(found[2], abs=0.06)

    @settings(max_examples=15)
    @given(round_index=st.integers(0, 1000))
    def test_power_of_choice_with_as_many_candidates_as_clients_is_by_size(self, round_index):
        one, other = PowerOfChoiceCohort(size=5, num_candidates=5), BySizeCohort(size=5)
        expected = other.sample(round_index, known(30), 0)
        np.testing.assert_array_equal(one.sample(round_index, known(30), 0), expected)

    @settings(max_examples=15)
    @given(round_index=st.integers(0, 1000))
    def test_power_of_choice_takes_the_worst_of_its_candidates(self, round_index):
        sampler, clients = PowerOfChoiceCohort(size=3, num_candidates=8), known(30)
        candidates = sampler.candidates(round_index, clients, 0)
        assert len(candidates) == 8
        chosen = sampler.sample(round_index, clients, 0)
        assert set(chosen) <= set(candidates)
        losses = np.nan_to_num(clients.losses, nan=np.inf)
        rest = np.setdiff1d(candidates, chosen)
        assert losses[chosen].min() >= losses[rest].max()

    def test_power_of_choice_is_a_lot_where_no_loss_is_known(self):
        sampler = PowerOfChoiceCohort(size=5, num_candidates=20, losses="last_known")
        found = shares(sampler, Population(np.full(30, 10)), 600)
        assert abs(600 * found - 100).max() < 40  # 100 each, by lot ± 9

    def test_clients_without_examples_come_last(self):
        clients = Population(np.array([0, 5, 0, 5]))
        assert BySizeCohort(size=2).sample(0, clients, 0).tolist() == [1, 3]
        draws = {tuple(BySizeCohort(size=3).sample(r, clients, 0).tolist()) for r in range(20)}
        assert draws == {(0, 1, 3), (1, 2, 3)}

    def test_nothing_is_asked_of_clients_whose_last_loss_will_do(self):
        for sampler in (
            ByLossCohort(size=2),
            PowerOfChoiceCohort(size=2, num_candidates=3, losses="last_known"),
        ):
            assert sampler.candidates(0, known(9), 0).tolist() == []
        everybody = ByLossCohort(size=2, losses="fresh").candidates(0, known(9), 0)
        assert everybody.tolist() == list(range(9))


@pytest.mark.parametrize("loss", [np.inf, -np.inf])
def test_a_loss_that_is_not_finite_is_unknown(loss):
    losses = {0: 1.0, 1: 2.0, 2: 0.5, 3: 0.1}
    samplers = [OortCohort(size=2), ByLossCohort(size=2, temperature=0.5)]
    for sampler in [*samplers, PowerOfChoiceCohort(size=2, num_candidates=4, losses="last_known")]:
        cohorts = []
        for strange in (loss, np.nan):
            seen = population(4)
            seen.note([0, 1, 2, 3], round_index=0, losses=losses | {3: strange})
            cohorts.append([sampler.sample(r, seen, seed=0).tolist() for r in range(1, 6)])
        assert cohorts[0] == cohorts[1]


class TestOort:
    def test_explores_first_and_never_indexes_out_of_range(self):
        """The released code fails where every client that was scored is exploited."""
        sampler, clients, seen = OortCohort(size=3, exploration=0.5), population(7), set()
        for round_index in range(40):
            ids = sampler.sample(round_index, clients, 0).tolist()
            assert len(ids) == 3
            clients.note(ids, round_index=round_index, losses={i: 1.0 + i for i in ids})
            seen |= set(ids)
        assert seen == set(range(7))

    def test_utility_by_hand(self):
        clients = Population(np.array([10, 20, 30, 40]))
        losses, durations = {0: 1.0, 1: 2.0, 3: 0.5}, {0: 1.0, 1: 4.0, 3: 1.0}
        clients.note([0, 1, 3], round_index=1, losses=losses, durations=durations)
        sampler = OortCohort(size=1, clip_quantile=1.0, duration_quantile=0.5)
        found = sampler.utilities(4, clients, np.array([0, 1, 3]))
        waited = np.sqrt(0.1 * np.log(5) / 2)
        expected = [waited, (1 + waited) * (1 / 4) ** 2, 1 / 3 + waited]
        np.testing.assert_allclose(found, expected, rtol=1e-12)

    def test_exploits_only_above_the_cut_off(self):
        clients = Population(np.full(6, 10))
        losses = {0: 1.0, 1: 0.99, 2: 0.2, 3: 0.1, 4: 0.0, 5: 0.0}
        clients.note(list(losses), round_index=0, losses=losses)
        sampler = OortCohort(size=2, clip_quantile=1.0)
        found = shares(sampler, clients, 200)
        assert found[[0, 1]].tolist() == [1.0, 1.0]


class TestTurns:
    @settings(max_examples=15)
    @given(num_clients=st.integers(4, 40), first=st.integers(0, 100))
    def test_everybody_has_as_many_turns_and_waits_no_longer_than_all_take(
        self, num_clients, first
    ):
        clients, turns = population(num_clients), np.zeros(num_clients, int)
        for round_index in range(first, first + num_clients):
            turns[RoundRobinCohort(size=4).sample(round_index, clients, 0)] += 1
        assert (turns == 4).all()
        sampler, longest = LeastRecentCohort(size=4), -(-num_clients // 4)
        for round_index in range(3 * longest):
            ids = sampler.sample(round_index, clients, 0).tolist()
            clients.note(ids, round_index=round_index, losses={})
            if round_index >= longest - 1:
                assert clients.last_rounds.min() > round_index - longest


class TestWhatASamplerSaysOfItself:
    def test_another_draw_inherits_nothing_that_privacy_counts_on(self):
        class Ours(UniformCohort):
            def sample(self, round_index, population, seed):
                return population.available_ids[:1]

        class Firsts:
            def sample(self, round_index, population, seed):
                return population.available_ids[:1]

        class Mixed(Firsts, PoissonCohort):
            pass

        class Same(PoissonCohort):
            pass

        class Said(Ours):
            is_fixed_in_advance = True

            def sample(self, round_index, population, seed):
                return population.available_ids[-1:]

        assert not Ours(size=1).is_uniform
        assert not Ours(size=1).is_fixed_in_advance
        assert (Mixed(fraction=0.5).coin, Same(fraction=0.5).coin) == (None, 0.5)
        assert (Said(size=1).is_fixed_in_advance, Said(size=1).is_uniform) == (True, False)
        assert UniformCohort(size=1).is_uniform


class First(Cohort):
    def expected_size(self, num_clients):
        return 1

    def sample(self, round_index, population, seed):
        return np.arange(1)


HOPELESS = PoissonCohort(fraction=0.5, min_size=40)
NOT_THERE = AvailableCohort(First(), Stretches(fraction=0.01))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (UniformCohort, "either fraction or size"),
        (BySizeCohort, "BySizeCohort needs either fraction or size"),
        (lambda: UniformCohort(fraction=0.5, size=3), "either fraction or size"),
        (lambda: UniformCohort(size=4, max_size=3), "max_size must be at least size and min_size"),
        (lambda: UniformCohort(fraction=0.5, min_size=2, max_size=1), "max_size must be at least"),
        (lambda: UniformCohort(size=11), "the cohort has 11 clients but there are"),
        (lambda: UniformCohort(fraction=0.1, min_size=11), "the cohort has 11 clients but"),
        (lambda: HOPELESS, r"min_size=40 of 10 clients .* raise fraction"),
        (lambda: NOT_THERE, "First draws clients that are not available"),
        (lambda: PowerOfChoiceCohort(size=4, num_candidates=3), "from 4, .* to 10, .* got 3"),
        (lambda: Diurnal(mean=0.8, amplitude=0.3), r"must be in \[0, 0.2\] .* got 0.3"),
    ],
)
def test_refuses(make, message):
    with pytest.raises(ConfigurationError, match=message):
        make().sample(0, population(10), 0)
