"""A checksum of the sum, which travels under the pads as further coordinates of every vector.

    y = (x_1, …, x_k, c_1, …, c_l)      c_j = Σ of the j-th of l equal parts of x  mod R,   R^l ≥ 2^64

Sums of the vectors have sums of the checksums, so that the server checks the sum without seeing more
than it. A pad that is wrong, or stays in the sum, fills all coordinates with numbers of which nobody
knows anything: they fit by chance once in R^l. One changed coordinate never fits. Not found out is a
client that adds another vector than it should, with a checksum that fits.
"""

from __future__ import annotations

import numpy as np

from fl_lightning.secure.ring import Ring, RingIntegers

CHECK_BITS = 64


def num_checks(ring: Ring) -> int:
    """Return l, how many coordinates the checksum has."""
    return -(-CHECK_BITS // ring.bits)


def with_checksum(values: RingIntegers, ring: Ring) -> RingIntegers:
    """Return the values with their checksum behind them.

    Args:
        values: of the ring's dtype, shape (k,).
        ring: of the integers.

    Returns:
        Shape (k + l,), a copy.

    Example:
        >>> with_checksum(np.array([1, 2, 2**32 - 1], np.uint32), Ring(32))
        array([         1,          2, 4294967295,          3, 4294967295],
              dtype=uint32)
    """
    return np.concatenate([values, _checksum(values, ring)])


def has_checksum(values: RingIntegers, ring: Ring) -> bool:
    """Return whether values that came out of a sum, shape (k + l,), fit their checksum."""
    size = len(values) - num_checks(ring)
    return bool(np.array_equal(_checksum(values[:size], ring), values[size:]))


def _checksum(values: RingIntegers, ring: Ring) -> RingIntegers:
    parts = np.array_split(values, num_checks(ring))
    # an unsigned dtype overflows modulo a multiple of R
    sums = np.array([part.sum(dtype=ring.dtype) for part in parts], ring.dtype)
    return ring.reduced(sums)
