"""Sources of a mechanism's random words.

`SeededNoise` derives them from (seed, purpose, round, …): anybody who knows the seed can subtract the
noise. `SecureNoise` draws them from a cryptographically secure generator seeded by the operating
system; they are not stored and cannot be repeated.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Protocol

import numpy as np

from fl_lightning.core.seeds import Draw, Words, numpy_generator


class NoiseSource(Protocol):
    """A source of random words, uniform on 64 bits."""

    def stream(self, *ids: int) -> Draw:
        """Return a function that draws the next words of a stream on each call.

        Args:
            ids: numbers that distinguish streams, e.g. round and client.
        """

    def words(self, size: int, *ids: int) -> Words:
        """Return the first words of a stream, shape (size,)."""


@dataclass(frozen=True)
class SeededNoise:
    """Words that are a pure function of (seed, ids), for tests and reproducible results.

    Example:
        >>> noise = SeededNoise(0)
        >>> bool((noise.words(3, 7) == noise.words(3, 7)).all())
        True
    """

    seed: int
    purpose: str = "privacy noise"

    def stream(self, *ids: int) -> Draw:
        """Return a function that draws the words of these ids."""
        generator = numpy_generator(self.seed, self.purpose, *ids)
        return lambda count: generator.integers(0, 2**64, count, dtype=np.uint64)

    def words(self, size: int, *ids: int) -> Words:
        """Return the first words of these ids."""
        return self.stream(*ids)(size)


@dataclass(frozen=True)
class SecureNoise:
    """Fresh secure words at every call.

    With the package ``cryptography`` they come from AES-256 in counter mode, with a key from the
    operating system's secure generator for each stream; without it they come from that generator
    itself, which takes five times as long.

    Example:
        >>> noise = SecureNoise()
        >>> bool((noise.words(3, 7) == noise.words(3, 7)).any())
        False
    """

    def stream(self, *ids: int) -> Draw:
        """Return a function that draws new words, for any ids."""
        encryptor = _encryptor()
        if encryptor is None:
            return lambda count: np.frombuffer(os.urandom(8 * count), dtype=np.uint64)
        return lambda count: np.frombuffer(encryptor.update(_zeros(8 * count)), dtype=np.uint64)

    def words(self, size: int, *ids: int) -> Words:
        """Return new words, for any ids."""
        return self.stream(*ids)(size)


@lru_cache(maxsize=2)
def _zeros(count: int) -> bytes:
    return bytes(count)


def _encryptor() -> Any:
    """Return a stream cipher with a fresh key, or None without the package ``cryptography``."""
    try:
        from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
    except ImportError:
        return None
    return Cipher(algorithms.AES(os.urandom(32)), modes.CTR(bytes(16))).encryptor()


def coins(seed: int) -> SeededNoise:
    """Return the source of the coins for random rounding, which may be public."""
    return SeededNoise(seed, "privacy rounding")


def noise_source(seed: int, *, secure: bool) -> NoiseSource:
    """Return a source of fresh secure words, or of the words of a seed."""
    return SecureNoise() if secure else SeededNoise(seed)
