"""Cohort samplers: pure functions of (seed, round, population).

A sampler has no state; the server's information about clients is in `Population`, which is part of the
checkpoint. So a resumed run draws the same cohorts as an uninterrupted one. Ids are in increasing
order: the order in which clients train, and in which their updates are added up, does not depend on
the draw.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar, final

import numpy as np
from typing_extensions import override

from fl_lightning.core.errors import ConfigurationError, Ranged
from fl_lightning.core.seeds import is_secret, numpy_generator, uniform_stream
from fl_lightning.core.traits import Trait, Traits
from fl_lightning.data.cohorts.population import ClientIds, Population

# A Poisson draw that is too small is repeated at most this often; after that many, min_size is out of reach.
MAX_REDRAWS = 1000


_OF_COHORTS = Traits(
    needs={Trait.COHORTS: "chooses who takes part in a round"},
    instead={Trait.COHORTS: "leave cohort out"},
)
_OF_FRESH_LOSSES = Traits(
    needs={
        Trait.RETURNED_LOSS: "measures the loss that training_step returns",
        Trait.SIMULATION: "needs clients' losses on the current model",
    },
    instead=dict.fromkeys(
        (Trait.RETURNED_LOSS, Trait.SIMULATION),
        "set its losses to last_known, or use UniformCohort",
    ),
)


class Cohort(ABC):
    """Base of the cohort samplers: pure functions that draw the clients of a round.

    The ε of a private run depends on the attributes below, on `coin` and on `redrawn_below`. A subclass
    that overrides ``sample`` does not inherit them, and may define them again.

    Attributes:
        is_uniform: whether all sets of `expected_size` clients are equally likely.
        is_fixed_in_advance: whether the draw depends only on seed and round, not on clients' losses or
            durations.
        has_fixed_size: whether every round has `expected_size` clients.

    Example:
        >>> class Evens(Cohort):
        ...     def expected_size(self, num_clients):
        ...         return max(1, num_clients // 2)
        ...     def sample(self, round_index, population, seed):
        ...         return population.available_ids[::2]
        >>> Evens().sample(0, Population(np.full(5, 10)), seed=0).tolist()
        [0, 2, 4]
    """

    is_nominal: ClassVar[bool] = (
        True  # only subclasses are cohorts, no other objects with these methods
    )
    is_uniform: ClassVar[bool] = False
    is_fixed_in_advance: ClassVar[bool] = False
    has_fixed_size: ClassVar[bool] = False

    def __init_subclass__(cls) -> None:
        """Reset the attributes that describe the draw if a subclass overrides ``sample``."""
        super().__init_subclass__()
        for name in _OF_THE_DRAW:
            if _position(cls, "sample") < _position(cls, name):
                setattr(cls, name, vars(Cohort)[name])

    @property
    def coin(self) -> float | None:
        """Probability in (0, 1] with which each client joins a round independently; None if the sampler draws otherwise."""
        return None

    @property
    def redrawn_below(self) -> int:
        """Size below which a cohort is drawn again; 0 for never. Above 0, clients do not join independently."""
        return 0

    @property
    def needs_fresh_losses(self) -> bool:
        """True if the sampler needs the current model's losses at its `candidates`.

        The federation writes these losses into `Population.losses`, at the cost of a forward pass over
        the candidates' training examples.
        """
        return False

    @property
    def traits(self) -> Traits:
        """Conditions that this sampler needs or breaks; they decide with which options it can be combined."""
        return _OF_FRESH_LOSSES | _OF_COHORTS if self.needs_fresh_losses else _OF_COHORTS

    @property
    def loss_batches(self) -> int | None:
        """Number of a client's batches from which its loss on the current model is computed; None for all batches."""
        return None

    @abstractmethod
    def expected_size(self, num_clients: int) -> int:
        """Return the number of clients in a round, ≥ 1; if it varies, the expected number."""

    def candidates(self, round_index: int, population: Population, seed: int) -> ClientIds:
        """Return the clients whose losses on the current model the sampler needs; none by default."""
        return np.empty(0, np.int64)

    @abstractmethod
    def sample(self, round_index: int, population: Population, seed: int) -> ClientIds:
        """Return the ids of the round's clients, increasing and distinct; a pure function.

        Under `CentralDP` the seed is a secret of 256 bits, which `derive_seed` and NumPy's generators
        accept.
        """


_OF_THE_DRAW = ("coin", "redrawn_below", "is_uniform", "is_fixed_in_advance")


def _position(cls: type, name: str) -> int:
    """Return the position, in a class's method resolution order, of the first class that defines a name."""
    return next(number for number, base in enumerate(cls.__mro__) if name in vars(base))


_FRACTION = "in (0, 1]: it is the share of all clients in a round. Use size for a number of clients"


@dataclass(frozen=True, kw_only=True)
class SizedCohort(Ranged, Cohort):
    """Base of cohort samplers that draw a fixed number of clients, or all available clients if these are fewer.

    Args:
        fraction: share of all clients, in (0, 1]; rounded to the nearest number of clients.
        size: number of clients, ≥ 1; an alternative to ``fraction``.
        min_size: smallest number of clients if ``fraction`` gives fewer.
        max_size: largest number of clients if ``fraction`` gives more; None for no limit.
    """

    has_fixed_size: ClassVar[bool] = True
    ranges: ClassVar[dict[str, str]] = {
        "fraction": _FRACTION,
        "size": "at least 1 client",
        "min_size": "at least 1 client",
    }

    fraction: float | None = None
    size: int | None = None
    min_size: int = 1
    max_size: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if (self.fraction is None) == (self.size is None):
            raise ConfigurationError(
                f"{type(self).__name__} needs either fraction or size, got fraction={self.fraction} and "
                f"size={self.size}: give one of them, and null for the other"
            )
        if self.max_size is not None and self.max_size < (self.size or self.min_size):
            raise ConfigurationError(
                f"max_size must be at least size and min_size, {self.size or self.min_size}, got "
                f"{self.max_size}: it limits the size that fraction gives"
            )

    def expected_size(self, num_clients: int) -> int:
        """Return the number of clients in every round.

        Raises:
            ConfigurationError: if there are fewer clients in all.
        """
        if self.size is not None:
            size = self.size
        else:
            assert self.fraction is not None
            size = max(self.min_size, round(self.fraction * num_clients))
            size = min(size, self.max_size or size)
        if size > num_clients:
            raise ConfigurationError(
                f"the cohort has {size} clients but there are only {num_clients}: "
                "lower size or min_size, or raise data.num_clients"
            )
        return size

    def size_among(self, population: Population) -> int:
        """Return the cohort's size: `expected_size`, or the number of available clients if it is smaller."""
        return min(self.expected_size(population.num_clients), population.num_available)


@final
@dataclass(frozen=True, kw_only=True)
class UniformCohort(SizedCohort):
    """Draws a fixed number of clients, uniformly at random without replacement.

    Source: McMahan et al. 2017, Algorithm 1: m = max(C · K, 1).

    Args:
        fraction: share of all clients, in (0, 1]; rounded to the nearest number of clients.
        size: number of clients, ≥ 1; an alternative to ``fraction``.
        min_size: smallest number of clients if ``fraction`` gives fewer.
        max_size: largest number of clients if ``fraction`` gives more; None for no limit.

    Example:
        >>> population = Population(np.full(100, 10))
        >>> UniformCohort(fraction=0.03).sample(0, population, seed=0).tolist()
        [20, 48, 99]
    """

    is_uniform: ClassVar[bool] = True
    is_fixed_in_advance: ClassVar[bool] = True

    @override
    def sample(self, round_index: int, population: Population, seed: int) -> ClientIds:
        num_available, size = population.num_available, self.size_among(population)
        if is_secret(seed):
            lots = uniform_stream(seed, "cohort", round_index, size=num_available)
            drawn = np.sort(np.argsort(lots)[:size])
        else:
            generator = numpy_generator(seed, "cohort", round_index)
            # below a fiftieth of the clients NumPy draws only the cohort (Floyd's algorithm)
            drawn = np.sort(generator.choice(num_available, size, replace=False))
        return drawn if population.is_available is None else population.available_ids[drawn]


@final
@dataclass(frozen=True, kw_only=True)
class PoissonCohort(Ranged, Cohort):
    """Samples each client independently with the same probability, so that the cohort's size varies.

    The usual privacy amplification theorems assume this sampling.

    Args:
        fraction: probability that a client is sampled, in (0, 1].
        min_size: draw again until the cohort has this many clients. With 0 a round may be empty: it is
            logged as empty and the model does not change. Above 0 the draws are not independent,
            which amplification theorems need.

    Example:
        >>> population = Population(np.full(100, 10))
        >>> [len(PoissonCohort(fraction=0.1).sample(r, population, seed=0)) for r in range(5)]
        [10, 13, 17, 13, 13]
    """

    is_fixed_in_advance: ClassVar[bool] = True
    ranges: ClassVar[dict[str, str]] = {"fraction": "in (0, 1]", "min_size": "at least 0"}

    fraction: float
    min_size: int = 0

    @property
    @override
    def coin(self) -> float:
        return self.fraction

    @property
    @override
    def redrawn_below(self) -> int:
        return self.min_size

    @override
    def expected_size(self, num_clients: int) -> int:
        return max(1, round(self.fraction * num_clients))

    def sample(self, round_index: int, population: Population, seed: int) -> ClientIds:
        """Return the ids of the sampled clients, in increasing order.

        Raises:
            ConfigurationError: if ``min_size`` was not reached in 1000 draws.
        """
        for attempt in range(MAX_REDRAWS):
            coins = uniform_stream(
                seed, "cohort", round_index, attempt, size=population.num_clients
            )
            joins = coins < self.fraction
            if population.is_available is not None:
                joins &= population.is_available
            ids = np.flatnonzero(joins)
            if len(ids) >= self.min_size:
                return ids
        raise ConfigurationError(
            f"PoissonCohort drew fewer than min_size={self.min_size} of {population.num_clients} "
            f"clients {MAX_REDRAWS} times: raise fraction={self.fraction} or lower min_size"
        )


@final
@dataclass(frozen=True)
class AllClients(Cohort):
    """Selects all clients in every round."""

    is_uniform: ClassVar[bool] = True
    is_fixed_in_advance: ClassVar[bool] = True
    has_fixed_size: ClassVar[bool] = True

    @override
    def expected_size(self, num_clients: int) -> int:
        return num_clients

    @override
    def sample(self, round_index: int, population: Population, seed: int) -> ClientIds:
        return population.available_ids
