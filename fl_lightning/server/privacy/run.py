"""What the privacy of a run depends on besides its noise: who takes part when."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from fl_lightning.core.errors import ConfigurationError
from fl_lightning.data.cohort import AllClients, CohortSampler, PoissonCohort, UniformCohort
from fl_lightning.data.population import Population
from fl_lightning.data.turns import RoundRobinCohort

# Cohorts that depend on the seed and the round, and on nothing that clients do.
_FIXED_IN_ADVANCE = (AllClients, PoissonCohort, RoundRobinCohort, UniformCohort)


def check_fixed_in_advance(cohort: CohortSampler) -> None:
    """Refuse cohorts that depend on what happens in the run.

    Raises:
        ConfigurationError: saying which do not.
    """
    if type(cohort) not in _FIXED_IN_ADVANCE:
        names = ", ".join(kind.__name__ for kind in _FIXED_IN_ADVANCE)
        raise ConfigurationError(
            f"federation.privacy: with {type(cohort).__name__} nobody knows in advance how often a "
            f"client takes part: set federation.cohort to one of {names}"
        )


@dataclass(frozen=True)
class Participation:
    """How often clients take part.

    Attributes:
        most: in so many rounds no client takes part more often, shape (num_rounds + 1,).
        separation: rounds from one turn of a client to its next, at least; the number of rounds if
            nobody has two turns.

    Example:
        >>> run = Run(RoundRobinCohort(size=2), 6, 7, seed=0)
        >>> participation = run.participation()
        >>> participation.most.tolist(), participation.separation
        ([0, 1, 1, 1, 2, 2, 2, 3], 3)
    """

    most: npt.NDArray[np.int64]
    separation: int


@dataclass(frozen=True)
class Run:
    """A run as its privacy mechanism sees it.

    Attributes:
        cohort: who is asked.
        num_clients: how many there are.
        num_rounds: that are planned; None if there is no end.
        seed: of the cohorts.
        num_coordinates: numbers in an update, k, or more.
    """

    cohort: CohortSampler
    num_clients: int
    num_rounds: int | None
    seed: int
    num_coordinates: int = 1

    @property
    def planned_rounds(self) -> int:
        """The number of rounds.

        Raises:
            ConfigurationError: if there is no end.
        """
        if self.num_rounds is None:
            raise ConfigurationError(
                "federation.privacy: noise can only be fitted to a known number of rounds: set "
                "trainer.max_epochs"
            )
        return self.num_rounds

    @property
    def expected_cohort(self) -> float:
        """The expected number of clients in a round, > 0, which need not be whole."""
        if isinstance(self.cohort, PoissonCohort):
            return self.cohort.fraction * self.num_clients
        return float(self.cohort.expected_size(self.num_clients))

    def participation(self) -> Participation:
        """Return how often clients take part, by going through all cohorts of the run.

        Raises:
            ConfigurationError: if cohorts depend on what happens in the run.
        """
        check_fixed_in_advance(self.cohort)
        population = Population(np.ones(self.num_clients, np.int64))
        counts = np.zeros(self.num_clients, np.int64)
        last = np.full(self.num_clients, -1, np.int64)
        most, separation = [0], self.planned_rounds
        for index in range(self.planned_rounds):
            ids = self.cohort.sample(index, population, self.seed)
            again = ids[last[ids] >= 0]
            if len(again):
                separation = min(separation, int((index - last[again]).min()))
            last[ids] = index
            counts[ids] += 1
            most.append(max(most[-1], int(counts[ids].max(initial=0))))
        return Participation(np.array(most), separation)
