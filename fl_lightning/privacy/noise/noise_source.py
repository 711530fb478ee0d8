"""The source of a mechanism's random words, secret or derived from a seed."""

from __future__ import annotations

import os
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np

from fl_lightning.core.seeds import Draw, numpy_generator


@dataclass(frozen=True)
class NoiseSource:
    """Source of the random bits of privacy noise: uniform words of 64 bits, secure or seeded.

    Without a seed they come from a cryptographically secure generator seeded by the operating system: they
    are not stored and cannot be repeated. With the package ``cryptography`` it is AES-256 in counter mode,
    with a fresh key for each stream; without it the operating system's generator itself, which takes five
    times as long.

    Args:
        seed: makes the words a pure function of (seed, purpose, ids), for tests and reproducible results:
            anybody who knows it can subtract the noise. None for secure words.
        purpose: distinguishes sources of the same seed.

    Example:
        >>> def words(source):
        ...     return source.stream(7)(3)
        >>> bool((words(NoiseSource(seed=0)) == words(NoiseSource(seed=0))).all())
        True
        >>> bool((words(NoiseSource()) == words(NoiseSource())).any())
        False
    """

    seed: int | None = None
    purpose: str = "privacy noise"

    def stream(self, *ids: int) -> Draw:
        """Return a function that draws the next words (64 random bits each) of a stream on each call.

        Args:
            ids: numbers that distinguish streams, e.g. round and client.
        """
        if self.seed is not None:
            generator = numpy_generator(self.seed, self.purpose, *ids)
            return lambda count: generator.integers(0, 2**64, count, dtype=np.uint64)
        encryptor = _encryptor()
        if encryptor is None:
            return lambda count: np.frombuffer(os.urandom(8 * count), dtype=np.uint64)
        return lambda count: np.frombuffer(encryptor.update(_zeros(8 * count)), dtype=np.uint64)


@lru_cache(maxsize=2)
def _zeros(count: int) -> bytes:
    return bytes(count)


def _encryptor() -> Any:
    """Return a stream cipher with a fresh key, as random generator; None without package ``cryptography``."""
    try:
        from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
    except ImportError:
        return None
    return Cipher(algorithms.AES(os.urandom(32)), modes.CTR(bytes(16))).encryptor()


def coins(seed: int) -> NoiseSource:
    """Return the source of random bits for rounding vectors to a grid; they may be public, so it is seeded."""
    return NoiseSource(seed, "privacy rounding")
