"""Protocols of aggregators that hide updates from the server (secure sums, encryption)."""

from __future__ import annotations

from abc import abstractmethod
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy.typing as npt
from torch import Tensor

from fl_lightning.core.seeds import Integers
from fl_lightning.core.update import ClientUpdate

# Adds up vectors at the clients' sites, given the agreed protocol and the clients in order
SumsAtSites = Callable[[Any, Sequence[int]], Any]
# fewest clients of a round: a sum over fewer would show a single update, so that such a round is dropped
FEWEST_CLIENTS = 2


@dataclass(frozen=True, kw_only=True)
class Terms:
    """Facts known before the first round that secure aggregation needs, e.g. the largest cohort."""

    most_clients: int  # size of the largest possible cohort
    seed: int = 0  # seed of the run
    num_processes: int = 1  # number of processes that train the clients


@dataclass
class ProtectionCost:
    """Bytes and CPU time that hiding the updates cost in a round."""

    # bytes that each client of the cohort uploads, by client id
    bytes_up: Counter[int] = field(default_factory=Counter)
    # bytes that each client downloads besides the model, by client id
    bytes_down: Counter[int] = field(default_factory=Counter)
    # CPU time by purpose: ``client_seconds`` of all clients together, ``server_seconds``
    seconds: dict[str, float] = field(default_factory=dict)


class Protected(Protocol):
    """An aggregator that hides single updates from the server, e.g. a secure sum, see `Aggregator.protection`.

    Over a network, the vectors of a sum stay at the clients' sites.

    Attributes:
        protection_cost: bytes and seconds of the last closed round; empty while a round is open.
        terms: facts about the run, see `begin`.
    """

    protection_cost: ProtectionCost
    terms: Terms

    @property
    @abstractmethod
    def hides(self) -> str:
        """Part of a sentence for the log: what the server sees instead of single updates."""

    @property
    @abstractmethod
    def spans_network(self) -> bool:
        """True if sites in a network can compute the sums; false if sums are only simulated in one program."""

    @property
    @abstractmethod
    def agreed_sum(self) -> Any:
        """The protocol of the secure sum with its configured options, which a server may not change."""

    @abstractmethod
    def begin(self, terms: Terms) -> None:
        """Prepare for a run; server and sites call this with the same facts before the first round.

        Raises:
            ConfigurationError: if sums are not possible in this run.
        """

    def start_round(self, round_index: int) -> None:
        """Start a round; called before its first update."""

    @abstractmethod
    def vector_of(self, update: ClientUpdate) -> npt.NDArray[Any]:
        """Return the vector that represents a client's update in the round's sum, shape (size,).

        Raises:
            ConfigurationError: if the update has a mask of the client's own.
        """

    def sum_at_sites(self, adds: SumsAtSites) -> None:
        """Use ``adds`` to compute the sums at the sites; `add` then only counts the updates."""

    def miss(self, clients: Iterable[int]) -> None:
        """Note which of the cohort's clients sent no update; called before `close`."""

    @abstractmethod
    def typical_bytes(self, size: int, num_clients: int) -> tuple[int, int]:
        """Return the bytes that a client sends for ``size`` numbers, and those it receives besides the model."""


class NoiseShares(Protocol):
    """A noise mechanism whose clients add shares of the noise to their updates and send integers.

    Attributes:
        expected: expected size of the cohort, by which sums are divided.
        fewest_replies: smallest number of shares that together have enough noise.
    """

    expected: float
    fewest_replies: int

    def num_bits(self, num_clients: int) -> int:
        """Return the number of bits b with which no sum over ``num_clients`` overflows modulo 2^b."""

    def client_integers(
        self, delta: Tensor, clip_norm: float, round_index: int, client: int
    ) -> Integers:
        """Return a client's clipped update plus its share of the noise, as integers: int64, shape (k,)."""

    def decoded(self, numbers: Integers, clip_norm: float, like: Tensor) -> Tensor:
        """Convert a sum of clients' integers back to the sum of their noisy updates, with the dtype of ``like``."""
