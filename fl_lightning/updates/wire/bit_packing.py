"""Codes of 1 to 8 bits side by side, without a gap and without a loop over codes.

Eight codes of b bits fill b bytes, the first code in the lowest bits. Neighbours are merged in
three steps, each one shift over the whole array: two bytes to 2b bits of a 16-bit lane, two lanes
to 4b bits of 32, two of these to 8b bits of 64, of which the first b bytes are kept.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

Bytes = NDArray[np.uint8]
CHUNK = 1 << 17  # codes at a time, so that what happens between the steps stays in the cache
_LANES: tuple[tuple[str, int], ...] = (("<u2", 8), ("<u4", 16), ("<u8", 32))


def packed_size(count: int, bits: int) -> int:
    """Return the bytes that ``count`` codes fill.

    Example:
        >>> packed_size(3, bits=3)
        2
    """
    return (count * bits + 7) // 8


def pack(codes: Bytes, bits: int) -> Bytes:
    """Return the packed codes; unused bits at the end are zero.

    Args:
        codes: each below 2^bits, shape (n,).
        bits: from 1 to 8.

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
    """Return ``count`` codes.

    Args:
        packed: `packed_size` bytes.
        count: of codes.
        bits: from 1 to 8.

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
