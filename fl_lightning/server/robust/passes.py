"""Computations of robust rules over the rows of updates, each in one pass over the columns.

    G = X Xᵀ,    d_ij² = G_ii + G_jj - 2 G_ij,    Σ_i c_i x_i,    Σ_r w_r x_(r)

with x_(r) the r-th smallest value of a coordinate. Products are summed in the updates' dtype over a
block of w columns (5242 for 100 updates) and in float64 over blocks: in float32 the error of G_ij is at
most w 2⁻²⁴ Σ_c |x_ic x_jc|, 3e-4 |x_i| |x_j|, and about the root of w instead of w in practice. Many
rules are sums of updates whose coefficients depend on G alone: they need two passes.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from fl_lightning.kernels import sorted_columns
from fl_lightning.server.robust.matrix import Floats, Rows

# Squared distances below this many rounding units of |x_i| |x_j| have fewer than three correct digits.
_DIGITS_LOST = 1e4


def products(rows: Rows, origin: int | None = None) -> Floats:
    """Return the inner products of all pairs of rows, float64, shape (n, n).

    If a row's norm overflows its dtype, its entries are infinite or NaN.

    Args:
        rows: n rows.
        origin: number of the row that is subtracted from all, or None.
    """
    gram = np.zeros((len(rows), len(rows)))
    with np.errstate(over="ignore", invalid="ignore"):
        for _, block in rows.blocks():
            centred = block if origin is None else block - block[origin]
            gram += centred @ centred.T
    return gram


def squared_distances(rows: Rows) -> Floats:
    """Return the squared distances of all pairs of rows, float64, shape (n, n), 0 on the diagonal.

    A row whose norm overflows is infinitely far from all others.
    """
    gram = products(rows)
    distances, bounds = distances_of(gram), _error_bounds(gram)
    near = distances < bounds * (_DIGITS_LOST * np.finfo(rows.dtype).eps)
    np.fill_diagonal(near, val=False)
    if not near.any():
        return distances
    # the most central row, which is no outlier even if almost half of the rows are attackers'
    origin = int(np.argmin(np.median(distances, axis=1)))
    centred = products(rows, origin)
    is_better = _error_bounds(centred) < bounds
    return np.where(is_better, distances_of(centred), distances)


def _error_bounds(gram: Floats) -> Floats:
    """Return |x_i| |x_j|, to which rounding errors of the inner products are proportional, shape (n, n)."""
    lengths = np.sqrt(np.diag(gram))
    with np.errstate(over="ignore", invalid="ignore"):
        bounds: Floats = np.outer(lengths, lengths)
    return bounds


def distances_of(gram: Floats) -> Floats:
    """Return the squared distances of vectors, given their inner products, both of shape (n, n).

    Example:
        >>> distances_of(np.array([[1.0, 0.0], [0.0, 4.0]])).tolist()
        [[0.0, 5.0], [5.0, 0.0]]
    """
    squares = np.diag(gram)
    with np.errstate(over="ignore", invalid="ignore"):
        exact = squares[:, None] + squares[None, :] - 2 * gram
    distances: Floats = np.nan_to_num(np.maximum(exact, 0), nan=np.inf, posinf=np.inf)
    distances[~np.isfinite(squares)] = np.inf
    distances[:, ~np.isfinite(squares)] = np.inf
    np.fill_diagonal(distances, 0)
    return distances


def row_norms(rows: Rows) -> Floats:
    """Return the L2 norms of the rows, float64, shape (n,)."""
    squares = np.zeros(len(rows))
    for _, block in rows.blocks():
        squares += np.einsum("ij,ij->i", block, block, dtype=np.float64)
    norms: Floats = np.sqrt(squares)
    return norms


def combined(rows: Rows, coefficients: Floats) -> Floats:
    """Return Σ c_i x_i, the rows' sum with coefficients c, shape (k,); rows with coefficient 0 are not read."""
    used = np.flatnonzero(coefficients)
    weights = coefficients[used].astype(rows.dtype)
    result = np.zeros(rows.num_columns, rows.dtype)
    if len(used):
        for columns, block in rows.blocks(used.tolist()):
            np.matmul(weights, block, out=result[columns])
    return result


def sorted_sum(rows: Rows, weights: Floats) -> Floats:
    """Return, per coordinate, the sum of its n sorted values times ``weights``, e.g. the median: shape (k,).

    Args:
        rows: n rows.
        weights: shape (n,); values under leading and trailing zeros are not read.
    """
    used = np.flatnonzero(weights)
    first, end = int(used[0]), int(used[-1]) + 1
    kept = weights[first:end].astype(rows.dtype)
    result = np.empty(rows.num_columns, rows.dtype)
    for columns, ordered, _ in sorted_blocks(rows, first, end):
        np.matmul(kept, ordered, out=result[columns])
    return result


def sorted_blocks(rows: Rows, first: int, end: int) -> Iterator[tuple[slice, Floats, Floats]]:
    """Yield (columns, their sorted values from rank ``first`` to ``end`` - 1, their unsorted values).

    The sorted columns have shape (end - first, width), the unsorted ones (n, width). The memory of a
    block is reused for the next one.
    """
    scratch = np.empty(0, rows.dtype)
    for columns, block in rows.blocks():
        size = (end - first) * block.shape[1]
        if len(scratch) < size:
            scratch = np.empty(size, rows.dtype)
        ordered = scratch[:size].reshape(end - first, -1)
        sorted_columns(np.ascontiguousarray(block), first, end, ordered)
        yield columns, ordered, block


def median_weights(count: int) -> Floats:
    """Return the weights of ``count`` sorted values that give their median: 0, or 1/2 or 1 in the middle.

    Example:
        >>> median_weights(3).tolist(), median_weights(4).tolist()
        ([0.0, 1.0, 0.0], [0.0, 0.5, 0.5, 0.0])
    """
    return trimmed_weights(count, (count - 1) // 2)


def trimmed_weights(count: int, num_trimmed: int) -> Floats:
    """Return weights of sorted values in the trimmed mean: 0 for ``num_trimmed`` at each end, else equal.

    Example:
        >>> trimmed_weights(4, 1).tolist()
        [0.0, 0.5, 0.5, 0.0]
    """
    weights = np.zeros(count)
    weights[num_trimmed : count - num_trimmed] = 1 / (count - 2 * num_trimmed)
    return weights


def mean_and_std(rows: Rows) -> tuple[Floats, Floats]:
    """Return mean and standard deviation of every coordinate over the rows, each of shape (k,)."""
    mean, std = np.empty((2, rows.num_columns), rows.dtype)
    for columns, block in rows.blocks():
        mean[columns], std[columns] = block.mean(0), block.std(0)
    return mean, std
