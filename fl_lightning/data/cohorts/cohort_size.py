"""How many clients take part: a share of them, or a number."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

from fl_lightning.core.errors import ConfigurationError
from fl_lightning.data.cohorts.population import ClientIds, Population


def check_fraction(fraction: float) -> None:
    """Refuse a share of clients outside (0, 1]."""
    if not 0 < fraction <= 1:
        raise ConfigurationError(
            f"fraction must be in (0, 1], got {fraction}: it is the share of all clients that "
            "takes part in a round. Use size for a number of clients."
        )


@dataclass(frozen=True, kw_only=True)
class SizedCohort(ABC):
    """What samplers of a number of clients have in common; a leaf has a `sample`.

    Args:
        fraction: share of all clients, in (0, 1]; rounded to the nearest number of clients.
        size: the number itself, ≥ 1; instead of ``fraction``.
        min_size: at least so many clients when ``fraction`` gives fewer.

    Raises:
        ConfigurationError: unless exactly one of fraction and size is given, each in its range.

    Example:
        >>> import numpy as np
        >>> class First(SizedCohort):
        ...     def sample(self, round_index, population, seed):
        ...         return population.available_ids[: self.size_among(population)]
        >>> population = Population(np.full(10, 5))
        >>> First(fraction=0.25).sample(0, population, seed=0).tolist()
        [0, 1]
    """

    fraction: float | None = None
    size: int | None = None
    min_size: int = 1

    def __post_init__(self) -> None:
        if (self.fraction is None) == (self.size is None):
            raise ConfigurationError(
                f"{type(self).__name__} needs either fraction or size, got fraction={self.fraction} "
                f"and size={self.size}"
            )
        if self.fraction is not None:
            check_fraction(self.fraction)
        if self.size is not None and self.size < 1:
            raise ConfigurationError(f"size must be at least 1 client, got {self.size}")
        if self.min_size < 1:
            raise ConfigurationError(f"min_size must be at least 1 client, got {self.min_size}")

    def expected_size(self, num_clients: int) -> int:
        """Return the number of clients in every round.

        Raises:
            ConfigurationError: if there are fewer.
        """
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

    def size_among(self, population: Population) -> int:
        """Return `expected_size`, or how many are available where these are fewer."""
        return min(self.expected_size(population.num_clients), population.num_available)

    @abstractmethod
    def sample(self, round_index: int, population: Population, seed: int) -> ClientIds:
        """Return the ids of the round's clients, see `CohortSampler`."""
