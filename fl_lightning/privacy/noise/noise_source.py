"""Where a mechanism's random words come from.

`SeededNoise` draws them from (seed, purpose, round, …), as everything else: whoever knows the seed
can take the noise off again, so it protects nobody who does. `SecureNoise` draws them from a
cryptographically secure generator that begins at the operating system's, keeps nothing, and cannot be
repeated.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Protocol

import numpy as np

from fl_lightning.core.seeds import numpy_generator
from fl_lightning.core.whole_numbers import Draw, Words


class NoiseSource(Protocol):
    """Gives random words, uniform on 64 bits."""

    def stream(self, *ids: int) -> Draw:
        """Return what gives words, each call the next ones.

        Args:
            ids: what tells this stream from others, e.g. round and client.
        """

    def words(self, size: int, *ids: int) -> Words:
        """Return the first words of a stream, shape (size,)."""


@dataclass(frozen=True)
class SeededNoise:
    """A pure function of (seed, ids), for tests and for results that repeat to the bit.

    Example:
        >>> noise = SeededNoise(0)
        >>> bool((noise.words(3, 7) == noise.words(3, 7)).all())
        True
    """

    seed: int
    purpose: str = "privacy noise"

    def stream(self, *ids: int) -> Draw:
        """Return what gives the words of these ids."""
        generator = numpy_generator(self.seed, self.purpose, *ids)
        return lambda count: generator.integers(0, 2**64, count, dtype=np.uint64)

    def words(self, size: int, *ids: int) -> Words:
        """Return the first words of these ids."""
        return self.stream(*ids)(size)


@dataclass(frozen=True)
class SecureNoise:
    """Fresh words at every call.

    With the package ``cryptography`` they are AES-256's in counter mode, under a key that the operating
    system's secure generator draws for each stream; without it they are that generator's own, which
    takes five times as long.

    Example:
        >>> noise = SecureNoise()
        >>> bool((noise.words(3, 7) == noise.words(3, 7)).any())
        False
    """

    def stream(self, *ids: int) -> Draw:
        """Return what gives new words, whatever the ids."""
        encryptor = _encryptor()
        if encryptor is None:
            return lambda count: np.frombuffer(os.urandom(8 * count), dtype=np.uint64)
        return lambda count: np.frombuffer(encryptor.update(_zeros(8 * count)), dtype=np.uint64)

    def words(self, size: int, *ids: int) -> Words:
        """Return new words, whatever the ids."""
        return self.stream(*ids)(size)


@lru_cache(maxsize=2)
def _zeros(count: int) -> bytes:
    return bytes(count)


def _encryptor() -> Any:
    """Return a stream cipher under a fresh key; None where there is none."""
    try:
        from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
    except ImportError:
        return None
    return Cipher(algorithms.AES(os.urandom(32)), modes.CTR(bytes(16))).encryptor()


def coins(seed: int) -> SeededNoise:
    """Return a source for roundings at random, which everybody may know."""
    return SeededNoise(seed, "privacy rounding")


def noise_source(seed: int, *, secure: bool) -> NoiseSource:
    """Return a source of fresh secure words, or of those of a seed."""
    return SecureNoise() if secure else SeededNoise(seed)
