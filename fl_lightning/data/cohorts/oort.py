"""Oort: prefers clients with a high loss and a short duration, with some exploration.

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
from typing import final

import numpy as np

from fl_lightning.core.errors import ConfigurationError
from fl_lightning.core.seeds import numpy_generator
from fl_lightning.data.cohorts.cohort import SizedCohort
from fl_lightning.data.cohorts.population import NEVER, ClientIds, Numbers, Population
from fl_lightning.data.cohorts.weighted_cohorts import log_of, weighted_draw


@final
@dataclass(frozen=True, kw_only=True)
class OortCohort(SizedCohort):
    """Clients of high utility, and some that were never sampled.

    Args:
        fraction: share of all clients, in (0, 1]; or
        size: number of clients, ≥ 1.
        min_size: smallest number of clients if ``fraction`` gives fewer.
        max_size: largest number of clients if ``fraction`` gives more; None for no limit.
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

    exploration: float = 0.9
    exploration_decay: float = 0.98
    min_exploration: float = 0.2
    slowness: float = 2.0
    duration_quantile: float = 0.3
    cut_off: float = 0.95
    clip_quantile: float = 0.95

    def __post_init__(self) -> None:
        super().__post_init__()
        problems = [
            f"{name} must be in [0, 1], got {getattr(self, name)}"
            for name in ("exploration", "min_exploration")
            if not 0 <= getattr(self, name) <= 1
        ]
        problems += [
            f"{name} must be in (0, 1], got {getattr(self, name)}"
            for name in ("exploration_decay", "duration_quantile", "cut_off", "clip_quantile")
            if not 0 < getattr(self, name) <= 1
        ]
        if not 0 <= self.slowness < float("inf"):
            problems.append(f"slowness must be at least 0 and finite, got {self.slowness}")
        if problems:
            raise ConfigurationError("OortCohort: " + "; ".join(problems))

    def sample(self, round_index: int, population: Population, seed: int) -> ClientIds:
        """Return `expected_size` distinct client ids, or all that are available."""
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
        """Utilities of clients that were sampled before, ≥ 0, in the given order."""
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
