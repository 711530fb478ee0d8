"""Exactly k entries with the lowest values, whatever the ties.

A threshold alone keeps too many: of [0, 0, 0, 4, …] the two lowest are two, and "≤ 0" is three.
Here the entries below the k-th lowest value are kept, and of those equal to it the first ones by
index, as many as are missing. That is what a stable sort would keep, at a tenth of its time.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from fl_lightning.core.errors import ConfigurationError
from fl_lightning.sparsity.masks.mask import Mask


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


def next_mask(order: Mapping[str, Tensor], mask: Mask, k: int, *, per_tensor: bool = False) -> Mask:
    """Return the mask of the k entries with the lowest values among those that a mask keeps.

    Args:
        order: values by name, without nan; ties are kept by flat index, in the mask's order.
        mask: what may be kept.
        k: how many, in [0, mask.num_active].
        per_tensor: share k over the tensors by what the mask keeps of each, choose in each.

    Raises:
        ConfigurationError: if k is out of range.

    Example:
        >>> order = {"a": torch.tensor([0.0, 1.0, 1.0]), "b": torch.tensor([4.0])}
        >>> dict(next_mask(order, Mask.ones(order), 3))
        {'a': tensor([True, True, True]), 'b': tensor([False])}
        >>> dict(next_mask(order, Mask.ones(order), 3, per_tensor=True))
        {'a': tensor([ True,  True, False]), 'b': tensor([True])}
    """
    if not 0 <= k <= mask.num_active:
        raise ConfigurationError(
            f"k must be in 0 to {mask.num_active}, the entries left to keep, got {k}"
        )
    values = {name: order[name].flatten() for name in mask}
    allowed = {name: mask[name].flatten().to(values[name].device) for name in mask}
    if per_tensor:
        counts = apportion(list(mask.active_per_tensor.values()), k)
        kept = [keep_lowest(values[n], allowed[n], c) for n, c in zip(mask, counts, strict=True)]
    else:
        sizes = [value.numel() for value in values.values()]
        flat = keep_lowest(torch.cat([*values.values()]), torch.cat([*allowed.values()]), k)
        kept = list(flat.split(sizes))
    return Mask({n: part.view(mask[n].shape) for n, part in zip(mask, kept, strict=True)})
