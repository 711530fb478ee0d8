"""Which clients take part in a round: pure functions of (seed, round, what is known of clients).

A sampler remembers nothing between rounds; what the server has learnt of clients is in `Population`,
which is part of the checkpoint. So a resumed run draws the cohorts that the uninterrupted one would
have drawn. Ids are returned in increasing order: the order in which clients train, and in
which their updates are added up, does not depend on the draw.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import numpy as np

from fl_lightning.core.errors import ConfigurationError
from fl_lightning.core.seeds import numpy_generator
from fl_lightning.data.cohorts.cohort_size import SizedCohort, check_fraction
from fl_lightning.data.cohorts.population import ClientIds, Population

# An empty Poisson draw is repeated at most this often: beyond, the expected size is hopeless.
MAX_REDRAWS = 1000


class CohortSampler(Protocol):
    """Draws the clients of a round."""

    def expected_size(self, num_clients: int) -> int:
        """Return the usual number of clients in a round, ≥ 1."""

    def sample(self, round_index: int, population: Population, seed: int) -> ClientIds:
        """Return the ids of the round's clients, increasing and distinct; a pure function."""


@runtime_checkable
class NeedsFreshLosses(Protocol):
    """A sampler that looks at clients' losses on the present global model.

    Before it draws, the federation measures those that it asks for and puts them into
    `Population.losses`. A forward pass over a client's training examples each.
    """

    @property
    def loss_batches(self) -> int | None:
        """Over how many batches of a client; None is all."""

    def candidates(self, round_index: int, population: Population, seed: int) -> ClientIds:
        """Return whose losses are needed, maybe nobody's; a pure function."""


@dataclass(frozen=True, kw_only=True)
class UniformCohort(SizedCohort):
    """A fixed number of clients, uniformly at random without replacement.

    Source: McMahan et al. 2017, Algorithm 1: m = max(C · K, 1).

    Args:
        fraction: share of all clients, in (0, 1]; rounded to the nearest number of clients.
        size: the number itself, ≥ 1; instead of ``fraction``.
        min_size: at least so many clients when ``fraction`` gives fewer.

    Example:
        >>> population = Population(np.full(100, 10))
        >>> UniformCohort(fraction=0.03).sample(0, population, seed=0).tolist()
        [20, 48, 99]
    """

    def sample(self, round_index: int, population: Population, seed: int) -> ClientIds:
        """Return `expected_size` distinct client ids, or all that are available."""
        generator = numpy_generator(seed, "cohort", round_index)
        there, size = population.num_available, self.size_among(population)
        # of a cohort below a fiftieth of the clients NumPy draws only the cohort (Floyd's algorithm)
        drawn = np.sort(generator.choice(there, size, replace=False))
        return drawn if population.is_available is None else population.available_ids[drawn]


@dataclass(frozen=True, kw_only=True)
class PoissonCohort:
    """Every client joins by its own coin: the cohort's size varies from round to round.

    The sampling that the usual privacy amplification theorems assume.

    Args:
        fraction: each client's probability of taking part, in (0, 1].
        min_size: draw again until so many clients join. With 0 a round may be empty: it is logged
            as empty and leaves the model as it is. Above 0 the draws are no longer independent,
            which amplification theorems need.

    Example:
        >>> population = Population(np.full(100, 10))
        >>> [len(PoissonCohort(fraction=0.1).sample(r, population, seed=0)) for r in range(5)]
        [10, 13, 17, 13, 13]
    """

    fraction: float
    min_size: int = 0

    def __post_init__(self) -> None:
        check_fraction(self.fraction)
        if self.min_size < 0:
            raise ConfigurationError(f"min_size must not be negative, got {self.min_size}")

    def expected_size(self, num_clients: int) -> int:
        """Return the expected number of clients, at least 1."""
        return max(1, round(self.fraction * num_clients))

    def sample(self, round_index: int, population: Population, seed: int) -> ClientIds:
        """Return the clients whose coins came up.

        Raises:
            ConfigurationError: if ``min_size`` was not reached in 1000 draws.
        """
        for attempt in range(MAX_REDRAWS):
            generator = numpy_generator(seed, "cohort", round_index, attempt)
            joins = generator.random(population.num_clients) < self.fraction
            if population.is_available is not None:
                joins &= population.is_available
            ids = np.flatnonzero(joins)
            if len(ids) >= self.min_size:
                return ids
        raise ConfigurationError(
            f"PoissonCohort drew fewer than min_size={self.min_size} of {population.num_clients} "
            f"clients {MAX_REDRAWS} times: raise fraction={self.fraction} or lower min_size"
        )


@dataclass(frozen=True)
class AllClients:
    """Everybody, every round."""

    def expected_size(self, num_clients: int) -> int:
        """Return the number of clients."""
        return num_clients

    def sample(self, round_index: int, population: Population, seed: int) -> ClientIds:
        """Return all ids."""
        return population.available_ids
