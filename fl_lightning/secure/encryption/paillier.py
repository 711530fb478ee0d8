"""Means of encrypted integers with Paillier, many in one ciphertext; for small vectors.

    mean = Dec(Π_k Enc(a_k q_k) mod n²) / Σ_k a_k        a_k = min(n_k, max_examples)
    Enc(x) Enc(y) = Enc(x + y)  mod n²                   plaintext: Σ_j q_j 2^(s j), s bits hold any sum q_j

q_k: the update as integer levels, rounded at random, as in a secure sum; clients multiply by their examples before
they encrypt. Sums are exact, unlike those of CKKS, and thousands of times slower: a run that would take too long is
refused before it begins. All clients have the secret key, the server none. Scheme: Paillier 1999
(EUROCRYPT), in `phe` (extra ``he``); packing as in BatchCrypt (Zhang et al. 2020, USENIX ATC), without its
signs: our quantiser's integers are not negative and its sums provably fit.
"""

from __future__ import annotations

import math
import time
from typing import final

import numpy as np
from torch import Tensor

from fl_lightning.core.errors import ConfigurationError
from fl_lightning.core.seeds import numpy_generator
from fl_lightning.secure.encryption.encrypted_update import CKKSLayout, EncryptedUpdate
from fl_lightning.secure.ring import RingIntegers
from fl_lightning.secure.sum_quantiser import SumQuantiser
from fl_lightning.server.protected import FEWEST_CLIENTS, Terms

LEAST_BITS = 2048  # 112 bits of security; 3072 have 128 (NIST SP 800-57, part 1, table 2)
_LEAST_LEVELS = 1 << 8
Ciphertexts = tuple[bytes, ...]


class PaillierSum:
    """Encrypts, adds and decrypts integer vectors with a new pair of Paillier keys.

    Args:
        quantiser: quantiser that makes the vectors.
        key_bits: bits of the modulus.
        max_seconds: most CPU seconds for the encryption of one vector on this machine.

    Example:
        >>> import torch
        >>> quantiser = SumQuantiser(num_clients=2, clip=1.0, levels=4)
        >>> paillier, draw = PaillierSum(quantiser, 2048), np.random.default_rng(0).random
        >>> one = paillier.encrypt(quantiser.encode(torch.tensor([0.5, -1.0]), 1, draw))
        >>> two = paillier.encrypt(quantiser.encode(torch.tensor([1.0, 0.0]), 1, draw))
        >>> quantiser.mean(paillier.decrypt(paillier.plus(one, two), size=3))
        tensor([ 0.7500, -0.5000], dtype=torch.float64)
    """

    def __init__(
        self, quantiser: SumQuantiser, key_bits: int = 3072, max_seconds: float = math.inf
    ) -> None:
        try:
            from phe import paillier
        except ImportError as error:
            raise ImportError("Paillier needs phe: pip install 'fl-lightning[he]'") from error
        self.quantiser, self._max_seconds = quantiser, max_seconds
        self._public, self._secret = paillier.generate_paillier_keypair(n_length=key_bits)
        bits: int = self._public.n.bit_length()
        self.width = -(-2 * bits // 8)
        self._slot_bits = quantiser.largest_sum.bit_length()
        # a plaintext with one bit less than n is below n
        self._slots = (bits - 1) // self._slot_bits
        began = time.process_time()
        self._public.raw_encrypt(1)
        self._seconds = time.process_time() - began

    def num_ciphertexts(self, size: int) -> int:
        """Return how many ciphertexts, of ``width`` bytes each, a vector of ``size`` integers needs.

        Raises:
            ConfigurationError: if their encryption takes longer than ``max_seconds``.
        """
        count = -(-size // self._slots)
        seconds = self._seconds * count
        if seconds > self._max_seconds:
            raise ConfigurationError(
                f"EncryptedMean with Paillier: encrypting {size} integers, {self._slots} to a ciphertext, "
                f"takes about {seconds:.0f} s ({seconds / 3600:.1f} h), more than max_seconds "
                f"{self._max_seconds:g}: encrypt fewer coordinates, or use CKKS or a secure sum"
            )
        return count

    def encrypt(self, values: RingIntegers) -> Ciphertexts:
        """Encrypt a vector of integers; two encryptions of one vector differ."""
        slots = self._slots
        parts = (values[at : at + slots].tolist() for at in range(0, len(values), slots))
        return tuple(self._bytes(self._public.raw_encrypt(self._packed(part))) for part in parts)

    def plus(self, one: Ciphertexts, other: Ciphertexts) -> Ciphertexts:
        """Return the encrypted sum of two encrypted vectors, which needs no secret key."""
        pairs = zip(map(_number, one), map(_number, other), strict=True)
        return tuple(self._bytes(a * b % self._public.nsquare) for a, b in pairs)

    def decrypt(self, ciphertexts: Ciphertexts, size: int) -> RingIntegers:
        """Decrypt a vector of ``size`` integers; return them with the ring's dtype, shape (size,)."""
        values: list[int] = []
        for ciphertext in ciphertexts:
            plain = int(self._secret.raw_decrypt(_number(ciphertext)))
            places = range(min(self._slots, size - len(values)))
            values += [plain >> self._slot_bits * at & (1 << self._slot_bits) - 1 for at in places]
        return np.array(values, np.uint64).astype(self.quantiser.ring.dtype)

    def _packed(self, values: list[int]) -> int:
        plain = 0
        for value in reversed(values):
            plain = plain << self._slot_bits | value
        return plain

    def _bytes(self, ciphertext: int) -> bytes:
        return int(ciphertext).to_bytes(self.width, "little")


def _number(ciphertext: bytes) -> int:
    return int.from_bytes(ciphertext, "little")


@final
class Paillier:
    """Options of Paillier encryption for `EncryptedMean`.

    Args:
        key_bits: bits of the modulus, at least 2048; 3072 have 128 bits of security.
        clip: numbers beyond ±clip are moved there.
        max_seconds: most CPU seconds for the encryption of one update on this machine.

    Raises:
        ConfigurationError: if an option is outside its range.

    Example:
        >>> Paillier(key_bits=1024)
        Traceback (most recent call last):
        ...
        fl_lightning.core.errors.ConfigurationError: Paillier: key_bits must be at least 2048, got 1024: \
shorter keys can be broken; 3072 is the default
    """

    def __init__(
        self, *, key_bits: int = 3072, clip: float = 1.0, max_seconds: float = 60.0
    ) -> None:
        if key_bits < LEAST_BITS:
            raise ConfigurationError(
                f"Paillier: key_bits must be at least {LEAST_BITS}, got {key_bits}: shorter keys can "
                "be broken; 3072 is the default"
            )
        for name, value in (("clip", clip), ("max_seconds", max_seconds)):
            if not 0 < value < math.inf:
                raise ConfigurationError(f"Paillier: {name} must be a positive number, got {value}")
        self.key_bits, self.clip, self.max_seconds = key_bits, clip, max_seconds

    def begin(self, terms: Terms, max_examples: int) -> PaillierSum:
        """Return the Paillier encryption of a run's updates, with a new pair of keys."""
        try:
            quantiser = SumQuantiser.of(
                num_clients=max(FEWEST_CLIENTS, terms.most_clients),
                clip=self.clip,
                levels=None,
                max_examples=max_examples,
                bits=None,
                least=_LEAST_LEVELS,
            )
        except ValueError as error:
            raise ConfigurationError(f"EncryptedMean with Paillier: {error}") from error
        return PaillierSum(quantiser, self.key_bits, self.max_seconds)


@final
class PaillierRound:
    """Simulates one round of `EncryptedMean` with Paillier: encrypts, adds and decrypts updates.

    Args:
        layout: layout of encrypted updates in this round.
        paillier: encryption with the keys of the run.
        terms: facts about the run.
        most_examples: largest possible number of examples in a round.
    """

    def __init__(
        self, layout: CKKSLayout, paillier: PaillierSum, terms: Terms, most_examples: int
    ) -> None:
        self._layout, self._paillier = layout, paillier
        self._seed, self._most = terms.seed, most_examples
        paillier.num_ciphertexts(
            layout.num_encrypted + 1
        )  # one more for the examples; raises for too many

    def encrypt(self, delta: Tensor, num_examples: int, sender: int) -> EncryptedUpdate:
        """Encrypt a client's update, as integers multiplied by its number of examples."""
        values, clear = self._layout.parted(delta.detach().double().cpu())
        draws = numpy_generator(self._seed, "encrypted rounding", self._layout.round_index, sender)
        integers = self._paillier.quantiser.encode(values, num_examples, draws.random)
        return EncryptedUpdate(self._paillier.encrypt(integers), clear.float(), sender)

    def plus(
        self, total: EncryptedUpdate | None, sent: EncryptedUpdate, num_examples: int
    ) -> EncryptedUpdate:
        """Add a client's encrypted update to the sum; ``total`` is None for the first update."""
        ciphertexts, clear = sent.ciphertexts, sent.clear.double() * (num_examples / self._most)
        if total is not None:
            ciphertexts = self._paillier.plus(total.ciphertexts, ciphertexts)
            clear = clear + total.clear.double()
        return EncryptedUpdate(ciphertexts, clear.float())

    def mean(self, total: EncryptedUpdate, num_examples: int) -> Tensor:
        """Decrypt the sum of updates, and return their mean weighted by examples, float64."""
        size = self._layout.num_encrypted + 1
        values = self._paillier.quantiser.mean(self._paillier.decrypt(total.ciphertexts, size))
        return self._layout.joined(values, total.clear.double() * (self._most / num_examples))
