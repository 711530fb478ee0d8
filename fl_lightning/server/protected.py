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
    """Facts about a run that are known before the first round, to set up the protection of updates."""

    most_clients: int  # size of the largest possible cohort
    seed: int = 0  # seed of the run
    num_processes: int = 1  # number of processes that train the clients


@dataclass
class ProtectionCost:
    """Bytes and CPU time of hiding the updates of a round, added up during the round."""

    # bytes that each client of the cohort uploads, by client id
    bytes_up: Counter[int] = field(default_factory=Counter)
    # bytes that each client downloads besides the model, by client id
    bytes_down: Counter[int] = field(default_factory=Counter)
    # CPU time by purpose: ``client_seconds`` of all clients together, ``server_seconds``
    seconds: dict[str, float] = field(default_factory=dict)


class Protected(Protocol):
    """An aggregator whose clients do not send deltas in clear, see `Aggregator.protection`.

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
        """Clause for the log: what the server sees instead of single updates, and how they are protected."""

    @property
    @abstractmethod
    def spans_network(self) -> bool:
        """True if sites can compute the sums; False if these are only simulated."""

    @property
    @abstractmethod
    def agreed_sum(self) -> Any:
        """The summation protocol with the configured options, which a server may not change."""

    @abstractmethod
    def begin(self, terms: Terms) -> None:
        """Called once before the first round, with the same facts at the server and at sites.

        Raises:
            ConfigurationError: if sums are not possible in this run.
        """

    def start_round(self, round_index: int) -> None:
        """Called before the first update of a round."""

    @abstractmethod
    def vector_of(self, update: ClientUpdate) -> npt.NDArray[Any]:
        """Return the vector that a client adds to the sum of the current round, shape (size,).

        Raises:
            ConfigurationError: if the update has a mask of the client's own.
        """

    def sum_at_sites(self, adds: SumsAtSites) -> None:
        """Use ``adds`` to sum the vectors at the sites; `add` then only counts the updates."""

    def miss(self, clients: Iterable[int]) -> None:
        """Called before `close` with the ids of the cohort's clients that sent no update."""

    @abstractmethod
    def typical_bytes(self, size: int, num_clients: int) -> tuple[int, int]:
        """Return the bytes of a client for ``size`` numbers: (uploaded, downloaded besides the model)."""


class NoiseShares(Protocol):
    """A mechanism whose clients send integers that contain their share of the noise.

    Attributes:
        expected: expected size of the cohort, by which sums are divided.
        fewest_replies: smallest number of shares that together have enough noise.
    """

    expected: float
    fewest_replies: int

    def num_bits(self, num_clients: int) -> int:
        """Return b such that no sum over ``num_clients`` wraps around modulo 2^b."""

    def client_integers(
        self, delta: Tensor, clip_norm: float, round_index: int, client: int
    ) -> Integers:
        """Return a client's clipped update with its share of the noise, int64 of shape (k,)."""

    def decoded(self, numbers: Integers, clip_norm: float, like: Tensor) -> Tensor:
        """Return the sum that the integers stand for, with the dtype of ``like``."""
