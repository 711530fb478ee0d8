"""Sources of secrets: the operating system, or a seed for simulations.

    bytes_i = ChaCha20(key = BLAKE2b(seed), counter), each position read once

A seed makes a run repeatable and protects nothing: everybody who knows the seed knows all secrets.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from hashlib import blake2b

import numpy as np
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms
from numpy.typing import NDArray

from fl_lightning.core.seeds import derive_seed

Entropy = Callable[[int], bytes]
Draws = Callable[[int], NDArray[np.float64]]

system_entropy: Entropy = os.urandom


def seeded_entropy(root: int, purpose: str, *ids: int) -> Entropy:
    """Return a source of pseudorandom bytes that depend only on the arguments; for simulations, as they are no secret.

    Example:
        >>> one, same = seeded_entropy(0, "keys", 3), seeded_entropy(0, "keys", 3)
        >>> one(4) + one(4) == same(8)
        True
    """
    seed = derive_seed(root, purpose, *ids).to_bytes(8, "little")
    return keystream(blake2b(seed, digest_size=32, person=b"entropy").digest())


def uniform_draws(entropy: Entropy = system_entropy) -> Draws:
    """Return a function that draws n secure random numbers in [0, 1), of 53 bits, by ChaCha20 with a new key.

    It replaces `numpy.random.Generator.random` if nobody may predict the draws.

    Example:
        >>> draws = uniform_draws()(1000)
        >>> draws.shape, bool(0 <= draws.min() and draws.max() < 1)
        ((1000,), True)
    """
    stream = keystream(entropy(32))

    def draw(count: int) -> NDArray[np.float64]:
        words = np.frombuffer(stream(8 * count), "<u8")
        return (words >> np.uint64(11)).astype(np.float64) * 2.0**-53

    return draw


def keystream(key: bytes) -> Entropy:
    """Return a function that returns the next n bytes of the keystream of ChaCha20 under a key of 32 bytes."""
    cipher = Cipher(algorithms.ChaCha20(key, bytes(16)), mode=None).encryptor()
    return lambda size: cipher.update(bytes(size))
