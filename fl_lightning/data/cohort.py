"""Which clients take part in a round: pure functions of (seed, round).

Nothing is remembered between rounds, so a resumed run draws the cohorts that the uninterrupted one
would have drawn. Ids are returned in increasing order: the order in which clients train, and in
which their updates are added up, does not depend on the draw.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from fl_lightning.core.errors import ConfigurationError
from fl_lightning.core.seeds import numpy_generator

ClientIds = npt.NDArray[np.int64]

# An empty Poisson draw is repeated at most this often: beyond, the expected size is hopeless.
MAX_REDRAWS = 1000


@dataclass(frozen=True)
class Population:
    """What the server knows of all clients.

    Attributes:
        num_examples: training examples of each client, shape (num_clients,).
    """

    num_examples: npt.NDArray[np.int64]

    @property
    def num_clients(self) -> int:
        """Number of clients, sampled or not."""
        return len(self.num_examples)


class CohortSampler(Protocol):
    """Draws the clients of a round."""

    def expected_size(self, num_clients: int) -> int:
        """Return the usual number of clients in a round, ≥ 1."""

    def sample(self, round_index: int, population: Population, seed: int) -> ClientIds:
        """Return the ids of the round's clients, increasing and distinct; a pure function."""


def _check_fraction(fraction: float) -> None:
    if not 0 < fraction <= 1:
        raise ConfigurationError(
            f"fraction must be in (0, 1], got {fraction}: it is the share of all clients that "
            "takes part in a round. Use size for a number of clients."
        )


@dataclass(frozen=True, kw_only=True)
class UniformCohort:
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

    fraction: float | None = None
    size: int | None = None
    min_size: int = 1

    def __post_init__(self) -> None:
        if (self.fraction is None) == (self.size is None):
            raise ConfigurationError(
                "UniformCohort needs either fraction or size, "
                f"got fraction={self.fraction} and size={self.size}"
            )
        if self.fraction is not None:
            _check_fraction(self.fraction)
        if self.size is not None and self.size < 1:
            raise ConfigurationError(f"size must be at least 1 client, got {self.size}")
        if self.min_size < 1:
            raise ConfigurationError(f"min_size must be at least 1 client, got {self.min_size}")

    def expected_size(self, num_clients: int) -> int:
        """Return the number of clients in every round."""
        size = self.size
        if size is None:
            assert self.fraction is not None
            size = max(self.min_size, round(self.fraction * num_clients))
        if size > num_clients:
            raise ConfigurationError(
                f"the cohort has {size} clients but there are only {num_clients}: "
                "lower size or min_size, or raise data.num_clients"
            )
        return size

    def sample(self, round_index: int, population: Population, seed: int) -> ClientIds:
        """Return `expected_size` distinct client ids."""
        generator = numpy_generator(seed, "cohort", round_index)
        size = self.expected_size(population.num_clients)
        # of a cohort below a fiftieth of the clients NumPy draws only the cohort (Floyd's algorithm)
        return np.sort(generator.choice(population.num_clients, size, replace=False))


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
        _check_fraction(self.fraction)
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
            ids = np.flatnonzero(generator.random(population.num_clients) < self.fraction)
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
        return np.arange(population.num_clients)
