"""The outcome of a client's work on its device, in virtual time.

    t_k = latency + K_k s_k exp(jitter ε)            ε ~ N(0, 1) of this client and round
    late (t_k > deadline):  it sends the ⌊(deadline - latency) / (t_k / K_k)⌋ steps it managed, or
                            nothing
    lost:                   with probability drop_rate it sends nothing at all

Nothing waits: the times are computed, so that accuracy can be told over simulated wall-clock time.
Partial work counts as in FedProx (Li et al. 2020, 1812.06127, section 3), by ``num_steps`` in FedNova.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar, Literal, final

from fl_lightning.client.speeds import Speeds
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
        >>> from fl_lightning.client.speeds import GivenSpeeds
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
        """Return what becomes of a client's work.

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
