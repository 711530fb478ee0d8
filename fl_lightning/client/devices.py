"""The outcome of a client's work on its device, in virtual time.

    t_k = latency + K_k s_k exp(jitter ε)            ε ~ N(0, 1) of this client and round
    late (t_k > deadline):  it sends the ⌊(deadline - latency) / (t_k / K_k)⌋ steps it managed, or
                            nothing
    lost:                   with probability drop_rate it sends nothing at all

Nothing waits: the times are computed, so that accuracy can be told over simulated wall-clock time.
Partial work counts as in FedProx (Li et al. 2020, 1812.06127, section 3), by ``num_steps`` in FedNova.
s_k: seconds for a local step, drawn once in a run (`Speeds`).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar, Literal, Protocol, final

import numpy as np
import numpy.typing as npt

from fl_lightning.core.errors import ConfigurationError
from fl_lightning.core.seeds import numpy_generator
from fl_lightning.core.traits import Trait, Traits


@dataclass(frozen=True)
class Fate:
    """The outcome of a client's work.

    Attributes:
        num_steps: local steps that it takes.
        seconds: virtual time until the server has its update, or stops waiting for it.
        is_lost: whether nothing comes.
    """

    num_steps: int
    seconds: float
    is_lost: bool


_OF_TIME = Traits(
    needs={Trait.SIMULATION: "simulates how fast clients are, and sites are as fast as they are"},
    instead={
        Trait.SIMULATION: "leave devices out, and say with network run --deadline how many seconds the "
        "server waits"
    },
)
_OF_DEADLINES = Traits(
    needs={Trait.COHORTS: "has a deadline for a round"},
    instead={Trait.COHORTS: "leave devices.deadline out"},
)


@final
@dataclass(frozen=True, kw_only=True)
class Devices:
    """Clients' devices: how fast they are, how reliable, and how long the server waits for them.

    Args:
        speeds: seconds for a local step of each client.
        latency: seconds that a client's round takes besides, ≥ 0: download and upload.
        jitter: standard deviation of the logarithm of a client's speed over rounds, ≥ 0.
        drop_rate: probability that a client's update never comes, in [0, 1).
        deadline: seconds after which the server goes on, > latency; None waits for everybody.
        late: what a client does that cannot finish in time: ``partial``, send the steps that it
            managed, or ``drop``, send nothing. One that cannot take a single step sends nothing.

    Raises:
        ConfigurationError: for values out of range.

    Example:
        >>> from fl_lightning.client.devices import GivenSpeeds
        >>> devices = Devices(speeds=GivenSpeeds([1.0, 3.0]), deadline=10.0)
        >>> fleet = Fleet(devices, num_clients=2, seed=0)
        >>> fleet.fate(0, num_steps=5, draw=0), fleet.fate(1, num_steps=5, draw=0)
        (Fate(num_steps=5, seconds=5.0, is_lost=False), Fate(num_steps=3, seconds=9.0, is_lost=False))
    """

    is_recorded: ClassVar[bool] = False

    speeds: Speeds
    latency: float = 0.0
    jitter: float = 0.0
    drop_rate: float = 0.0
    deadline: float | None = None
    late: Literal["partial", "drop"] = "partial"

    @property
    def traits(self) -> Traits:
        """Traits of these devices."""
        return _OF_TIME if self.deadline is None else _OF_TIME | _OF_DEADLINES

    def __post_init__(self) -> None:
        waits_long_enough = self.deadline is None or self.latency < self.deadline < math.inf
        rules = {
            f"latency must be at least 0 and finite, got {self.latency}": 0
            <= self.latency
            < math.inf,
            f"jitter must be at least 0 and finite, got {self.jitter}": 0 <= self.jitter < math.inf,
            f"drop_rate must be in [0, 1), got {self.drop_rate}": 0 <= self.drop_rate < 1,
            f"deadline must be longer than the latency of {self.latency} s, got {self.deadline}: "
            "null waits for everybody": waits_long_enough,
            f"late must be partial or drop, got {self.late!r}": self.late in ("partial", "drop"),
        }
        if broken := [rule for rule, holds in rules.items() if not holds]:
            raise ConfigurationError("devices: " + "; ".join(broken))


class Fleet:
    """The devices of a run's clients.

    Args:
        devices: what they are like.
        num_clients: how many.
        seed: root seed of their draws.
    """

    def __init__(self, devices: Devices, num_clients: int, seed: int) -> None:
        self.devices = devices
        self._seconds = devices.speeds.seconds_per_step(num_clients, seed)
        self._seed = seed

    def fate(self, client: int, num_steps: int, draw: int) -> Fate:
        """Duration and fate of a client's work.

        Args:
            client: who.
            num_steps: local steps that it was asked for, ≥ 1.
            draw: tells this piece of its work from others, e.g. the round.
        """
        devices = self.devices
        step, is_lost = float(self._seconds[client]), False
        if devices.jitter or devices.drop_rate:
            generator = numpy_generator(self._seed, "device", draw, client)
            step *= math.exp(devices.jitter * generator.standard_normal())
            is_lost = bool(generator.random() < devices.drop_rate)
        seconds = devices.latency + num_steps * step
        if devices.deadline is not None and seconds > devices.deadline:
            # what fits but for rounding does fit
            managed = math.floor((devices.deadline - devices.latency) / step * (1 + 1e-12))
            if devices.late == "drop" or not managed:
                return Fate(0, devices.deadline, is_lost=True)
            num_steps, seconds = managed, devices.latency + managed * step
        if is_lost:  # the server waits as long as it would for anybody
            return Fate(0, seconds if devices.deadline is None else devices.deadline, is_lost=True)
        return Fate(num_steps, seconds, is_lost=False)


Seconds = npt.NDArray[np.float64]


class Speeds(Protocol):
    """Speeds of the clients' devices."""

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
