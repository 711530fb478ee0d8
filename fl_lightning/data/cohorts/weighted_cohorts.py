"""Cohort samplers: by size, by loss, power of choice, round robin, least recent, and Oort.

    by size:            P(k) ∝ n_k
    by loss:            P(k) ∝ exp(F_k / temperature)
    power of choice:    d candidates by size; of these the m with the highest F_k

all without replacement. F_k is client k's last known training loss, or its loss on the current global
model, measured before the draw.

Sources: by size, Li et al. 2020 (FedProx, 1812.06127), Algorithm 2, there with replacement; by
loss, Goetz et al. 2019, *Active federated learning* (1909.12641), section 3, without its uniform
part; power of choice, Cho et al. 2020 (2010.01243), Algorithm 1 (π_pow-d; with few ``loss_batches``
π_cpow-d, with ``last_known`` losses π_rpow-d). An unknown loss counts as the highest, so that every
client is sampled eventually.

A draw of exactly m clients without replacement with weights w_i takes the m smallest of

    E_i / w_i,   E_i ~ Exp(1)

Source: Efraimidis and Spirakis 2006, Information Processing Letters 97(5), algorithm A. It has the
distribution of drawing one after the other with probability w_i / Σ w over the remaining ones.

    round robin:    clients r m, r m + 1, … (modulo their number) in round r
    least recent:   the m clients whose last round is longest ago, ties at random

Oort: prefers clients with a high loss and a short duration, with some exploration.

    U_k = clip(n_k F_k), scaled to [0, 1]            statistical utility
          + sqrt(0.1 ln R / L_k)                     bonus for the time since its last round L_k
    U_k ← U_k (T / t_k)^α  if t_k > T                penalty for slow clients

(1 - ε) m clients are drawn with P ∝ U among those with at least 95 % of the utility of the (1 - ε) m-th
client, ε m among clients that were never sampled; ε falls from round to round.

Source: Lai et al. 2021, OSDI (2010.06081), Algorithm 1, with the scaling of the released code, where
α = 2, ε = 0.9 · 0.98^r ≥ 0.2 and utilities above the 95th percentile are clipped.
Differs: the server knows a client's mean loss F_k and not that of each example, so it uses n_k F_k
instead of n_k sqrt(mean loss²), of which it is a lower bound; T is a fixed quantile of the observed
durations, without a pacer; new clients are drawn by size, because their speeds are unknown; once all
clients were sampled, the cut-off is that of the last client.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar, Literal, final

import numpy as np
import numpy.typing as npt
from typing_extensions import override

from fl_lightning.core.errors import ConfigurationError
from fl_lightning.core.seeds import numpy_generator
from fl_lightning.data.cohorts.cohort import SizedCohort
from fl_lightning.data.cohorts.population import NEVER, ClientIds, Numbers, Population

Losses = Literal["last_known", "fresh"]


@final
@dataclass(frozen=True, kw_only=True)
class BySizeCohort(SizedCohort):
    """Draws a fixed number of clients, with probability proportional to their number of examples.

    Args: those of `UniformCohort`.

    Example:
        >>> population = Population(np.array([1, 1, 1, 500, 500]))
        >>> BySizeCohort(size=2).sample(0, population, seed=0).tolist()
        [3, 4]
    """

    @override
    def sample(self, round_index: int, population: Population, seed: int) -> ClientIds:
        size = self.expected_size(population.num_clients)
        return _draw_by_size(size, round_index, population, seed)


@dataclass(frozen=True, kw_only=True)
class LossCohort(SizedCohort):
    """Base of samplers that draw clients by loss: the last known loss, or a fresh loss on the current model."""

    ranges: ClassVar[dict[str, str]] = {"loss_batches": "at least 1 batch"}

    losses: Losses = "last_known"
    loss_batches: int | None = None

    @property
    @override
    def needs_fresh_losses(self) -> bool:
        return self.losses == "fresh"

    @override
    def candidates(self, round_index: int, population: Population, seed: int) -> ClientIds:
        return population.available_ids if self.losses == "fresh" else np.empty(0, np.int64)


@final
@dataclass(frozen=True, kw_only=True)
class ByLossCohort(LossCohort):
    """Draws a fixed number of clients, with probability proportional to exp(loss / temperature).

    The size options are those of `UniformCohort`.

    Args:
        temperature: > 0, in units of the loss; a high temperature makes probabilities equal.
        losses: ``last_known``, from the last round of each client, or ``fresh``, of all clients on the
            current model, which costs a forward pass over all their examples.
        loss_batches: number of batches per client for fresh losses; None for all.

    Example:
        >>> population = Population(np.array([10, 10, 10]))
        >>> population.note([0, 1, 2], round_index=0, losses={0: 0.1, 1: 9.0, 2: 0.2})
        >>> ByLossCohort(size=1).sample(1, population, seed=0).tolist()
        [1]
    """

    ranges: ClassVar[dict[str, str]] = {
        "temperature": "greater than 0 and finite: use UniformCohort for equal probabilities"
    }

    temperature: float = 1.0

    @override
    def sample(self, round_index: int, population: Population, seed: int) -> ClientIds:
        ids = population.available_ids
        losses = population.losses[ids]
        highest = np.nanmax(losses) if not np.isnan(losses).all() else 0.0
        logs = np.nan_to_num(losses, nan=highest) / self.temperature
        size = self.expected_size(population.num_clients)
        return ids[weighted_draw(logs, size, numpy_generator(seed, "cohort", round_index))]


@final
@dataclass(frozen=True, kw_only=True)
class PowerOfChoiceCohort(LossCohort):
    """Draws d candidates, larger clients with higher probability, and selects from them the m with the highest loss.

    An unknown loss counts as the highest. With d = m it draws the same clients as `BySizeCohort`. The size
    options are those of `UniformCohort`.

    Args:
        num_candidates: d, from m to the number of clients.
        losses: ``fresh``, of the candidates on the current model (a forward pass over their examples),
            or ``last_known``, which costs nothing.
        loss_batches: number of batches per candidate for fresh losses; None for all.

    Raises:
        ConfigurationError: if there are fewer candidates than clients to choose.

    Example:
        >>> population = Population(np.array([10, 10, 10, 10]))
        >>> losses = {0: 0.1, 1: 0.9, 2: 0.2, 3: 0.7}
        >>> population.note([0, 1, 2, 3], round_index=0, losses=losses)
        >>> PowerOfChoiceCohort(size=2, num_candidates=4).sample(1, population, seed=0).tolist()
        [1, 3]
    """

    ranges: ClassVar[dict[str, str]] = {"num_candidates": "at least 1"}

    num_candidates: int
    losses: Losses = "fresh"

    @override
    def expected_size(self, num_clients: int) -> int:
        size = super().expected_size(num_clients)
        if not size <= self.num_candidates <= num_clients:
            raise ConfigurationError(
                f"num_candidates must be from {size}, the cohort's size, to {num_clients}, the "
                f"number of clients, got {self.num_candidates}: the cohort is chosen among them"
            )
        return size

    @override
    def candidates(self, round_index: int, population: Population, seed: int) -> ClientIds:
        if self.losses != "fresh":
            return np.empty(0, np.int64)
        return _draw_by_size(self.num_candidates, round_index, population, seed)

    @override
    def sample(self, round_index: int, population: Population, seed: int) -> ClientIds:
        size = self.expected_size(population.num_clients)
        drawn = _draw_by_size(self.num_candidates, round_index, population, seed)
        losses = np.nan_to_num(population.losses[drawn], nan=np.inf)
        # as long as no loss is known, all are equal
        lots = numpy_generator(seed, "cohort", round_index, 1).random(len(drawn))
        return np.sort(drawn[np.lexsort((lots, -losses))[:size]])


def _draw_by_size(size: int, round_index: int, population: Population, seed: int) -> ClientIds:
    ids = population.available_ids
    logs = log_of(population.num_examples[ids])
    return ids[weighted_draw(logs, size, numpy_generator(seed, "cohort", round_index))]


def weighted_draw(log_weights: Numbers, size: int, generator: np.random.Generator) -> ClientIds:
    """Draw distinct positions, with probability proportional to their weights; return them in increasing order.

    Args:
        log_weights: logarithms of the weights, shape (n,); -inf for weight 0. Positions of weight 0 are
            drawn uniformly, and only if no others are left.
        size: number of positions; at most n are returned.
        generator: random generator; n numbers are drawn for any weights.

    Example:
        >>> weights = np.array([1.0, 0.0, 5.0, 1.0])
        >>> with np.errstate(divide="ignore"):
        ...     logs = np.log(weights)
        >>> weighted_draw(logs, 3, np.random.default_rng(0))
        array([0, 2, 3])
    """
    draws: npt.NDArray[np.float64] = np.log(generator.standard_exponential(len(log_weights)))
    size = min(size, len(draws))
    if not size:
        return np.empty(0, np.int64)
    keys = draws - log_weights
    if np.count_nonzero(np.isfinite(keys)) < size:  # positions of weight 0, ordered by their draws
        order = np.lexsort((draws, keys))
    else:
        order = np.argpartition(keys, size - 1)
    return np.sort(order[:size])


def log_of(weights: npt.NDArray[np.generic]) -> Numbers:
    """Return the logarithms of weights ≥ 0; -inf for weight 0."""
    with np.errstate(divide="ignore"):
        logs: Numbers = np.log(weights.astype(np.float64))
    return logs


@final
@dataclass(frozen=True, kw_only=True)
class RoundRobinCohort(SizedCohort):
    """Selects a fixed number of clients per round, in turn by id; unavailable clients are skipped.

    Args: those of `UniformCohort`.

    Example:
        >>> population = Population(np.full(5, 10))
        >>> [RoundRobinCohort(size=2).sample(r, population, seed=0).tolist() for r in range(3)]
        [[0, 1], [2, 3], [0, 4]]
    """

    is_fixed_in_advance: ClassVar[bool] = True

    @override
    def sample(self, round_index: int, population: Population, seed: int) -> ClientIds:
        size = self.expected_size(population.num_clients)
        start = round_index * size % population.num_clients
        ids = population.available_ids
        in_turn = np.roll(ids, -int(np.searchsorted(ids, start)))
        return np.sort(in_turn[:size])


@final
@dataclass(frozen=True, kw_only=True)
class LeastRecentCohort(SizedCohort):
    """Selects a fixed number of clients, those sampled longest ago; random among equals.

    If all n clients are available, each is sampled again after at most ⌈n / m⌉ rounds.

    Args: those of `UniformCohort`.

    Example:
        >>> population = Population(np.full(4, 10))
        >>> population.note([1, 3], round_index=0, losses={})
        >>> LeastRecentCohort(size=2).sample(1, population, seed=0).tolist()
        [0, 2]
    """

    @override
    def sample(self, round_index: int, population: Population, seed: int) -> ClientIds:
        ids = population.available_ids
        size = self.size_among(population)
        if not size:
            return ids
        # random numbers in [0, 1) order only clients with the same last round
        lots = numpy_generator(seed, "cohort", round_index).random(len(ids))
        order = np.argpartition(population.last_rounds[ids] + lots, size - 1)
        return np.sort(ids[order[:size]])


@final
@dataclass(frozen=True, kw_only=True)
class OortCohort(SizedCohort):
    """Draws some clients of high utility (high loss, short duration), and some that were never sampled.

    The size options are those of `UniformCohort`.

    Args:
        exploration: ε in round 0, in [0, 1].
        exploration_decay: factor of ε from round to round, in (0, 1].
        min_exploration: smallest ε, in [0, 1].
        slowness: α ≥ 0; 0 ignores durations, which are known only in a federation with ``devices``.
        duration_quantile: quantile of the observed durations that is T, in (0, 1].
        cut_off: share of the cut-off utility that suffices, in (0, 1].
        clip_quantile: utilities above this quantile are clipped to it, in (0, 1].

    Example:
        >>> population = Population(np.array([10, 10, 10, 10]))
        >>> losses = {0: 0.1, 1: 0.9, 2: 0.2, 3: 0.7}
        >>> population.note([0, 1, 2, 3], round_index=0, losses=losses)
        >>> OortCohort(size=2).sample(1, population, seed=0).tolist()
        [1, 3]
    """

    ranges: ClassVar[dict[str, str]] = {
        **dict.fromkeys(("exploration", "min_exploration"), "in [0, 1]"),
        **dict.fromkeys(("exploration_decay", "duration_quantile"), "in (0, 1]"),
        **dict.fromkeys(("cut_off", "clip_quantile"), "in (0, 1]"),
        "slowness": "at least 0 and finite",
    }

    exploration: float = 0.9
    exploration_decay: float = 0.98
    min_exploration: float = 0.2
    slowness: float = 2.0
    duration_quantile: float = 0.3
    cut_off: float = 0.95
    clip_quantile: float = 0.95

    @override
    def sample(self, round_index: int, population: Population, seed: int) -> ClientIds:
        ids = population.available_ids
        size = self.size_among(population)
        is_seen = population.last_rounds[ids] != NEVER
        seen, unseen = ids[is_seen], ids[~is_seen]
        explore = max(self.min_exploration, self.exploration * self.exploration_decay**round_index)
        num_exploited = min(int(size * (1 - explore)), len(seen))
        num_explored = min(size - num_exploited, len(unseen))
        num_exploited = size - num_explored
        generator = numpy_generator(seed, "cohort", round_index)
        utilities = self.utilities(round_index, population, seen)
        logs = log_of(utilities)
        if num_exploited:
            last = np.partition(utilities, -num_exploited)[-num_exploited]
            logs[utilities < self.cut_off * last] = -np.inf
        exploited = seen[weighted_draw(logs, num_exploited, generator)]
        sizes = log_of(population.num_examples[unseen])
        explored = unseen[weighted_draw(sizes, num_explored, generator)]
        return np.sort(np.concatenate([exploited, explored]))

    def utilities(self, round_index: int, population: Population, clients: ClientIds) -> Numbers:
        """Return Oort's utility of each given client, ≥ 0; all of them must have been sampled before."""
        if not len(clients):
            return np.empty(0)
        losses = np.nan_to_num(population.losses[clients])  # a failed client has no loss
        worth: Numbers = np.maximum(losses, 0) * population.num_examples[clients]
        worth = np.minimum(worth, np.quantile(worth, self.clip_quantile))
        width = worth.max() - worth.min()
        worth = (worth - worth.min()) / width if width else np.ones_like(worth)
        waiting = 0.1 * math.log(round_index + 1) / (population.last_rounds[clients] + 1)
        utilities: Numbers = worth + np.sqrt(waiting)
        durations = population.durations[clients]
        if not np.isnan(durations).all():
            preferred = np.nanquantile(durations, self.duration_quantile)
            factors = (preferred / np.fmax(durations, preferred)) ** self.slowness
            utilities = utilities * factors
        return utilities
