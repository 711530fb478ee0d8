"""Where a mechanism's normal numbers come from.

`SeededNoise` draws them from (seed, purpose, round, …), as everything else: whoever knows the seed
can take the noise off again, so it protects nobody who does. `SecureNoise` draws them from the
operating system's cryptographically secure generator, keeps nothing, and cannot be repeated.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from fl_lightning.core.seeds import numpy_generator, torch_generator
from fl_lightning.updates.discrete_noise import Words

_PURPOSE = "privacy noise"
# numbers that are made at a time: 128 MB of random bytes
CHUNK = 1 << 21


class NoiseSource(Protocol):
    """Gives standard normal numbers."""

    def normal(self, size: int, *ids: int) -> Tensor:
        """Return normal numbers of mean 0 and variance 1, float64, shape (size,), on the CPU.

        Args:
            size: how many.
            ids: what tells this draw from others, e.g. round and client.
        """

    def words(self, size: int, *ids: int) -> Words:
        """Return numbers that are uniform on 64 bits, shape (size,)."""


@dataclass(frozen=True)
class SeededNoise:
    """A pure function of (seed, ids), for tests and for results that repeat to the bit.

    Example:
        >>> noise = SeededNoise(0)
        >>> bool((noise.normal(3, 7) == noise.normal(3, 7)).all())
        True
    """

    seed: int

    def normal(self, size: int, *ids: int) -> Tensor:
        """Return the numbers of this draw."""
        generator = torch_generator(self.seed, _PURPOSE, *ids)
        return torch.randn(size, generator=generator, dtype=torch.float64)

    def words(self, size: int, *ids: int) -> Words:
        """Return the words of this draw."""
        generator = numpy_generator(self.seed, _PURPOSE, *ids)
        return generator.integers(0, 2**64, size, dtype=np.uint64)


@dataclass(frozen=True)
class SecureNoise:
    """Fresh numbers from the operating system's secure generator at every call.

    Each is the sum of four Box-Muller normals over two, so that the gaps between floating-point
    numbers, through which one of them could be read off (Mironov 2012), are out of practical reach
    (Holohan and Braghin 2021, 2107.10138, Section 5.2).

    Example:
        >>> noise = SecureNoise()
        >>> bool((noise.normal(3, 7) == noise.normal(3, 7)).any())
        False
    """

    def normal(self, size: int, *ids: int) -> Tensor:
        """Return new numbers, whatever the ids."""
        numbers = np.empty(size)
        for start in range(0, size, CHUNK):
            part = numbers[start : start + CHUNK]
            part[:] = _secure_normals(4 * len(part)).reshape(4, -1).sum(0) / 2
        return torch.from_numpy(numbers)

    def words(self, size: int, *ids: int) -> Words:
        """Return new words, whatever the ids."""
        return np.frombuffer(os.urandom(8 * size), dtype=np.uint64)


def _secure_normals(count: int) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    """Return an even number of normals from uniform ones in (0, 1], of 53 bits."""
    bits = np.frombuffer(os.urandom(8 * count), dtype=np.uint64) >> np.uint64(11)
    uniform = (bits.astype(np.float64) + 1.0) * 2.0**-53
    radius = np.sqrt(-2.0 * np.log(uniform[: count // 2]))
    angle = 2.0 * np.pi * uniform[count // 2 :]
    return np.concatenate([radius * np.cos(angle), radius * np.sin(angle)])


def noise_source(seed: int, *, secure: bool) -> NoiseSource:
    """Return a source of fresh secure numbers, or of those of a seed."""
    return SecureNoise() if secure else SeededNoise(seed)
