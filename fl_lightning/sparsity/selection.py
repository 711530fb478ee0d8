"""Exactly k entries with the lowest values, whatever the ties.

A threshold alone keeps too many: of [0, 0, 0, 4, …] the two lowest are two, and "≤ 0" is three.
Here the entries below the k-th lowest value are kept, and of those equal to it the first ones by
index, as many as are missing. That is what a stable sort would keep, at a tenth of its time.
"""

from __future__ import annotations

import torch
from torch import Tensor


def keep_lowest(values: Tensor, allowed: Tensor, k: int) -> Tensor:
    """Return a bool tensor of shape (n,) with k times True: the lowest of the allowed values.

    Args:
        values: shape (n,), without nan.
        allowed: bool, shape (n,): only these may be kept.
        k: how many, in [0, number of allowed ones].

    Example:
        >>> values = torch.tensor([0.0, 2.0, 0.0, 0.0, 1.0])
        >>> keep_lowest(values, torch.ones(5, dtype=torch.bool), 2).tolist()
        [True, False, True, False, False]
    """
    if k == 0:
        return torch.zeros_like(allowed)
    threshold = values[allowed].kthvalue(k).values
    kept = allowed & (values < threshold)
    ties = (allowed & (values == threshold)).nonzero().squeeze(1)
    kept[ties[: k - int(kept.count_nonzero())]] = True
    return kept


def apportion(sizes: list[int], k: int) -> list[int]:
    """Share k over parts in proportion to their sizes, no part more than its size.

    Largest remainders (Hamilton); of equal remainders the first part's.

    Example:
        >>> apportion([4, 4, 2], 5)
        [2, 2, 1]
        >>> apportion([3, 3, 1], 4)
        [2, 2, 0]
    """
    total = sum(sizes)
    if not total:
        return [0] * len(sizes)
    shares, remainders = zip(*(divmod(k * size, total) for size in sizes), strict=True)
    by_remainder = sorted(range(len(sizes)), key=lambda part: -remainders[part])
    rounded_up = set(by_remainder[: k - sum(shares)])
    return [share + (part in rounded_up) for part, share in enumerate(shares)]
