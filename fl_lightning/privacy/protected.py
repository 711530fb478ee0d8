"""What an aggregator that hides updates from the server needs to know, and what it tells."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

from fl_lightning.privacy.mechanism import NoiseShares
from fl_lightning.privacy.private_mean import PrivateAggregator

# so few that a sum over them would show them: their updates are in no round
FEWEST_CLIENTS = 2


@dataclass(frozen=True, kw_only=True)
class Terms:
    """What is known before the first round.

    Attributes:
        most_clients: of the largest cohort that there may be.
        seed: the run's.
        num_processes: among which the clients are shared out.
    """

    most_clients: int
    seed: int = 0
    num_processes: int = 1


@dataclass(frozen=True, kw_only=True)
class Expense:
    """What hiding the updates of a round has cost.

    Attributes:
        bytes_up: sent by each client of the cohort, by its id.
        bytes_down: received by each, besides the model.
        seconds: of CPU time by what they are, e.g. ``client_seconds``, of all clients together.
    """

    bytes_up: Mapping[int, int] = field(default_factory=dict)
    bytes_down: Mapping[int, int] = field(default_factory=dict)
    seconds: Mapping[str, float] = field(default_factory=dict)


@runtime_checkable
class Protected(Protocol):
    """An aggregator for which clients do not send their deltas in clear.

    Attributes:
        restarts: whether a round that is resumed begins with its first client, because what the
            server has of it is of no use without keys that no checkpoint holds.
    """

    restarts: bool

    @property
    def expense(self) -> Expense:
        """Of the last round that was closed; of nothing while one is open."""

    @property
    def hides(self) -> str:
        """What the server sees instead of updates, and what protects them, in words."""

    def begin(self, terms: Terms) -> None:
        """Learn about the run; to be called before the first round."""

    def miss(self, clients: Iterable[int]) -> None:
        """Learn, before `close`, which clients of the cohort sent no update."""

    def typical_bytes(self, size: int, num_clients: int) -> tuple[int, int]:
        """Return what a client sends for ``size`` numbers, and what it receives besides the model."""


@runtime_checkable
class TakesNoiseShares(Protocol):
    """One that can add up whole numbers with clients' noise."""

    def fewest_survivors(self, num_clients: int) -> int:
        """Return how many vectors a sum over a cohort has at least."""

    def with_noise_shares(self, shares: Callable[[], NoiseShares]) -> PrivateAggregator:
        """Return what adds up whole numbers with noise; to be called after `begin`."""
