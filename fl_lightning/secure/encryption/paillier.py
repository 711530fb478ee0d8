"""Sums of encrypted integers with Paillier, many in one ciphertext; for small vectors.

    Enc(x) Enc(y) = Enc(x + y)  mod n²        plaintext: Σ_j q_j 2^(s j),   s bits hold any sum q_j

Exact, unlike CKKS, and thousands of times slower: what would take long is refused before it
begins. All clients have the secret key, the server none. Scheme: Paillier 1999 (EUROCRYPT), in
`phe` (extra ``he``); packing as in BatchCrypt (Zhang et al. 2020, USENIX ATC), without its signs:
our quantiser's integers are not negative and its sums provably fit.

Rounds of `EncryptedMean` with Paillier, for small vectors.

    mean = Dec(Π_k Enc(a_k q_k) mod n²) / Σ_k a_k        a_k = min(n_k, max_examples)

q_k: the update in whole levels, rounded at random, as in a secure sum; clients multiply by their
examples before they encrypt. The sum of these integers is exact. Scheme:
`fl_lightning.secure.encryption.paillier`.
"""

from __future__ import annotations

import math
import secrets
import time
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, final

import numpy as np
from torch import Tensor

from fl_lightning.core.errors import ConfigurationError
from fl_lightning.core.plain_json import MessageError
from fl_lightning.core.seeds import numpy_generator
from fl_lightning.secure.encryption.encrypted_update import TAG_SIZE, CKKSLayout, EncryptedUpdate
from fl_lightning.secure.ring import RingIntegers
from fl_lightning.secure.sum_quantiser import SumQuantiser, fine_levels
from fl_lightning.server.protected import FEWEST_CLIENTS, Terms

LEAST_BITS = 2048  # 112 bits of security; 3072 have 128 (NIST SP 800-57, part 1, table 2)
ACCURACY = 1e-6
_LEAST_LEVELS = 1 << 8
_UPDATE, _SUM = b"Paillier update", b"Paillier sum"


def generate_pair(bits: int = 3072) -> tuple[Any, Any]:
    """Return a new public and a new secret key of `phe`, from the operating system's entropy."""
    if bits < LEAST_BITS:
        raise ValueError(
            f"bits must be at least {LEAST_BITS}, got {bits}: shorter keys can be broken"
        )
    try:
        from phe import paillier
    except ImportError as error:
        raise ImportError("Paillier needs phe: pip install 'fl-lightning[he]'") from error
    pair: tuple[Any, Any] = paillier.generate_paillier_keypair(n_length=bits)
    return pair


class PaillierSum:
    """Encrypts, adds and decrypts vectors of one quantiser.

    Args:
        public: key of `phe`.
        secret: key of `phe`; None for the server.
        quantiser: whose integers are added.
        size: integers of a vector.
        max_seconds: the most that encrypting one vector may take on this machine.

    Raises:
        ValueError: if it would take longer.

    Example:
        >>> import torch
        >>> quantiser = SumQuantiser(num_clients=2, clip=1.0, levels=4)
        >>> public, secret = generate_pair(2048)
        >>> clients = PaillierSum(public, secret, quantiser, size=3)
        >>> server = PaillierSum(public, None, quantiser, size=3)
        >>> draw = np.random.default_rng(0).random
        >>> one = clients.encrypt(quantiser.encode(torch.tensor([0.5, -1.0]), 1, draw))
        >>> two = clients.encrypt(quantiser.encode(torch.tensor([1.0, 0.0]), 1, draw))
        >>> quantiser.mean(clients.decrypt(server.sum([one, two])))
        tensor([ 0.7500, -0.5000], dtype=torch.float64)
    """

    def __init__(
        self,
        public: Any,
        secret: Any | None,
        quantiser: SumQuantiser,
        size: int,
        *,
        max_seconds: float = 600,
    ) -> None:
        self._public, self._secret = public, secret
        self._quantiser, self._size = quantiser, size
        bits: int = public.n.bit_length()
        self._slot_bits = quantiser.largest_sum.bit_length()
        # a slot of the plaintext's size less one bit stays below n
        self._slots = (bits - 1) // self._slot_bits
        self._width = -(-2 * bits // 8)
        began = time.process_time()
        public.raw_encrypt(1)
        seconds = (time.process_time() - began) * self.num_ciphertexts
        if seconds > max_seconds:
            raise ValueError(
                f"encrypting {size} integers, {self._slots} to a ciphertext, takes about "
                f"{seconds:.0f} s ({seconds / 3600:.1f} h), more than max_seconds {max_seconds:g}: "
                "encrypt fewer coordinates, or use CKKS or a secure sum"
            )

    @property
    def num_ciphertexts(self) -> int:
        """How many ciphertexts a vector fills."""
        return -(-self._size // self._slots)

    @property
    def num_bytes(self) -> int:
        """The length of an encrypted vector."""
        return self.num_ciphertexts * self._width

    def encrypt(self, values: RingIntegers) -> bytes:
        """Return the vector, encrypted.

        Raises:
            ValueError: if it is no vector of the quantiser.
        """
        values = self._quantiser.ring.checked(values)
        most = self._quantiser.levels * self._quantiser.max_examples
        if values.shape != (self._size,) or (len(values) and int(values.max()) > most):
            raise ValueError(f"values must be {self._size} integers of at most {most}")
        return b"".join(
            self._bytes(self._public.raw_encrypt(self._packed(values[at : at + self._slots])))
            for at in range(0, self._size, self._slots)
        )

    def sum(self, vectors: Iterable[bytes]) -> bytes:
        """Return the encrypted sum.

        Raises:
            ValueError: if there are none, or more than the quantiser is made for.
            MessageError: if one is no encrypted vector.
        """
        total, count = [1] * self.num_ciphertexts, 0
        for data in vectors:
            ciphertexts, count = self._ciphertexts(data), count + 1
            total = [a * b % self._public.nsquare for a, b in zip(total, ciphertexts, strict=True)]
        if not 1 <= count <= self._quantiser.num_clients:
            raise ValueError(
                f"1 to {self._quantiser.num_clients} vectors can be added, not {count}"
            )
        return b"".join(self._bytes(each) for each in total)

    def decrypt(self, data: bytes) -> RingIntegers:
        """Return the integers, of the ring's dtype.

        Raises:
            ValueError: if there is no secret key.
            MessageError: if this is no encrypted vector.
        """
        if self._secret is None:
            raise ValueError("the server's key cannot decrypt")
        values: list[int] = []
        for ciphertext in self._ciphertexts(data):
            plain = int(self._secret.raw_decrypt(ciphertext))
            places = range(min(self._slots, self._size - len(values)))
            values += [plain >> self._slot_bits * at & (1 << self._slot_bits) - 1 for at in places]
        return np.array(values, np.uint64).astype(self._quantiser.ring.dtype)

    def _packed(self, values: RingIntegers) -> int:
        plain = 0
        for value in reversed(values.tolist()):
            plain = plain << self._slot_bits | value
        return plain

    def _bytes(self, ciphertext: int) -> bytes:
        return int(ciphertext).to_bytes(self._width, "little")

    def _ciphertexts(self, data: bytes) -> list[int]:
        if len(data) != self.num_bytes:
            raise MessageError(f"{self.num_bytes} bytes expected, got {len(data)}")
        numbers = [
            int.from_bytes(data[at : at + self._width], "little")
            for at in range(0, len(data), self._width)
        ]
        if not all(0 < number < self._public.nsquare for number in numbers):
            raise MessageError("a ciphertext is outside its range")
        return numbers


@final
class Paillier:
    """The options of Paillier.

    Args:
        key_bits: of the modulus, at least 2048; 3072 have 128 bits of security.
        clip: numbers beyond ±clip are moved there.
        max_seconds: CPU seconds that encrypting one update may take on this machine.

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

    def begin(self, terms: Terms, max_examples: int) -> PaillierRun:
        """Return the keys of a run and what they encrypt."""
        most = {
            "num_clients": max(FEWEST_CLIENTS, terms.most_clients),
            "max_examples": max_examples,
            "bits": 64,
        }
        levels = fine_levels(**most, clip=self.clip, accuracy=ACCURACY, least=_LEAST_LEVELS)
        try:
            quantiser = SumQuantiser(**most, clip=self.clip, levels=levels)
        except ValueError as error:
            raise ConfigurationError(f"EncryptedMean with Paillier: {error}") from error
        return PaillierRun(
            quantiser,
            terms.seed,
            self.max_seconds,
            *generate_pair(self.key_bits),
            secrets.token_bytes(TAG_SIZE),
        )


@final
@dataclass(frozen=True, repr=False)
class PaillierRun:
    """The keys of one run.

    Args:
        quantiser: whose integers are encrypted.
        seed: the run's; the rounding's, too.
        max_seconds: CPU seconds that encrypting one update may take.
        public: key, of clients and server.
        secret: key, of clients.
        tag_key: of the messages' tags.
    """

    quantiser: SumQuantiser
    seed: int
    max_seconds: float
    public: Any
    secret: Any
    tag_key: bytes

    def sums(self, num_encrypted: int) -> tuple[PaillierSum, PaillierSum]:
        """Return the clients' half and the server's.

        Raises:
            ConfigurationError: if encrypting so many numbers takes longer than is allowed.
        """
        shared = self.quantiser, num_encrypted + 1  # and the examples
        try:
            clients = PaillierSum(self.public, self.secret, *shared, max_seconds=self.max_seconds)
        except ValueError as error:
            raise ConfigurationError(f"EncryptedMean with Paillier: {error}") from error
        return clients, PaillierSum(self.public, None, *shared, max_seconds=math.inf)


@final
class PaillierRound:
    """One round with Paillier.

    Args:
        layout: which coordinates are encrypted, and of which round.
        run: its keys.
        most_examples: that there may be in a round.
    """

    def __init__(self, layout: CKKSLayout, run: PaillierRun, most_examples: int) -> None:
        self._layout, self._run, self._most = layout, run, most_examples
        self._clients, self._server = run.sums(layout.num_encrypted)
        self._added: set[int] = set()

    def encrypt(self, delta: Tensor, num_examples: int, sender: int) -> EncryptedUpdate:
        """See `EncryptedRound`."""
        run = self._run
        values, clear = self._layout.parted(delta.detach().double().cpu())
        draws = numpy_generator(run.seed, "encrypted rounding", self._layout.round_index, sender)
        integers = run.quantiser.encode(values, num_examples, draws.random)
        sent = EncryptedUpdate((self._clients.encrypt(integers),), clear.float(), sender)
        return sent.signed(run.tag_key, _UPDATE + self._layout.identity)

    def plus(
        self, total: EncryptedUpdate | None, sent: EncryptedUpdate, num_examples: int
    ) -> EncryptedUpdate:
        """See `EncryptedRound`."""
        key, identity = self._run.tag_key, self._layout.identity
        sent.check(key, _UPDATE + identity)
        if sent.sender in self._added:
            raise MessageError(f"client {sent.sender}'s update is in the sum already")
        self._added.add(sent.sender)
        vectors, clear = list(sent.ciphertexts), sent.clear.double() * (num_examples / self._most)
        if total is not None:
            total.check(key, _SUM + identity)
            vectors, clear = [*total.ciphertexts, *vectors], total.clear.double() + clear
        added = EncryptedUpdate((self._server.sum(vectors),), clear.float())
        return added.signed(key, _SUM + identity)

    def mean(self, total: EncryptedUpdate, num_examples: int) -> Tensor:
        """See `EncryptedRound`.

        Raises:
            MessageError: if the sum counts other examples than the server has added.
        """
        total.check(self._run.tag_key, _SUM + self._layout.identity)
        integers = self._clients.decrypt(total.ciphertexts[0])
        if (counted := int(integers[-1])) != num_examples:
            raise MessageError(f"the sum counts {counted} examples instead of {num_examples}")
        values = self._run.quantiser.mean(np.asarray(integers))
        return self._layout.joined(values, total.clear.double() * (self._most / num_examples))
