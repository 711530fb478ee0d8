"""Models of clients' availability, and a cohort sampler that draws only available clients.

    stretches:   the rounds of client k are divided into stretches of a given length, with an offset per
                 client; in each stretch the client is available with probability p
    diurnal:     P(k is available in round r) = p + a sin(2π (r / period + φ_k))

All draws are functions of (seed, round), so that a resumed run has the same clients. Sources of the
patterns: Bonawitz et al. 2019, *Towards federated learning at scale* (1902.01046), figure 5, devices
follow the local day; Markov-like on-off traces as in FedScale (2105.11367), here with stretches of one
length instead of a chain, which would depend on the past.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar, Protocol, final

import numpy as np
import numpy.typing as npt
from typing_extensions import override

from fl_lightning.core.errors import ConfigurationError, Ranged
from fl_lightning.core.seeds import numpy_generator
from fl_lightning.data.cohorts.cohort import Cohort
from fl_lightning.data.cohorts.population import ClientIds, Population

IsAvailable = npt.NDArray[np.bool_]


class Availability(Protocol):
    """A model of which clients are available in each round."""

    def available(self, round_index: int, num_clients: int, seed: int) -> IsAvailable:
        """Return whether each client is available, bool of shape (num_clients,); must be a pure function."""


@final
@dataclass(frozen=True, kw_only=True)
class Stretches(Ranged):
    """Keeps each client available, or unavailable, for several rounds in a row.

    Args:
        fraction: probability that a client is available in a round, in (0, 1]; 1 means always.
        length: number of rounds in a stretch, ≥ 1; stretches are independent.

    Example:
        >>> Stretches(fraction=0.5, length=4).available(7, num_clients=5, seed=0)
        array([ True, False, False,  True, False])
    """

    ranges: ClassVar[dict[str, str]] = {"fraction": "in (0, 1]", "length": "at least 1"}

    fraction: float = 0.5
    length: int = 10

    def available(self, round_index: int, num_clients: int, seed: int) -> IsAvailable:
        """Return which clients are available in a round, bool of shape (num_clients,)."""
        offsets = numpy_generator(seed, "stretch offsets").integers(self.length, size=num_clients)
        stretch, place = divmod(round_index, self.length)
        # a client's stretches begin at its offset: before it, the client is still in the last stretch
        coins = [
            numpy_generator(seed, "stretch", number).random(num_clients)
            for number in (stretch, stretch + 1)
        ]
        drawn = np.where(place < offsets, *coins)
        return drawn < self.fraction


@final
@dataclass(frozen=True, kw_only=True)
class Diurnal(Ranged):
    """Varies each client's probability of being available by the time of day, as a sine.

    Args:
        mean: mean probability over the day, in (0, 1].
        amplitude: amplitude of the probability, ≥ 0; mean ± amplitude must be probabilities.
        period: number of rounds of a day, > 0.
        spread: share of the day over which clients' clocks are spread, in [0, 1]; 0 is one time
            zone, 1 the whole globe, where about the same number is always available.

    Example:
        >>> day = Diurnal(mean=0.5, amplitude=0.5, period=24)
        >>> [int(day.available(hour, 1000, seed=0).sum()) for hour in (0, 6, 12, 18)]
        [509, 1000, 498, 0]
    """

    ranges: ClassVar[dict[str, str]] = {
        "mean": "in (0, 1]",
        "period": "greater than 0 rounds and finite",
        "spread": "in [0, 1]",
    }

    mean: float = 0.5
    amplitude: float = 0.4
    period: float = 24.0
    spread: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        room = min(self.mean, 1 - self.mean)
        if not 0 <= self.amplitude <= room + 1e-12:  # rounding
            raise ConfigurationError(
                f"Diurnal: amplitude must be in [0, {room:g}] so that probabilities stay in [0, 1], "
                f"got {self.amplitude}"
            )

    def available(self, round_index: int, num_clients: int, seed: int) -> IsAvailable:
        """Return which clients are available in a round, bool of shape (num_clients,)."""
        clocks = self.spread * numpy_generator(seed, "clocks").random(num_clients)
        hour = 2 * math.pi * (round_index / self.period + clocks)
        probabilities = self.mean + self.amplitude * np.sin(hour)
        coins = numpy_generator(seed, "day", round_index).random(num_clients)
        return coins < probabilities


@final
@dataclass(frozen=True)
class AvailableCohort(Cohort):
    """Draws a round's clients by another cohort sampler, but only from the clients available in that round.

    If fewer clients are available than the sampler draws, all of them are in the round. If no client is
    available, the round is empty and the model does not change. If all are available, the draw is that of
    the sampler. If one AvailableCohort is the sampler of another, clients must be available in both.

    Args:
        sampler: cohort sampler that draws from the available clients.
        availability: model of which clients are available in each round.

    Example:
        >>> from fl_lightning.data.cohorts.cohort import UniformCohort
        >>> sampler = AvailableCohort(UniformCohort(size=3), Stretches(fraction=0.3))
        >>> sampler.sample(0, Population(np.full(20, 10)), seed=0).tolist()
        [7, 11, 14]
    """

    sampler: Cohort
    availability: Availability
    # jsonargparse finds types of dataclasses only where `ClassVar`, used in bases, is a name of this module
    is_uniform: ClassVar[bool] = False

    @property
    @override
    def needs_fresh_losses(self) -> bool:
        return self.sampler.needs_fresh_losses

    @property
    @override
    def loss_batches(self) -> int | None:
        return self.sampler.loss_batches

    @override
    def expected_size(self, num_clients: int) -> int:
        return self.sampler.expected_size(num_clients)

    @override
    def candidates(self, round_index: int, population: Population, seed: int) -> ClientIds:
        available = self._available(round_index, population, seed)
        return self.sampler.candidates(round_index, available, seed)

    def sample(self, round_index: int, population: Population, seed: int) -> ClientIds:
        """Return the ids of the round's clients, which are distinct and available.

        Raises:
            ConfigurationError: if the sampler draws clients that are not available.
        """
        available = self._available(round_index, population, seed)
        ids = self.sampler.sample(round_index, available, seed)
        assert available.is_available is not None
        if not available.is_available[ids].all():
            raise ConfigurationError(
                f"AvailableCohort: its sampler {type(self.sampler).__name__} draws clients that are not "
                "available: it must draw from population.available_ids"
            )
        return ids

    def _available(self, round_index: int, population: Population, seed: int) -> Population:
        is_available = self.availability.available(round_index, population.num_clients, seed)
        return population.restricted(is_available)
