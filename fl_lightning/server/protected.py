"""What an aggregator that hides updates from the server needs to know, and what it tells."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy.typing as npt
from torch import Tensor

from fl_lightning.core.update import ClientUpdate
from fl_lightning.core.whole_numbers import Integers

# Adds up the vectors of clients that have them at their sites: a protocol's session and the clients
# in the order of their places give the sum's outcome.
AddsAtSites = Callable[[Any, Sequence[int]], Any]

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


@dataclass(frozen=True)
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


class Protected(Protocol):
    """An aggregator for which clients do not send their deltas in clear: see `Aggregator.protection`.

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

    @property
    def over_sites(self) -> SumsOverSites | None:
        """How its sums come about where clients are at sites; None where they cannot."""

    def begin(self, terms: Terms) -> None:
        """Learn about the run; to be called before the first round."""

    def miss(self, clients: Iterable[int]) -> None:
        """Learn, before `close`, which clients of the cohort sent no update."""

    def typical_bytes(self, size: int, num_clients: int) -> tuple[int, int]:
        """Return what a client sends for ``size`` numbers, and what it receives besides the model."""


class SumsOverSites(Protocol):
    """Two halves of hidden sums: what a client makes at its site, and how the server has it added."""

    @property
    def terms(self) -> Terms:
        """Of the run; the server's, which sites begin with as well."""

    def begin(self, terms: Terms) -> None:
        """Learn about the run."""

    @property
    def agreed_sum(self) -> Any:
        """The protocol with the options of the configuration, which no server may change."""

    def start_round(self, round_index: int) -> None:
        """Learn which round comes next."""

    def vector_of(self, update: ClientUpdate) -> npt.NDArray[Any]:
        """Return the whole numbers that a client has added up, of the round that has come."""

    def have_added(self, adds: AddsAtSites) -> None:
        """Have vectors added where they are; updates are only counted from here on."""


class NoiseShares(Protocol):
    """A mechanism whose clients send whole numbers with their share of the noise.

    Attributes:
        expected: the cohort's size that sums are divided by.
        fewest_replies: so many shares have enough noise together.
    """

    expected: float
    fewest_replies: int

    def num_bits(self, num_clients: int) -> int:
        """Return b for which no sum of so many clients wraps round modulo 2^b."""

    def client_integers(
        self, delta: Tensor, clip_norm: float, round_index: int, client: int
    ) -> Integers:
        """Return what a client sends of its clipped update, int64 of shape (k,)."""

    def decoded(self, numbers: Integers, clip_norm: float, like: Tensor) -> Tensor:
        """Return the sum that whole numbers stand for, with the dtype of ``like``."""
