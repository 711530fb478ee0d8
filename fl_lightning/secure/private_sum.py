"""Distributed differential privacy over a secure sum: the server sees whole numbers with noise, summed.

    client: clip_S(Δ_k) → whole numbers + its share of the noise → modulo 2^b, padded
    server: Σ modulo 2^b → from -2^(b-1) to 2^(b-1) → · step / m

b is so large that no sum of the largest cohort wraps round: updates are bounded, and so is every
share, whose table ends. With fewer vectors than have enough noise together there is no sum: clients
refuse to unmask it. Source: Kairouz, Liu and Steinke 2021 (2102.06387), Algorithms 1 and 2, without
the rotation; shares of Agarwal, Kairouz and Liu 2021 (2110.04995).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, final

import numpy as np
import torch
from torch import Tensor

from fl_lightning.core.errors import ConfigurationError
from fl_lightning.core.seeds import Integers
from fl_lightning.core.update import ClientUpdate
from fl_lightning.privacy.private_mean import clipped
from fl_lightning.secure.ring import Ring, RingIntegers
from fl_lightning.secure.secure_sum import RoundSum, SecureSum
from fl_lightning.server.aggregator import PrivateAggregator, check_whole
from fl_lightning.server.protected import NoiseShares, ProtectionCost, SumsAtSites, Terms

# (bits, fewest vectors) -> the protocol
MakeSum = Callable[[int, int], SecureSum]


def to_ring(numbers: Integers, ring: Ring) -> RingIntegers:
    """Return whole numbers modulo 2^bits.

    Example:
        >>> to_ring(np.array([-1, 2]), Ring(4))
        array([15,  2], dtype=uint8)
    """
    words = numbers.astype(np.uint64) & np.uint64(ring.modulus - 1)
    reduced: RingIntegers = words.astype(ring.dtype)
    return reduced


def from_ring(numbers: RingIntegers, ring: Ring) -> Integers:
    """Return those from -2^(bits-1) to 2^(bits-1) - 1 that are the same modulo 2^bits.

    Example:
        >>> from_ring(np.array([15, 2, 8], np.uint8), Ring(4))
        array([-1,  2, -8])
    """
    shift = np.uint64(64 - ring.bits)
    signed: Integers = (numbers.astype(np.uint64) << shift).view(np.int64) >> np.int64(shift)
    return signed


@final
class SecurePrivateSum(PrivateAggregator):
    """Folds clipped updates with shares of noise, of which the server sees only the sum.

    Args:
        shares: gives what clients send; asked for in every round.
        make_sum: makes the protocol.
        terms: of the run.
        bits: of the ring; None for the fewest that hold every sum.

    Attributes:
        clip_norm: of the present round, set by whoever opens it.
        terms: of the run.
        num_unclipped: updates within it.
        memory: nothing is kept from round to round.
    """

    exact = True
    exchanges = True

    def __init__(
        self,
        shares: Callable[[], NoiseShares],
        make_sum: MakeSum,
        terms: Terms,
        bits: int | None = None,
    ) -> None:
        self._shares, self._make_sum, self.terms, self._bits = shares, make_sum, terms, bits
        self.clip_norm = float("inf")
        self._round_index = 0
        self._unclipped = torch.zeros((), dtype=torch.int64)
        self._rounds = RoundSum(self._secure_sum(), terms.seed)

    def _secure_sum(self) -> SecureSum:
        """Return the protocol for the present noise.

        Raises:
            ConfigurationError: if a sum might not fit into the ring, or the cohort is too small.
        """
        shares, most = self._shares(), self.terms.most_clients
        needed = shares.num_bits(most)
        bits = self._bits or needed
        if not needed <= bits <= 64:
            raise ConfigurationError(
                f"SecureMean: noisy whole numbers of {most} clients need {needed} bits, and bits "
                f"are {bits}, 64 at most: leave bits out, or give DistributedDP more noise"
            )
        try:
            secure_sum = self._make_sum(bits, shares.fewest_replies)
            secure_sum.session(most, size=1)
        except ValueError as error:
            raise ConfigurationError(f"SecureMean with DistributedDP: {error}") from error
        self._ring = Ring(bits)
        return secure_sum

    @property
    def protection(self) -> SecurePrivateSum:
        """Itself."""
        return self

    @property
    def over_sites(self) -> SecurePrivateSum | None:
        """Itself, where the protocol is run."""
        return self if self._rounds.secure_sum.protocol == "run" else None

    @property
    def protection_cost(self) -> ProtectionCost:
        """See `Protected`."""
        return self._rounds.protection_cost

    @property
    def hides(self) -> str:
        """Description of what the server sees."""
        if self._rounds.secure_sum.protocol == "count":
            return (
                "protocol 'count' protects nothing and gives what a secure sum would, in which the "
                "server sees only the noisy sum of clipped updates"
            )
        return (
            "the server sees the sum of clipped updates with the noise of at least "
            f"{self._shares().fewest_replies} clients, and no single update"
        )

    def begin(self, terms: Terms) -> None:
        """Do nothing: the terms are known."""

    def typical_bytes(self, size: int, num_clients: int) -> tuple[int, int]:
        """Return what a client sends and receives, if nobody drops."""
        secure_sum = self._secure_sum()
        num_clients = max(num_clients, secure_sum.min_survivors or 2)
        return secure_sum.bytes_up(size, num_clients), secure_sum.bytes_down(size, num_clients)

    def start_round(self, round_index: int) -> None:
        """Learn which round comes next."""
        self._round_index = round_index

    def open(self, like: Tensor) -> None:
        """Start without updates."""
        self._like = like
        self._unclipped = torch.zeros((), dtype=torch.int64, device=like.device)
        self._rounds.secure_sum = self._secure_sum()  # a run that is resumed has other noise
        self._rounds.open(len(like), like.device, self._round_index)

    def add(self, update: ClientUpdate) -> None:
        """Clip one update and take it in as whole numbers with noise.

        Raises:
            ConfigurationError: if it is under a mask of the client's own.
        """
        self._rounds.take(update.client_id, lambda: self.vector_of(update))

    @property
    def agreed_sum(self) -> SecureSum:
        """The protocol with the user's options, and with survivors enough for the noise."""
        return self._rounds.secure_sum

    def vector_of(self, update: ClientUpdate) -> RingIntegers:
        """Return what a client has added up: its clipped update as whole numbers with noise.

        Raises:
            ConfigurationError: if the update is under a mask of the client's own.
        """
        check_whole(update, "SecureMean")
        delta, is_within = clipped(update.delta, self.clip_norm)
        self._unclipped += is_within.to(self._unclipped)
        client = update.client_id
        whole = self._shares().client_integers(delta, self.clip_norm, self._round_index, client)
        return to_ring(whole, self._ring)

    def sum_at_sites(self, adds: SumsAtSites) -> None:
        """Add vectors at their sites."""
        self._rounds.adds_at_sites = adds

    def exchange(
        self, gather: Callable[[Any], list[Any]], all_reduce: Callable[[Tensor], None]
    ) -> None:
        """Gather the updates of all processes in each; called by all of them."""
        self._rounds.exchange(gather, all_reduce)

    def sums(self) -> list[Tensor]:
        """Return the numbers to add over processes besides the vectors, see `exchange`."""
        return [self._unclipped]

    def load_sums(self, sums: list[Tensor]) -> None:
        """Restore the counts of all processes."""
        [self._unclipped] = sums

    def miss(self, clients: Iterable[int]) -> None:
        """Learn which clients of the cohort sent no vector: they dropped before it was due."""
        self._rounds.miss(clients)

    def close(self) -> Tensor:
        """Return the noisy sum over the expected cohort; 0 where nobody was asked.

        Raises:
            RoundFailure: if too few clients are left for a sum, or for its noise.
        """
        if not self._rounds.clients:
            return torch.zeros_like(self._like)
        shares = self._shares()
        whole = from_ring(self._rounds.total(), self._ring)
        return shares.decoded(whole, self.clip_norm, self._like) / shares.expected

    @property
    def num_replies(self) -> int:
        """Updates so far."""
        return len(self._rounds.clients)

    @property
    def num_unclipped(self) -> int:
        """Updates that were within the clip norm."""
        return int(self._unclipped)

    def state_dict(self) -> dict[str, Any]:
        """Return nothing: a private round that is open is in no checkpoint."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Do nothing."""
