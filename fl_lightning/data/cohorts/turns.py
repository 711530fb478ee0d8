"""Cohorts that take turns, so that everybody is asked equally often.

round robin:    round r asks the clients r m, r m + 1, … (modulo their number)
least recent:   the m clients whose last round is longest ago; among equals by lot
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, final

import numpy as np

from fl_lightning.core.seeds import numpy_generator
from fl_lightning.data.cohorts.cohort import SizedCohort
from fl_lightning.data.cohorts.population import ClientIds, Population


@final
@dataclass(frozen=True, kw_only=True)
class RoundRobinCohort(SizedCohort):
    """A fixed number of clients, one after the other in the order of their ids.

    Who is not available is passed over.

    Args: those of `UniformCohort`.

    Example:
        >>> population = Population(np.full(5, 10))
        >>> [RoundRobinCohort(size=2).sample(r, population, seed=0).tolist() for r in range(3)]
        [[0, 1], [2, 3], [0, 4]]
    """

    is_fixed_in_advance: ClassVar[bool] = True

    def sample(self, round_index: int, population: Population, seed: int) -> ClientIds:
        """Return `expected_size` distinct client ids, or all that are available."""
        size = self.expected_size(population.num_clients)
        start = round_index * size % population.num_clients
        ids = population.available_ids
        in_turn = np.roll(ids, -int(np.searchsorted(ids, start)))
        return np.sort(in_turn[:size])


@final
@dataclass(frozen=True, kw_only=True)
class LeastRecentCohort(SizedCohort):
    """A fixed number of clients: those that have waited longest, by lot among equals.

    Of n clients nobody waits longer than n / m rounds, also where clients come and go.

    Args: those of `UniformCohort`.

    Example:
        >>> population = Population(np.full(4, 10))
        >>> population.note([1, 3], round_index=0, losses={})
        >>> LeastRecentCohort(size=2).sample(1, population, seed=0).tolist()
        [0, 2]
    """

    def sample(self, round_index: int, population: Population, seed: int) -> ClientIds:
        """Return `expected_size` distinct client ids, or all that are available."""
        ids = population.available_ids
        size = self.size_among(population)
        if not size:
            return ids
        # lots lie in [0, 1): they decide only among clients with the same last round
        lots = numpy_generator(seed, "cohort", round_index).random(len(ids))
        order = np.argpartition(population.last_rounds[ids] + lots, size - 1)
        return np.sort(ids[order[:size]])
