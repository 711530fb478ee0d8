"""Tags of ciphertexts that add up as these do: they show that a sum is that of named senders, and of all of them.

    t_i = Σ_j r_j c_ij + b_i  modulo each prime        Σ_i t_i = Σ_j r_j (Σ_i c_ij) + Σ_i b_i

r and the pads b_i come from a key that the server does not have, b_i also from who sends. Whoever adds other
ciphertexts, leaves one out or changes one has to guess: r has 24 bits and there are four tags, so that one
change in 2^96 passes. Source: Agrawal and Boneh 2009 (ACNS), homomorphic MACs, section 4.
Differs: r is short, so that products fit into 64 bits, and there are several tags for that.
"""

from __future__ import annotations

import hmac
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from fl_lightning.secure.encryption.ciphertext_numbers import Numbers
from fl_lightning.secure.entropy import keystream

NUM_TAGS, NONCE_SIZE = 4, 16
_FACTOR_BITS, _HALF_BITS, _BLOCK = 24, 30, 512  # 24 + 30 + 9 bits: a block's sum fits into 64
_PAD_BYTES = 16
Tags = npt.NDArray[np.uint64]  # shape (NUM_TAGS, P)


@dataclass(frozen=True)
class Sender:
    """Who has encrypted a part of a sum.

    Args:
        client: its id.
        nonce: 16 random bytes, of this message alone.
        fewest: clients that a sum with this message must have.
    """

    client: int
    nonce: bytes
    fewest: int = 2

    @property
    def identity(self) -> bytes:
        """What its pads are made of."""
        return f"{self.client} {self.nonce.hex()} {self.fewest}".encode()


class LinearTags:
    """Makes and checks tags.

    Args:
        key: 32 bytes that the server does not have.
        context: of which round, and what else all senders agree on.
        primes: of ciphertexts.
        length: numbers of a ciphertext for each prime.
    """

    def __init__(self, key: bytes, context: bytes, primes: Iterable[int], length: int) -> None:
        self._key, self._context, self._primes = key, context, list(primes)
        stream = keystream(self._secret(b"factors"))
        words = np.frombuffer(stream(4 * NUM_TAGS * len(self._primes) * length), "<u4")
        factors = (words & np.uint32((1 << _FACTOR_BITS) - 1)).astype(np.uint64)
        self._factors = factors.reshape(NUM_TAGS, len(self._primes), -1, min(_BLOCK, length))

    def of(self, ciphertexts: Iterable[Numbers], sender: Sender) -> list[Tags]:
        """Return the tags of what a sender has encrypted, one after the other."""
        parts = list(ciphertexts)
        pads = self._pads(sender, len(parts))
        return [
            self._reduced(self._products(part) + pad) for part, pad in zip(parts, pads, strict=True)
        ]

    def are_of_sum(
        self, ciphertexts: Iterable[Numbers], tags: Iterable[Tags], senders: Iterable[Sender]
    ) -> bool:
        """Whether ciphertexts and tags are the sums of what these senders have sent, and of all of it."""
        parts, given = list(ciphertexts), list(tags)
        pads = np.zeros((len(parts), NUM_TAGS, len(self._primes)), object)
        for sender in senders:
            pads += self._pads(sender, len(parts))
        expected = [self._reduced(self._products(p) + b) for p, b in zip(parts, pads, strict=True)]
        pairs = zip(expected, given, strict=True)
        return all(hmac.compare_digest(one.tobytes(), other.tobytes()) for one, other in pairs)

    def _secret(self, purpose: bytes) -> bytes:
        return hmac.digest(self._key, purpose + b" " + self._context, "sha256")

    def _pads(self, sender: Sender, count: int) -> npt.NDArray[np.object_]:
        """Return pads, whole numbers of shape (count, NUM_TAGS, P)."""
        stream = keystream(self._secret(b"pads " + sender.identity))
        size = count * NUM_TAGS * len(self._primes)
        numbers = [int.from_bytes(stream(_PAD_BYTES), "little") for _ in range(size)]
        return np.array(numbers, object).reshape(count, NUM_TAGS, len(self._primes))

    def _products(self, numbers: Numbers) -> npt.NDArray[np.object_]:
        """Return Σ_j r_j c_j, whole numbers of shape (NUM_TAGS, P)."""
        blocks = numbers.reshape(len(self._primes), -1, self._factors.shape[-1])
        low, high = (
            (self._factors * half).sum(-1, dtype=np.uint64).astype(object).sum(-1)
            for half in (blocks & np.uint64((1 << _HALF_BITS) - 1), blocks >> np.uint64(_HALF_BITS))
        )
        product: npt.NDArray[np.object_] = low + (high << _HALF_BITS)
        return product

    def _reduced(self, numbers: npt.NDArray[np.object_]) -> Tags:
        reduced: Tags = (numbers % np.array(self._primes, object)).astype(np.uint64)
        return reduced
