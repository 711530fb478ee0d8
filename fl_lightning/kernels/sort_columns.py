"""Sorting the columns of a matrix with few rows and very many columns.

A sorting network uses the same exchanges for every column. So the processor's vectors sort many columns
at once, and a column need not be contiguous: `sort_columns.c`, see `c_library`. Exchanges that do not
affect the requested ranks are left out. Without a compiler NumPy sorts one column after the other.

Source: Knuth, The Art of Computer Programming 3, 5.2.2, Algorithm M (Batcher's merge exchange).
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from fl_lightning.kernels.c_library import c_library

SOURCE = Path(__file__).parent / "c" / "sort_columns.c"
COLUMNS = 64  # as in the source; the values of 100 rows stay in the processor's nearest cache
# with these flags an exchange compiles to two instructions
FLAGS = ("-ffinite-math-only", "-fno-signed-zeros")
# a network has about n (log n)² / 4 exchanges for n rows; NumPy sorts more rows
MOST_ROWS = 1024

Floats = npt.NDArray[Any]


def sorted_columns(block: Floats, first: int, end: int, out: Floats) -> None:
    """Sort every column of a matrix, and write the sorted rows ``first`` to ``end`` - 1 to ``out``.

    Args:
        block: finite numbers, shape (n, width), float32 or float64, in row-major order.
        first: first rank to write, counted from 0.
        end: one more than the last rank to write, ≤ n.
        out: result, shape (end - first, width), with the block's dtype, in row-major order.

    Example:
        >>> block, out = np.array([[3.0, 1.0], [2.0, 5.0], [9.0, 4.0]]), np.empty((1, 2))
        >>> sorted_columns(block, 1, 2, out)
        >>> out.tolist()
        [[3.0, 4.0]]
    """
    count, width = block.shape
    assert out.shape == (end - first, width)
    assert 0 <= first <= end <= count
    assert out.dtype == block.dtype
    library = c_library(SOURCE, FLAGS) if count <= MOST_ROWS else None
    if library is None:
        out[:] = np.sort(np.ascontiguousarray(block.T), axis=1)[:, first:end].T
        return
    pairs = exchanges(count, first, end)
    values = np.zeros((count, COLUMNS), block.dtype)  # the last columns may be missing
    numbers = [ctypes.c_int64(n) for n in (count, width, len(pairs), first, end)]
    library[f"sort_{block.dtype}"](
        _pointer(block),
        *numbers[:2],
        _pointer(pairs),
        *numbers[2:],
        _pointer(values),
        _pointer(out),
    )


@cache
def exchanges(count: int, first: int, end: int) -> npt.NDArray[np.int32]:
    """Return the comparisons of a sorting network: pairs (i, j), i < j, swapped if value i is larger.

    Args:
        count: number of values to sort.
        first: first rank that must be right at the end.
        end: one more than the last rank that must be right.

    Returns:
        Exchanges in order, shape (number of exchanges, 2).

    Example:
        >>> exchanges(3, 0, 3).tolist()
        [[0, 2], [0, 1], [1, 2]]
    """
    wanted = set(range(first, end))
    needed = []
    for pair in reversed(list(_merge_exchange(count))):
        if not wanted.isdisjoint(pair):
            wanted.update(pair)
            needed.append(pair)
    return np.array(needed[::-1], dtype=np.int32).reshape(-1, 2)


def _merge_exchange(count: int) -> Iterator[tuple[int, int]]:
    top = 1 << max(0, (count - 1).bit_length() - 1)
    part = top
    while part:
        step, remainder, distance = top, 0, part
        while True:
            for place in range(count - distance):
                if place & part == remainder:
                    yield place, place + distance
            if step == part:
                break
            distance, remainder, step = step - part, part, step // 2
        part //= 2


def _pointer(array: Floats) -> ctypes.c_void_p:
    assert array.flags.c_contiguous
    return ctypes.c_void_p(array.ctypes.data)
