"""The facts about a run that its ε depends on besides the noise: which clients are sampled when."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from fl_lightning.core.errors import ConfigurationError
from fl_lightning.data.cohorts.cohort import Cohort
from fl_lightning.data.cohorts.population import ClientIds, Population


def check_fixed_in_advance(cohort: Cohort) -> None:
    """Raise ConfigurationError, with a list of alternatives, if cohorts depend on events of the run."""
    if not cohort.is_fixed_in_advance:
        raise ConfigurationError(
            f"federation.privacy: with {type(cohort).__name__} nobody knows in advance how often a "
            "client is sampled: set federation.cohort to one of AllClients, PoissonCohort, "
            "RoundRobinCohort, UniformCohort"
        )


@dataclass(frozen=True)
class Participation:
    """Number and distance of the rounds in which clients are sampled.

    Attributes:
        most: largest number of times that any client is sampled in the first r rounds, for r from 0 to
            the number of rounds, shape (num_rounds + 1,).
        separation: smallest distance, in rounds, between two rounds of the same client; the number of
            rounds if no client is sampled twice.

    Example:
        >>> from fl_lightning.data.cohorts.weighted_cohorts import RoundRobinCohort
        >>> run = AccountedRun(RoundRobinCohort(size=2), 6, 7, seed=0)
        >>> participation = run.participation()
        >>> participation.most.tolist(), participation.separation
        ([0, 1, 1, 1, 2, 2, 2, 3], 3)
    """

    most: npt.NDArray[np.int64]
    separation: int


@dataclass(frozen=True)
class LocalSampling:
    """Poisson sampling of the examples of local steps: each example independently.

    Attributes:
        num_examples: number of examples of every client, shape (num_clients,).
        batch_size: expected number of examples in a local step, B ≥ 1, if a client has that many.
        num_steps: number of local steps of every client per round, shape (num_clients,).

    Example:
        >>> local = LocalSampling(np.array([4, 100]), 10, np.array([2, 2]))
        >>> local.rates, local.expected
        (array([1. , 0.1]), array([ 4, 10]))
    """

    num_examples: npt.NDArray[np.int64]
    batch_size: int
    num_steps: npt.NDArray[np.int64]

    @property
    def rates(self) -> npt.NDArray[np.float64]:
        """Probability that an example is in a step, min(1, B / n), shape (num_clients,)."""
        return np.minimum(1.0, self.batch_size / np.maximum(self.num_examples, 1))

    @property
    def expected(self) -> npt.NDArray[np.int64]:
        """Expected number of examples in a step, min(B, n), shape (num_clients,)."""
        return np.minimum(self.batch_size, self.num_examples)


@dataclass(frozen=True)
class AccountedRun:
    """The facts about a run that its privacy mechanism needs.

    Attributes:
        cohort: sampler of the cohorts.
        num_clients: number of all clients.
        num_rounds: planned number of rounds; None if there is no end.
        seed: seed of the cohorts.
        num_coordinates: length k of an update, or an upper bound.
        fewest_survivors: smallest number of replies for which there is a sum; None if there always is.
        local: sampling of the local steps, if the mechanism needs it.
    """

    cohort: Cohort
    num_clients: int
    num_rounds: int | None
    seed: int
    num_coordinates: int = 1
    fewest_survivors: int | None = None
    local: LocalSampling | None = None

    @property
    def planned_rounds(self) -> int:
        """Planned number of rounds.

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
        """Expected number of clients in a round, > 0; it may be fractional."""
        coin = self.cohort.coin
        if coin is not None:
            return coin * self.num_clients
        return float(self.cohort.expected_size(self.num_clients))

    def cohorts(self, num_rounds: int) -> Iterator[ClientIds]:
        """Yield the cohorts of the first rounds.

        Raises:
            ConfigurationError: if cohorts depend on events of the run.
        """
        check_fixed_in_advance(self.cohort)
        population = Population(np.ones(self.num_clients, np.int64))
        for index in range(num_rounds):
            yield self.cohort.sample(index, population, self.seed)

    def participation(self) -> Participation:
        """Count how often clients are sampled, over all cohorts of the run.

        Raises:
            ConfigurationError: if cohorts depend on events of the run.
        """
        counts = np.zeros(self.num_clients, np.int64)
        last = np.full(self.num_clients, -1, np.int64)
        most, separation = [0], self.planned_rounds
        for index, ids in enumerate(self.cohorts(self.planned_rounds)):
            again = ids[last[ids] >= 0]
            if len(again):
                separation = min(separation, int((index - last[again]).min()))
            last[ids] = index
            counts[ids] += 1
            most.append(max(most[-1], int(counts[ids].max(initial=0))))
        return Participation(np.array(most), separation)


@dataclass
class MostTurns:
    """Largest number of times that a client is sampled, after any number of rounds; computed on demand.

    Example:
        >>> from fl_lightning.data.cohorts.weighted_cohorts import RoundRobinCohort
        >>> turns = MostTurns(AccountedRun(RoundRobinCohort(size=2), 6, None, seed=0))
        >>> turns(4), turns(1)
        (2, 1)
    """

    run: AccountedRun
    _most: list[int] = field(default_factory=lambda: [0])

    def __call__(self, rounds: int) -> int:
        """Return the number after ``rounds`` rounds; ``rounds`` itself if cohorts depend on the run."""
        if not self.run.cohort.is_fixed_in_advance:
            return rounds
        if len(self._most) <= rounds:
            ahead = max(2 * rounds, self.run.num_rounds or 0)
            counts, self._most = np.zeros(self.run.num_clients, np.int64), [0]
            for ids in self.run.cohorts(ahead):
                counts[ids] += 1
                self._most.append(max(self._most[-1], int(counts[ids].max(initial=0))))
        return self._most[rounds]
