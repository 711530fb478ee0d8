"""The mean of updates by a secure sum: the server learns only the sum.

    mean = (2c / L) Σ_k w_k q_k / Σ_k w_k - c        q_k: levels of Δ_k, w_k = min(n_k, max_examples)

The integers w q and w are added modulo 2^bits by the protocol of `fl_lightning.secure`.
Sources: Bonawitz et al. 2017; the integers are those of `SumQuantiser`, with its sources.

Below: distributed differential privacy over the same protocol, whose server sees a noisy sum of integers.

    client: clip_S(Δ_k) → integers + a share of the noise → modulo 2^b, padded
    server: Σ modulo 2^b → from -2^(b-1) to 2^(b-1) → · step / m

b is large enough that no sum of the largest cohort overflows: updates are clipped, and shares of noise are
bounded. Clients refuse to open a sum of too few vectors, whose noise would not be enough. Source: Kairouz, Liu
and Steinke 2021 (2102.06387), Algorithms 1 and 2, without the rotation; shares of Agarwal, Kairouz and Liu 2021
(2110.04995).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, final

import numpy as np
import torch
from torch import Tensor
from typing_extensions import override

from fl_lightning.core.errors import ConfigurationError
from fl_lightning.core.seeds import Integers, derive_seed, numpy_generator
from fl_lightning.core.update import ClientUpdate
from fl_lightning.privacy.private_mean import clipped
from fl_lightning.secure.protocol.session import SparseGraph, new_run_id
from fl_lightning.secure.ring import Ring, RingIntegers
from fl_lightning.secure.secure_sum import HiddenIntegers, SecureSum
from fl_lightning.secure.sum_quantiser import ACCURACY, SumQuantiser
from fl_lightning.server.aggregator import PrivateAggregator, check_whole
from fl_lightning.server.protected import NoiseShares, Terms
from fl_lightning.updates.payload import Dense
from fl_lightning.updates.sparsifiers import RandomK

# defaults of clip, levels, max_examples and random_k
_OWN_GRID = (1.0, None, 1024, None)
LEAST_LEVELS = 1 << 16  # fewer are used only if the user has asked for them


@final
class SecureMean(HiddenIntegers):
    """The mean of updates weighted by examples, by a secure sum: the server learns no single update.

    Args:
        clip: c > 0; coordinates of an update beyond ±c are moved there.
        levels: L, the number of steps from -c to c to which coordinates are rounded at random. None for
            enough that the mean is within 1e-6 of the plain one, or as many as ``bits`` hold; a message
            before training says so.
        max_examples: largest weight of a client, ≥ 1; 1 weights all clients equally.
        bits: bits of the ring, at most 64; None for the fewest that hold the sum of the largest cohort.
        random_k: random subset of the coordinates that is sent, the same of all clients in a round.
        threshold: share of a cohort, from 1/2 to below 1: more clients must answer at every stage.
        sparse: graph of the pairs of clients that share pads, for large cohorts; None for all pairs.
        active: True for protection from a server that breaks the rules; the threshold is then at least
            2/3. None to choose True if that costs less than a fifth of the time: for vectors of 8 MB or
            more, unless ``threshold`` is below 2/3 or ``sparse`` is given.
        protocol: ``"run"`` runs the protocol; ``"count"`` returns the same mean and numbers of bytes
            without the protocol, which protects nothing and is for experiments.

    Raises:
        ConfigurationError: if an option is outside its range, or options contradict each other;
            from `begin`, if a sum might not fit into the ring.

    Example:
        >>> import torch
        >>> mean = SecureMean(clip=4.0, levels=8)
        >>> mean.begin(Terms(most_clients=3))
        >>> mean.open(torch.empty(1))
        >>> for client, (value, n) in enumerate([(2.0, 1), (4.0, 3)]):
        ...     mean.add(ClientUpdate(client, torch.tensor([value]), torch.empty(0), n, 1))
        >>> mean.close(), mean.protection_cost.bytes_up[0]
        (tensor([3.5000]), 2190)
    """

    def __init__(
        self,
        *,
        clip: float = 1.0,
        levels: int | None = None,
        max_examples: int = 1024,
        bits: int | None = None,
        random_k: RandomK | None = None,
        threshold: float = 2 / 3,
        sparse: SparseGraph | None = None,
        active: bool | None = None,
        protocol: Literal["run", "count"] = "run",
    ) -> None:
        if bits is not None and not 2 <= bits <= 64:
            raise ConfigurationError(
                f"SecureMean: bits must be from 2 to 64, got {bits}: null takes the fewest that hold a sum"
            )
        self.clip, self.levels, self.max_examples, self.bits = clip, levels, max_examples, bits
        self.random_k, self.protocol = random_k, protocol
        self._options: dict[str, Any] = {
            "threshold": threshold,
            "sparse": sparse,
            "active": active,
            "protocol": protocol,
        }
        self.begin(Terms(most_clients=2))

    @property
    @override
    def noise_shares(self) -> SecureMean:
        return self  # the protocol adds any integers

    @property
    @override
    def hides(self) -> str:
        if self.protocol == "count":
            told = (
                "protocol 'count' protects nothing and gives what a secure sum would, in which the "
                "server sees only the sum of updates and of their examples"
            )
        else:
            told = "the server sees the sum of updates and of their examples, and no single update"
        if self.levels is None and self._quantiser.step > ACCURACY:
            told += (
                f" (their mean is within {self._quantiser.step:.1g} of the plain one, not "
                f"{ACCURACY:g}: {self._quantiser.bits} bits hold {self._quantiser.levels} levels)"
            )
        return told

    @override
    def begin(self, terms: Terms) -> None:
        self.terms = terms
        self._run = new_run_id()  # a resumed run begins a new protocol run, with new keys
        try:
            self._quantiser = SumQuantiser.of(
                num_clients=terms.most_clients,
                clip=self.clip,
                levels=self.levels,
                max_examples=self.max_examples,
                bits=self.bits,
                least=LEAST_LEVELS,
            )
            self._secure_sum = self.secure_sum(self._quantiser.bits)
            self._secure_sum.session(terms.most_clients, size=1)
        except ValueError as error:
            raise ConfigurationError(f"SecureMean: {error}") from error

    def secure_sum(self, bits: int, min_survivors: int | None = None) -> SecureSum:
        """Return the secure-sum protocol with the options of this aggregator.

        Args:
            bits: bits of the ring.
            min_survivors: smallest number of vectors in a sum; None for the threshold.

        Raises:
            ValueError: if an option is outside its range.
        """
        return SecureSum(bits=bits, run=self._run, min_survivors=min_survivors, **self._options)

    def fewest_survivors(self, num_clients: int) -> int:
        """Return the smallest number of clients whose vectors may be summed, in a cohort of ``num_clients``."""
        return self._secure_sum.session(num_clients, size=1).least_survivors

    def with_noise_shares(self, shares: Callable[[], NoiseShares]) -> SecurePrivateSum:
        """Return an aggregator that sums updates with noise for privacy by the same protocol; call it after `begin`.

        Args:
            shares: returns the mechanism that makes clients' integers with noise.

        Raises:
            ConfigurationError: if ``clip``, ``levels``, ``max_examples`` or ``random_k`` were
                given, which are of no use there, or a sum might not fit into the ring.
        """
        given = (self.clip, self.levels, self.max_examples, self.random_k)
        if given != _OWN_GRID:
            raise ConfigurationError(
                "SecureMean adds up the whole numbers of federation.privacy, which has its own "
                "clip_norm and steps and counts clients alike: leave clip, levels, max_examples and "
                "random_k out"
            )
        return SecurePrivateSum(shares, self)

    @override
    def vector_of(self, update: ClientUpdate) -> RingIntegers:
        check_whole(update, "SecureMean")
        seed, client = self.terms.seed, update.client_id
        draws = numpy_generator(seed, "secure rounding", self._round_index, client).random
        return self._quantiser.encode(self._chosen(update.delta), update.num_examples, draws)

    def close(self) -> Tensor:
        """Run the secure sum of the round, and return the mean of its updates.

        Raises:
            RoundFailure: if too few clients are left for a secure sum.
        """
        return self._spread(self._quantiser.mean(self.total())).to(self._like)

    @override
    def sent_size(self, size: int) -> int:
        return 1 + (size if self.random_k is None else self.random_k.sent_size(size))

    def _chosen(self, delta: Tensor) -> Tensor:
        if self.random_k is None:
            return delta
        return self.random_k.on_client(Dense(delta), self._shared_seed()).to_dense()

    def _spread(self, mean: Tensor) -> Tensor:
        """Return the mean at full size, from the coordinates that ``random_k`` has chosen."""
        if self.random_k is None:
            return mean
        size = len(self._like)
        return self.random_k.on_server(Dense(mean), self._shared_seed(), size).to_dense()

    def _shared_seed(self) -> int:
        return derive_seed(self.terms.seed, "secure coordinates", self._round_index)


def to_ring(numbers: Integers, ring: Ring) -> RingIntegers:
    """Return signed integers modulo 2^bits, in the ring's dtype.

    Example:
        >>> to_ring(np.array([-1, 2]), Ring(4))
        array([15,  2], dtype=uint8)
    """
    words = numbers.astype(np.uint64) & np.uint64(ring.modulus - 1)
    reduced: RingIntegers = words.astype(ring.dtype)
    return reduced


def from_ring(numbers: RingIntegers, ring: Ring) -> Integers:
    """Return integers modulo 2^bits as signed integers from -2^(bits-1) to 2^(bits-1) - 1.

    Example:
        >>> from_ring(np.array([15, 2, 8], np.uint8), Ring(4))
        array([-1,  2, -8])
    """
    shift = np.uint64(64 - ring.bits)
    signed: Integers = (numbers.astype(np.uint64) << shift).view(np.int64) >> np.int64(shift)
    return signed


@final
class SecurePrivateSum(HiddenIntegers, PrivateAggregator):
    """Aggregator of distributed differential privacy: a secure sum of clipped updates, each with a share of noise.

    Args:
        shares: returns the mechanism of the current round, which makes clients' integers with noise.
        mean: aggregator whose protocol and ``bits`` are used; its `begin` was called.

    Attributes:
        clip_norm: clipping norm of the current round, set before the round is opened.
        num_unclipped: number of updates with a norm within ``clip_norm``.
    """

    def __init__(self, shares: Callable[[], NoiseShares], mean: SecureMean) -> None:
        self._shares, self._mean, self.terms = shares, mean, mean.terms
        self._unclipped = torch.zeros((), dtype=torch.int64)
        self._secure_sum = self._sum_for_noise()

    def _sum_for_noise(self) -> SecureSum:
        """Return the secure sum with enough bits per integer for the current noise.

        Raises:
            ConfigurationError: if a sum might not fit into the ring, or the cohort is too small.
        """
        shares, most = self._shares(), self.terms.most_clients
        needed = shares.num_bits(most)
        bits = self._mean.bits or needed
        if not needed <= bits <= 64:
            raise ConfigurationError(
                f"SecureMean: noisy whole numbers of {most} clients need {needed} bits, and bits "
                f"are {bits}, 64 at most: leave bits out, or give DistributedDP more noise"
            )
        try:
            secure_sum = self._mean.secure_sum(bits, shares.fewest_replies)
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
        self._secure_sum = self._sum_for_noise()  # a resumed run may have other noise
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
