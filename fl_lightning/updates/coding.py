"""Compact byte encodings of integers: packed codes of 1 to 8 bits, and Rice codes of indices.

Packed codes. Eight codes of b bits fill b bytes, the first in the lowest bits. Neighbours are merged in
three steps, each one shift over the whole array: two bytes to 2b bits of a 16-bit lane, two lanes
to 4b bits of 32, two of these to 8b bits of 64, of which the first b bytes are kept.

Rice codes of the gaps between the indices of a sparse vector.

    g_0 = i_0,   g_j = i_j - i_(j-1) - 1 ≥ 0,   g = q 2^r + l,   0 ≤ l < 2^r

The quotients q are written in unary (q zeros and a one), all of them first; the remainders l follow
in r bits each. The length in bits, n (r + 1) + Σ ⌊g / 2^r⌋, is convex in r, so the best r is found by
descent. It is at most n (log2(k/n) + 3) for any n of k indices; for random indices it is within about
3 % of the entropy. r = 0 is a bitmap.

Source: Rice and Plaunt 1971; the split into two streams is that of Elias 1974, which lets both be
read without a loop. Byte-wise variable-length integers take 8 bits an index or more.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fl_lightning.core.seeds import Integers

Bytes = NDArray[np.uint8]
CHUNK = 1 << 17  # codes at a time, so that intermediate results stay in the processor's cache
_LANES: tuple[tuple[str, int], ...] = (("<u2", 8), ("<u4", 16), ("<u8", 32))


def packed_size(count: int, bits: int) -> int:
    """Return the number of bytes that ``count`` integers of ``bits`` bits take when packed.

    Example:
        >>> packed_size(3, bits=3)
        2
    """
    return (count * bits + 7) // 8


def pack(codes: Bytes, bits: int) -> Bytes:
    """Pack integers of a few bits (codes) into bytes without gaps; unused bits at the end are zero.

    Args:
        codes: integers below 2^bits, shape (n,).
        bits: bits of a code, from 1 to 8.

    Example:
        >>> pack(np.array([1, 2, 3, 0], np.uint8), bits=2)
        array([57], dtype=uint8)
    """
    if bits == 8:
        return codes
    if bits == 1:
        return np.packbits(codes, bitorder="little")
    packed = np.empty(packed_size(len(codes), bits), np.uint8)
    for start in range(0, len(codes), CHUNK):
        part = _merged(_whole_groups(codes[start : start + CHUNK], 8), bits)
        at = start * bits // 8
        end = min(at + len(part), len(packed))
        packed[at:end] = part[: end - at]
    return packed


def unpack(packed: Bytes, count: int, bits: int) -> Bytes:
    """Unpack ``count`` integers of a few bits (codes) from bytes, the inverse of `pack`.

    Args:
        packed: packed codes, as many bytes as `packed_size` says.
        count: number of codes.
        bits: bits of a code, from 1 to 8.

    Example:
        >>> unpack(np.array([57], np.uint8), count=4, bits=2)
        array([1, 2, 3, 0], dtype=uint8)
    """
    if bits == 8:
        return np.array(packed)
    if bits == 1:
        return np.unpackbits(packed, count=count, bitorder="little")
    codes = np.empty(count, np.uint8)
    for start in range(0, count, CHUNK):
        at = start * bits // 8
        part = _split(_whole_groups(packed[at : at + CHUNK * bits // 8], bits), bits)
        end = min(start + CHUNK, count)
        codes[start:end] = part[: end - start]
    return codes


def _whole_groups(array: Bytes, size: int) -> Bytes:
    missing = -len(array) % size
    return np.concatenate([array, np.zeros(missing, np.uint8)]) if missing else array


def _merged(codes: Bytes, bits: int) -> Bytes:
    lanes: NDArray[Any] = np.ascontiguousarray(codes)
    for kind, half in _LANES:
        lanes = lanes.view(kind)
        kept = bits * half // 8
        lanes = lanes & (2**half - 1) | lanes >> half << kept
    merged: Bytes = lanes.view(np.uint8).reshape(-1, 8)[:, :bits].ravel()
    return merged


def _split(packed: Bytes, bits: int) -> Bytes:
    groups = np.zeros((len(packed) // bits, 8), np.uint8)
    groups[:, :bits] = packed.reshape(-1, bits)
    lanes: NDArray[Any] = groups.ravel()
    for kind, half in reversed(_LANES):
        lanes = lanes.view(kind)
        kept = bits * half // 8
        lanes = lanes & (2**kept - 1) | lanes >> kept << half
    split: Bytes = lanes.view(np.uint8)
    return split


@dataclass(frozen=True)
class RiceCode:
    """Parameter and byte counts of the Rice code for the indices of a sparse vector."""

    num_low_bits: int  # r, bits of a remainder
    unary_size: int  # bytes of the quotients
    low_size: int  # bytes of the remainders

    @property
    def size(self) -> int:
        """Total number of bytes of the encoded indices."""
        return self.unary_size + self.low_size


def gaps_of(indices: Integers) -> Integers:
    """Return the number of coordinates skipped before each index (its gap); negative if indices are out of order."""
    return np.diff(indices, prepend=-1) - 1


def best_code(gaps: Integers) -> RiceCode:
    """Return the Rice code that encodes these gaps between indices in the fewest bits.

    Example:
        >>> best_code(np.array([0, 9, 20, 15]))
        RiceCode(num_low_bits=3, unary_size=1, low_size=2)
    """
    count = len(gaps)
    if not count:
        return RiceCode(0, 0, 0)

    @cache
    def length(r: int) -> int:
        return count * (r + 1) + int((gaps >> r).sum())

    best = max(0, (int(gaps.sum()) // count).bit_length() - 1)
    while best > 0 and length(best - 1) <= length(best):
        best -= 1
    while length(best + 1) < length(best):
        best += 1
    return RiceCode(best, (length(best) - count * best + 7) // 8, low_size(count, best))


def low_size(count: int, num_low_bits: int) -> int:
    """Return the number of bytes of the remainders (low bits) of ``count`` Rice-coded numbers."""
    whole, rest = divmod(num_low_bits, 8)
    return count * whole + packed_size(count, rest)


def write_gaps(gaps: Integers, code: RiceCode) -> list[Bytes]:
    """Return the Rice-coded gaps as arrays of bytes: the quotients in unary, then the remainders."""
    ends = np.cumsum((gaps >> code.num_low_bits) + 1) - 1
    bits = np.zeros(8 * code.unary_size, np.uint8)
    bits[ends] = 1
    parts = [np.packbits(bits, bitorder="little")]
    for shift, width in _planes(code.num_low_bits):
        parts.append(pack((gaps >> shift & (2**width - 1)).astype(np.uint8), width))
    return parts


def read_indices(unary: Bytes, low: Bytes, count: int, num_low_bits: int) -> Integers | None:
    """Decode ``count`` strictly increasing indices; None if the bytes hold another number of quotients.

    The caller has checked that sizes fit together and that nothing can overflow.
    """
    ends = np.flatnonzero(np.unpackbits(unary, bitorder="little"))
    if len(ends) != count or (count and ends[-1] // 8 != len(unary) - 1):
        return None
    gaps = gaps_of(ends) << num_low_bits
    at = 0
    for shift, width in _planes(num_low_bits):
        size = packed_size(count, width)
        gaps += unpack(low[at : at + size], count, width).astype(np.int64) << shift
        at += size
    indices: Integers = np.cumsum(gaps + 1) - 1
    return indices


def _planes(num_low_bits: int) -> list[tuple[int, int]]:
    """Return (shift, width) in bits of each byte of a Rice code's remainder, the lowest byte first."""
    return [(shift, min(8, num_low_bits - shift)) for shift in range(0, num_low_bits, 8)]
