"""How fast clients' devices are: seconds of virtual time for a local step, of every client.

Drawn once in a run, from its seed; how much a device varies from round to round is `Devices`' part.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, final

import numpy as np
import numpy.typing as npt

from fl_lightning.core.errors import ConfigurationError
from fl_lightning.core.seeds import numpy_generator

Seconds = npt.NDArray[np.float64]


class Speeds(Protocol):
    """Says how fast clients' devices are."""

    def seconds_per_step(self, num_clients: int, seed: int) -> Seconds:
        """Return seconds > 0 for a local step, shape (num_clients,); a pure function."""


@final
@dataclass(frozen=True, kw_only=True)
class LogNormalSpeeds:
    """Devices whose step times are log-normal: many alike, a few very slow.

    Source of the shape: measured phones, e.g. Lai et al. 2022, FedScale (2105.11367), figure 2.

    Args:
        median: seconds for a step of the device in the middle, > 0.
        sigma: standard deviation of the logarithm, ≥ 0. 0 makes all alike; with 1 one device in six
            takes more than 2.7 times the median.

    Example:
        >>> LogNormalSpeeds(median=2.0, sigma=0.0).seconds_per_step(3, seed=0)
        array([2., 2., 2.])
    """

    median: float = 1.0
    sigma: float = 0.5

    def __post_init__(self) -> None:
        if not 0 < self.median < np.inf:
            raise ConfigurationError(
                f"LogNormalSpeeds: median must be greater than 0 seconds and finite, got {self.median}"
            )
        if not 0 <= self.sigma < np.inf:
            raise ConfigurationError(
                f"LogNormalSpeeds: sigma must be at least 0 and finite, got {self.sigma}"
            )

    def seconds_per_step(self, num_clients: int, seed: int) -> Seconds:
        """Return seconds for a local step, shape (num_clients,)."""
        draws = numpy_generator(seed, "speeds").standard_normal(num_clients)
        seconds: Seconds = self.median * np.exp(self.sigma * draws)
        return seconds


@final
@dataclass(frozen=True, kw_only=True)
class SpeedTiers:
    """Devices of a few kinds.

    Args:
        seconds: for a step, by kind, each > 0.
        shares: how many of the clients are of each kind, in proportion, each ≥ 0; alike if None.

    Example:
        >>> sorted(SpeedTiers(seconds=[1.0, 4.0], shares=[3, 1]).seconds_per_step(4, seed=0).tolist())
        [1.0, 1.0, 1.0, 4.0]
    """

    seconds: list[float]
    shares: list[float] | None = None

    def __post_init__(self) -> None:
        shares = self.shares if self.shares is not None else [1.0] * len(self.seconds)
        _check_seconds("SpeedTiers", self.seconds)
        if len(shares) != len(self.seconds) or min(shares) < 0 or not 0 < sum(shares) < np.inf:
            raise ConfigurationError(
                "SpeedTiers: shares needs one number >= 0 for each of the "
                f"{len(self.seconds)} kinds, not all 0, got {self.shares}"
            )

    def seconds_per_step(self, num_clients: int, seed: int) -> Seconds:
        """Return seconds for a local step, shape (num_clients,); shares hold but for rounding."""
        shares = np.ones(len(self.seconds)) if self.shares is None else np.array(self.shares)
        edges = np.cumsum(shares) / shares.sum() * num_clients
        kinds = np.searchsorted(edges, np.arange(num_clients) + 0.5)
        kinds = numpy_generator(seed, "speeds").permutation(kinds)
        return np.array(self.seconds, dtype=np.float64)[kinds]


@final
@dataclass(frozen=True)
class GivenSpeeds:
    """Devices that were measured.

    Args:
        seconds: for a step, of each client in turn, each > 0; repeated where there are
            several times as many clients.

    Example:
        >>> GivenSpeeds([1.0, 3.0]).seconds_per_step(4, seed=0)
        array([1., 3., 1., 3.])
    """

    seconds: list[float]

    def __post_init__(self) -> None:
        _check_seconds("GivenSpeeds", self.seconds)

    def seconds_per_step(self, num_clients: int, seed: int) -> Seconds:
        """Return seconds for a local step, shape (num_clients,)."""
        if num_clients % len(self.seconds):
            raise ConfigurationError(
                f"federation.devices: GivenSpeeds has seconds of {len(self.seconds)} devices, and there are "
                f"{num_clients} clients: give one number each, or a number that divides theirs"
            )
        return np.resize(np.array(self.seconds, dtype=np.float64), num_clients)


def _check_seconds(owner: str, seconds: list[float]) -> None:
    if not seconds or not all(0 < s < np.inf for s in seconds):
        raise ConfigurationError(
            f"{owner}: seconds must be greater than 0 and finite, at least one number, got {seconds}"
        )
