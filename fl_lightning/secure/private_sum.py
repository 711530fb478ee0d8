"""Distributed differential privacy over a secure sum: the server sees only a noisy sum of integers.

    client: clip_S(Δ_k) → integers + a share of the noise → modulo 2^b, padded
    server: Σ modulo 2^b → from -2^(b-1) to 2^(b-1) → · step / m

b is large enough that no sum of the largest cohort overflows: updates are clipped, and shares of noise
are bounded. Clients refuse to open a sum of too few vectors, whose noise would not be enough. Source: Kairouz, Liu and Steinke 2021 (2102.06387), Algorithms 1 and 2, without
the rotation; shares of Agarwal, Kairouz and Liu 2021 (2110.04995).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import final

import numpy as np
import torch
from torch import Tensor
from typing_extensions import override

from fl_lightning.core.errors import ConfigurationError
from fl_lightning.core.seeds import Integers
from fl_lightning.core.update import ClientUpdate
from fl_lightning.privacy.private_mean import clipped
from fl_lightning.secure.ring import Ring, RingIntegers
from fl_lightning.secure.secure_sum import HiddenIntegers, SecureSum
from fl_lightning.server.aggregator import PrivateAggregator, check_whole
from fl_lightning.server.protected import NoiseShares, Terms

# (bits, smallest number of vectors) -> the protocol
MakeSum = Callable[[int, int], SecureSum]


def to_ring(numbers: Integers, ring: Ring) -> RingIntegers:
    """Return integers modulo 2^bits.

    Example:
        >>> to_ring(np.array([-1, 2]), Ring(4))
        array([15,  2], dtype=uint8)
    """
    words = numbers.astype(np.uint64) & np.uint64(ring.modulus - 1)
    reduced: RingIntegers = words.astype(ring.dtype)
    return reduced


def from_ring(numbers: RingIntegers, ring: Ring) -> Integers:
    """Return the integers from -2^(bits-1) to 2^(bits-1) - 1 that are equal modulo 2^bits.

    Example:
        >>> from_ring(np.array([15, 2, 8], np.uint8), Ring(4))
        array([-1,  2, -8])
    """
    shift = np.uint64(64 - ring.bits)
    signed: Integers = (numbers.astype(np.uint64) << shift).view(np.int64) >> np.int64(shift)
    return signed


@final
class SecurePrivateSum(HiddenIntegers, PrivateAggregator):
    """Sums clipped updates with shares of noise by a secure sum.

    Args:
        shares: returns the mechanism of the current round, which makes clients' integers with noise.
        make_sum: makes the protocol.
        terms: facts about the run.
        bits: bits of the ring; None for the fewest that hold every sum.

    Attributes:
        clip_norm: clipping norm of the current round, set before the round is opened.
        num_unclipped: number of updates with a norm within it.
    """

    def __init__(
        self,
        shares: Callable[[], NoiseShares],
        make_sum: MakeSum,
        terms: Terms,
        bits: int | None = None,
    ) -> None:
        self._shares, self._make_sum, self.terms, self._bits = shares, make_sum, terms, bits
        self._unclipped = torch.zeros((), dtype=torch.int64)
        self._secure_sum = self._of_present_noise()

    def _of_present_noise(self) -> SecureSum:
        """Return the protocol for the current noise.

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
        return secure_sum

    @property
    @override
    def hides(self) -> str:
        if self._secure_sum.protocol == "count":
            return (
                "protocol 'count' protects nothing and gives what a secure sum would, in which the "
                "server sees only the noisy sum of clipped updates"
            )
        return (
            "the server sees the sum of clipped updates with the noise of at least "
            f"{self._shares().fewest_replies} clients, and no single update"
        )

    @override
    def begin(self, terms: Terms) -> None:
        return  # the terms are known

    @override
    def open(self, like: Tensor) -> None:
        self._unclipped = torch.zeros((), dtype=torch.int64, device=like.device)
        self._secure_sum = self._of_present_noise()  # a resumed run may have other noise
        super().open(like)

    @override
    def vector_of(self, update: ClientUpdate) -> RingIntegers:
        check_whole(update, "SecureMean")
        delta, is_within = clipped(update.delta, self.clip_norm)
        self._unclipped += is_within.to(self._unclipped)
        client = update.client_id
        whole = self._shares().client_integers(delta, self.clip_norm, self._round_index, client)
        return to_ring(whole, Ring(self._secure_sum.bits))

    @override
    def sums(self) -> list[Tensor]:
        return [self._unclipped]

    @override
    def load_sums(self, sums: list[Tensor]) -> None:
        [self._unclipped] = sums

    def close(self) -> Tensor:
        """Return the noisy sum divided by the expected size of the cohort; zeros for an empty cohort.

        Raises:
            RoundFailure: if too few clients are left for a sum, or for its noise.
        """
        if not self.clients:
            return torch.zeros_like(self._like)
        shares = self._shares()
        whole = from_ring(self.total(), self._ring)
        return shares.decoded(whole, self.clip_norm, self._like) / shares.expected

    @property
    @override
    def num_replies(self) -> int:
        return len(self.clients)

    @property
    @override
    def num_unclipped(self) -> int:
        return int(self._unclipped)
