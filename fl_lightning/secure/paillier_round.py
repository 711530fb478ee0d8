"""Rounds of `EncryptedMean` with Paillier, for small vectors.

    mean = Dec(Π_k Enc(a_k q_k) mod n²) / Σ_k a_k        a_k = min(n_k, max_examples)

q_k: the update in whole levels, rounded at random, as in a secure sum; clients multiply by their
examples before they encrypt. The sum of these integers is exact. Scheme:
`fl_lightning.secure.encryption.paillier`.
"""

from __future__ import annotations

import math
import secrets
from typing import final

import numpy as np
from torch import Tensor

from fl_lightning.core.errors import ConfigurationError
from fl_lightning.core.seeds import numpy_generator
from fl_lightning.secure.encryption.ckks_layout import CKKSLayout
from fl_lightning.secure.encryption.encrypted_update import TAG_SIZE, EncryptedUpdate
from fl_lightning.secure.encryption.paillier import LEAST_BITS, PaillierKeys, PaillierSum
from fl_lightning.secure.sum_quantiser import SumQuantiser, fine_levels
from fl_lightning.server.protected import FEWEST_CLIENTS, Terms
from fl_lightning.updates.wire.coding import DecodeError

ACCURACY = 1e-6
_LEAST_LEVELS = 1 << 8
_UPDATE, _SUM = b"Paillier update", b"Paillier sum"


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
        num_clients = max(FEWEST_CLIENTS, terms.most_clients)
        levels = fine_levels(
            num_clients=num_clients,
            clip=self.clip,
            max_examples=max_examples,
            bits=64,
            accuracy=ACCURACY,
            least=_LEAST_LEVELS,
        )
        try:
            quantiser = SumQuantiser(
                num_clients=num_clients,
                clip=self.clip,
                levels=levels,
                max_examples=max_examples,
                bits=64,
            )
        except ValueError as error:
            raise ConfigurationError(f"EncryptedMean with Paillier: {error}") from error
        return PaillierRun(self, quantiser, terms.seed)


@final
class PaillierRun:
    """The keys of one run.

    Args:
        options: the user's.
        quantiser: whose integers are encrypted.
        seed: the run's; the rounding's, too.
    """

    def __init__(self, options: Paillier, quantiser: SumQuantiser, seed: int) -> None:
        self.quantiser, self.seed, self._options = quantiser, seed, options
        self._keys = PaillierKeys.generate(options.key_bits)
        self.tag_key = secrets.token_bytes(TAG_SIZE)

    def sums(self, num_encrypted: int) -> tuple[PaillierSum, PaillierSum]:
        """Return the clients' half and the server's.

        Raises:
            ConfigurationError: if encrypting so many numbers takes longer than is allowed.
        """
        size = num_encrypted + 1  # and the examples
        seconds = self._options.max_seconds
        try:
            clients = PaillierSum(self._keys, self.quantiser, size, max_seconds=seconds)
        except ValueError as error:
            raise ConfigurationError(f"EncryptedMean with Paillier: {error}") from error
        return clients, PaillierSum(self._keys.public, self.quantiser, size, max_seconds=math.inf)


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
            raise DecodeError(f"client {sent.sender}'s update is in the sum already")
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
            DecodeError: if the sum counts other examples than the server has added.
        """
        total.check(self._run.tag_key, _SUM + self._layout.identity)
        integers = self._clients.decrypt(total.ciphertexts[0])
        if (counted := int(integers[-1])) != num_examples:
            raise DecodeError(f"the sum counts {counted} examples instead of {num_examples}")
        values = self._run.quantiser.mean(np.asarray(integers))
        return self._layout.joined(values, total.clear.double() * (self._most / num_examples))
