"""Integers modulo R = 2^bits: their packing, and a checksum of their sum.

The integers have the narrowest unsigned dtype with enough bits, whose overflow is a sum modulo a multiple of R.
A message has exactly ``bits`` bits per integer: whole bytes as planes, the rest packed.

The checksum is sent as further coordinates of every vector, which have pads as well.

    y = (x_1, …, x_k, c_1, …, c_l)      c_j = Σ of the j-th of l equal parts of x  mod R,   R^l ≥ 2^64

The sum of the checksums is the checksum of the sum, so the server can check the sum without learning more. A
wrong pad, or one that was not removed, makes all coordinates random: they fit by chance once in R^l. A change of
one coordinate is always found. A client that adds a wrong vector with a fitting checksum is not found.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fl_lightning.core.plain_json import MessageError
from fl_lightning.updates.coding import pack, packed_size, unpack

RingIntegers = NDArray[Any]


@dataclass(frozen=True)
class Ring:
    """Ring of the integers modulo 2^bits, from 0 to 2^bits - 1, in which a secure sum adds vectors.

    Args:
        bits: number of bits, from 1 to 64.

    Raises:
        ValueError: if the number of bits is out of range.

    Example:
        >>> ring = Ring(20)
        >>> ring.dtype, ring.packed_size(3)
        (dtype('uint32'), 8)
        >>> ring.unpack(ring.pack(np.array([1, 2**20 - 1, 7], ring.dtype)), count=3)
        array([      1, 1048575,       7], dtype=uint32)
    """

    bits: int

    def __post_init__(self) -> None:
        if not 1 <= self.bits <= 64:
            raise ValueError(f"bits must be from 1 to 64, got {self.bits}: sums are modulo 2^bits")

    @property
    def modulus(self) -> int:
        """The modulus R = 2^bits."""
        return 1 << self.bits

    @property
    def dtype(self) -> np.dtype[Any]:
        """Narrowest unsigned dtype, little-endian, that holds all integers of the ring."""
        return np.dtype(next(f"<u{size}" for size in (1, 2, 4, 8) if 8 * size >= self.bits))

    def checked(self, values: RingIntegers) -> RingIntegers:
        """Check that integers are from 0 to 2^bits - 1, and convert them to the ring's dtype.

        Raises:
            ValueError: if ``values`` is not a vector of integers from 0 to R - 1.
        """
        if values.ndim != 1 or values.dtype.kind not in "iu":
            raise ValueError(
                f"values must be a vector of integers, got shape {values.shape} of {values.dtype}"
            )
        if len(values) and not (int(values.min()) >= 0 and int(values.max()) < self.modulus):
            raise ValueError(
                f"values must be from 0 to 2^{self.bits} - 1, got {values.min()} to {values.max()}"
            )
        return values.astype(self.dtype, copy=False)

    def reduced(self, values: RingIntegers) -> RingIntegers:
        """Reduce integers of the ring's dtype modulo R = 2^bits, in place, and return them."""
        if self.bits < 8 * self.dtype.itemsize:
            values &= self.dtype.type(self.modulus - 1)
        return values

    def packed_size(self, count: int) -> int:
        """Return how many bytes ``count`` integers fill, packed with ``bits`` bits each."""
        return count * (self.bits // 8) + packed_size(count, self.bits % 8)

    def pack(self, values: RingIntegers) -> bytes:
        """Pack integers of the ring into bytes, with ``bits`` bits each.

        Args:
            values: integers of the ring's dtype, each below R, shape (n,).
        """
        whole, rest = divmod(self.bits, 8)
        planes = np.ascontiguousarray(values).view(np.uint8).reshape(-1, self.dtype.itemsize)
        if not rest:
            return planes[:, :whole].tobytes()
        return planes[:, :whole].tobytes() + pack(planes[:, whole].copy(), rest).tobytes()

    def unpack(self, data: bytes | memoryview, count: int) -> RingIntegers:
        """Unpack ``count`` integers of the ring from bytes that `pack` has made.

        Raises:
            MessageError: if `pack` cannot have made the bytes from ``count`` integers.
        """
        if len(data) != self.packed_size(count):
            raise MessageError(
                f"{count} integers of {self.bits} bits fill {self.packed_size(count)} bytes, "
                f"not {len(data)}"
            )
        whole, rest = divmod(self.bits, 8)
        raw = np.frombuffer(data, np.uint8)
        if whole == self.dtype.itemsize:
            whole_values: RingIntegers = raw.view(self.dtype).copy()
            return whole_values
        planes = np.zeros((count, self.dtype.itemsize), np.uint8)
        planes[:, :whole] = raw[: count * whole].reshape(count, whole)
        if rest:
            tail = raw[count * whole :]
            planes[:, whole] = unpack(tail, count, rest)
            if not np.array_equal(pack(planes[:, whole].copy(), rest), tail):
                raise MessageError("unused bits at the end must be zero")
        values: RingIntegers = planes.view(self.dtype).ravel()
        return values


CHECK_BITS = 64


def num_checks(ring: Ring) -> int:
    """Return l, the number of integers in the checksum of a vector."""
    return -(-CHECK_BITS // ring.bits)


def with_checksum(values: RingIntegers, ring: Ring) -> RingIntegers:
    """Append to a vector its checksum: l sums of its parts, modulo R.

    Args:
        values: integers of the ring's dtype, shape (k,).
        ring: ring of the integers.

    Returns:
        Shape (k + l,), a copy.

    Example:
        >>> with_checksum(np.array([1, 2, 2**32 - 1], np.uint32), Ring(32))
        array([         1,          2, 4294967295,          3, 4294967295],
              dtype=uint32)
    """
    return np.concatenate([values, _checksum(values, ring)])


def has_checksum(values: RingIntegers, ring: Ring) -> bool:
    """Return True if a sum of vectors, shape (k + l,), ends with the checksum of its first k integers."""
    size = len(values) - num_checks(ring)
    return bool(np.array_equal(_checksum(values[:size], ring), values[size:]))


def _checksum(values: RingIntegers, ring: Ring) -> RingIntegers:
    parts = np.array_split(values, num_checks(ring))
    # an unsigned dtype overflows modulo a multiple of R
    sums = np.array([part.sum(dtype=ring.dtype) for part in parts], ring.dtype)
    return ring.reduced(sums)
