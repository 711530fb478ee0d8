"""Pads: one-time keys as long as the vector, stretched from 32 bytes by ChaCha20.

    pad(key) = keystream of ChaCha20(key, nonce 0, counter 0, 1, …), as integers modulo R

R is a power of two and divides that of the dtype, so that every pad is exactly uniform if the
keystream is. Source: RFC 8439, section 2.4. A key is used for one pad of one round, ever: it comes
from a key agreement whose context names the run, the round and the pair.
"""

from __future__ import annotations

import numpy as np
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms

from fl_lightning.secure.ring import Ring, RingIntegers

CHUNK = 1 << 16  # bytes at a time, so that they are added while they are in the cache
_ZEROS = bytes(CHUNK)


def add_pad(total: RingIntegers, key: bytes, ring: Ring, *, subtract: bool = False) -> None:
    """Add the pad of ``key`` to ``total`` modulo R, in place; `Ring.reduced` is the caller's.

    Args:
        total: of the ring's dtype, shape (k,).
        key: 32 bytes.
        ring: of the integers.
        subtract: take it away instead.
    """
    keystream = Cipher(algorithms.ChaCha20(key, bytes(16)), mode=None).encryptor()
    buffer = bytearray(CHUNK)
    step = CHUNK // ring.dtype.itemsize
    pad = np.frombuffer(buffer, ring.dtype)
    combine = np.subtract if subtract else np.add
    for start in range(0, len(total), step):
        part = total[start : start + step]
        size = part.nbytes
        keystream.update_into(_ZEROS[:size] if size < CHUNK else _ZEROS, buffer)
        combine(part, pad[: len(part)], out=part)


def pad(key: bytes, count: int, ring: Ring) -> RingIntegers:
    """Return the pad of ``key``: ``count`` integers from 0 to R - 1.

    Example:
        >>> pad(bytes(32), 3, Ring(8))  # RFC 8439, appendix A.1, test vector 1
        array([118, 184, 224], dtype=uint8)
    """
    total = np.zeros(count, ring.dtype)
    add_pad(total, key, ring)
    return ring.reduced(total)
