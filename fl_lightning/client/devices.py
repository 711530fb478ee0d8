"""Simulated devices: the virtual time of a client's local steps, deadlines, and lost updates.

    t_k = latency + K_k s_k exp(jitter ε)            K_k: local steps of client k
    late (t_k > deadline):  the client sends its first ⌊(deadline - latency) / (step time)⌋ steps, or
                            nothing
    lost:                   with probability drop_rate the client sends nothing

s_k: seconds per local step, drawn once in a run (`Speeds`); ε ~ N(0, 1), drawn per client and round.
No process waits: times are computed, so that accuracy can be plotted over simulated time.
Partial work counts as in FedProx (Li et al. 2020, 1812.06127, section 3), by ``num_steps`` in FedNova.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar, Literal, Protocol, final

import numpy as np
import numpy.typing as npt

from fl_lightning.core.errors import ConfigurationError, Ranged
from fl_lightning.core.seeds import numpy_generator
from fl_lightning.core.traits import Trait, Traits


@dataclass(frozen=True)
class WorkResult:
    """Outcome of a client's simulated work: number of steps, duration, and whether the update is lost.

    Attributes:
        num_steps: number of local steps whose update the server gets.
        seconds: virtual seconds until the server gets the update, or stops waiting for it.
        is_lost: whether the server gets no update.
    """

    num_steps: int
    seconds: float
    is_lost: bool


_OF_TIME = Traits(
    needs={Trait.SIMULATION: "simulates the speed of clients, and remote sites have their own"},
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
class Devices(Ranged):
    """Simulated speed and reliability of the clients' devices, and the deadline of a round.

    Args:
        speeds: seconds per local step of each client.
        latency: seconds for download and upload in each client's round, ≥ 0.
        jitter: standard deviation of the logarithm of a client's speed over rounds, ≥ 0.
        drop_rate: probability that a client's update is lost, in [0, 1).
        deadline: seconds after which the server stops waiting, > latency; if None, it waits for all clients.
        late: what a client sends that cannot finish in time: ``partial`` for the update of its completed
            steps, ``drop`` for nothing. A client without a completed step sends nothing.

    Raises:
        ConfigurationError: for values out of range.

    Example:
        >>> from fl_lightning.client.devices import GivenSpeeds
        >>> devices = Devices(speeds=GivenSpeeds([1.0, 3.0]), deadline=10.0)
        >>> fleet = Fleet(devices, num_clients=2, seed=0)
        >>> fleet.result(0, num_steps=5, draw=0)
        WorkResult(num_steps=5, seconds=5.0, is_lost=False)
        >>> fleet.result(1, num_steps=5, draw=0)
        WorkResult(num_steps=3, seconds=9.0, is_lost=False)
    """

    is_recorded: ClassVar[bool] = False

    speeds: Speeds
    latency: float = 0.0
    jitter: float = 0.0
    drop_rate: float = 0.0
    deadline: float | None = None
    late: Literal["partial", "drop"] = "partial"

    ranges: ClassVar[dict[str, str]] = {
        "latency": "at least 0 and finite",
        "jitter": "at least 0 and finite",
        "drop_rate": "in [0, 1)",
    }

    @property
    def traits(self) -> Traits:
        """Conditions on a round that slow devices and a deadline need or break, to detect conflicting options."""
        return _OF_TIME if self.deadline is None else _OF_TIME | _OF_DEADLINES

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.deadline is not None and not self.latency < self.deadline < math.inf:
            raise ConfigurationError(
                f"Devices: deadline must be finite and longer than the latency of {self.latency} s, got "
                f"{self.deadline}: increase it, or set it to null to wait for all clients"
            )


class Fleet:
    """Simulated devices of all clients: how long each client's work takes, and whether its update is lost.

    Args:
        devices: speeds, reliability and deadline.
        num_clients: number of all clients.
        seed: root seed of the random draws.
    """

    def __init__(self, devices: Devices, num_clients: int, seed: int) -> None:
        self.devices = devices
        self._seconds = devices.speeds.seconds_per_step(num_clients, seed)
        self._seed = seed

    def result(self, client: int, num_steps: int, draw: int) -> WorkResult:
        """Return a client's working time in virtual seconds, its number of steps, and whether its update is lost.

        Args:
            client: client id.
            num_steps: planned local steps, ≥ 1.
            draw: number that identifies the random draws, e.g. the round.
        """
        devices = self.devices
        step, is_lost = float(self._seconds[client]), False
        if devices.jitter or devices.drop_rate:
            generator = numpy_generator(self._seed, "device", draw, client)
            step *= math.exp(devices.jitter * generator.standard_normal())
            is_lost = bool(generator.random() < devices.drop_rate)
        seconds = devices.latency + num_steps * step
        if devices.deadline is not None and seconds > devices.deadline:
            # not one step fewer because of rounding
            managed = math.floor((devices.deadline - devices.latency) / step * (1 + 1e-12))
            if devices.late == "drop" or not managed:
                return WorkResult(0, devices.deadline, is_lost=True)
            num_steps, seconds = managed, devices.latency + managed * step
        if is_lost:  # the server does not know, and waits until the deadline
            waited = seconds if devices.deadline is None else devices.deadline
            return WorkResult(0, waited, is_lost=True)
        return WorkResult(num_steps, seconds, is_lost=False)


Seconds = npt.NDArray[np.float64]


class Speeds(Protocol):
    """A distribution that gives each client's device its seconds per local step."""

    def seconds_per_step(self, num_clients: int, seed: int) -> Seconds:
        """Return the seconds per local step of each client, > 0, shape (num_clients,).

        Equal arguments must give equal results.
        """


@final
@dataclass(frozen=True, kw_only=True)
class LogNormalSpeeds(Ranged):
    """Log-normal seconds per local step: most devices are similar, a few very slow.

    Source of the shape: measured phones, e.g. Lai et al. 2022, FedScale (2105.11367), figure 2.

    Args:
        median: median of the step time in seconds, > 0.
        sigma: standard deviation of the step time's logarithm, ≥ 0. With 0 all devices are equally fast;
            with 1 one device in six takes more than 2.7 times the median.

    Example:
        >>> LogNormalSpeeds(median=2.0, sigma=0.0).seconds_per_step(3, seed=0)
        array([2., 2., 2.])
    """

    median: float = 1.0
    sigma: float = 0.5

    ranges: ClassVar[dict[str, str]] = {
        "median": "greater than 0 seconds and finite",
        "sigma": "at least 0 and finite",
    }

    def seconds_per_step(self, num_clients: int, seed: int) -> Seconds:
        """Return the seconds per local step of each client, shape (num_clients,)."""
        draws = numpy_generator(seed, "speeds").standard_normal(num_clients)
        seconds: Seconds = self.median * np.exp(self.sigma * draws)
        return seconds


@final
@dataclass(frozen=True, kw_only=True)
class SpeedTiers:
    """A few kinds of devices, each with its seconds per local step.

    Args:
        seconds: step time of each kind, each > 0.
        shares: relative number of clients of each kind, each ≥ 0; equal numbers if None.

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
        """Return the seconds per local step of each client, shape (num_clients,); shares are rounded to whole clients."""
        shares = np.ones(len(self.seconds)) if self.shares is None else np.array(self.shares)
        edges = np.cumsum(shares) / shares.sum() * num_clients
        kinds = np.searchsorted(edges, np.arange(num_clients) + 0.5)
        kinds = numpy_generator(seed, "speeds").permutation(kinds)
        return np.array(self.seconds, dtype=np.float64)[kinds]


@final
@dataclass(frozen=True)
class GivenSpeeds:
    """Given seconds per local step of each client, e.g. measured ones.

    Args:
        seconds: step time of each client in seconds, > 0. The list is repeated if the number of clients
            is a multiple of its length.

    Example:
        >>> GivenSpeeds([1.0, 3.0]).seconds_per_step(4, seed=0)
        array([1., 3., 1., 3.])
    """

    seconds: list[float]

    def __post_init__(self) -> None:
        _check_seconds("GivenSpeeds", self.seconds)

    def seconds_per_step(self, num_clients: int, seed: int) -> Seconds:
        """Return the seconds per local step of each client, shape (num_clients,)."""
        if num_clients % len(self.seconds):
            raise ConfigurationError(
                f"federation.devices: GivenSpeeds: seconds must have one number per client, or a number of "
                f"entries that divides the {num_clients} clients, got {len(self.seconds)} entries"
            )
        return np.resize(np.array(self.seconds, dtype=np.float64), num_clients)


def _check_seconds(owner: str, seconds: list[float]) -> None:
    if not seconds or not all(0 < s < np.inf for s in seconds):
        raise ConfigurationError(
            f"{owner}: seconds must be one number or more, each greater than 0 and finite, got {seconds}"
        )
