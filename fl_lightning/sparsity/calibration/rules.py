"""Rules for the order in which entries are kept, and the mask of the first k entries.

By a mask of density d the first d · N entries in a rule's order train, so that density is the fraction that
trains under every rule: `LeastSensitive` at density 0.1 trains the tenth of all entries with the lowest scores.

Source: Iurada et al. 2025, ICLR (TaLoS), section 4.2, keeps the least sensitive: training them
changes the model's function least. The other four rules are baselines.

Exactly k entries are kept, also with ties. A threshold alone would keep too many: of [0, 0, 0, 4, …]
"≤ 0" keeps three for k = 2. Here all entries below the k-th lowest value are kept, and of those equal to it the
first by index. A stable sort keeps the same ones, in ten times the time.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Protocol, final

import torch
from torch import Tensor

from fl_lightning.core.errors import ConfigurationError
from fl_lightning.core.seeds import numpy_generator
from fl_lightning.sparsity.masks.mask import Mask

Tensors = Mapping[str, Tensor]


class Rule(Protocol):
    """Protocol of rules that rank the entries of parameters: which ones to train first.

    Attributes:
        needs_scores: whether the rule uses sensitivities; if False, it gets none.
    """

    needs_scores: ClassVar[bool]

    def order_by(self, parameters: Tensors, scores: Tensors, seed: int) -> dict[str, Tensor]:
        """Return a sort key for each entry, by parameter name; entries with the lowest keys train."""


@final
@dataclass(frozen=True)
class LeastSensitive:
    """Rule that trains the entries with the lowest sensitivity scores.

    Example:
        >>> scores = {"weight": torch.tensor([0.1, 0.9])}
        >>> LeastSensitive().order_by({}, scores, seed=0)
        {'weight': tensor([0.1000, 0.9000])}
    """

    needs_scores: ClassVar[bool] = True

    def order_by(self, parameters: Tensors, scores: Tensors, seed: int) -> dict[str, Tensor]:
        """Return the scores as sort keys: the lowest scores come first."""
        return dict(scores)


@final
@dataclass(frozen=True)
class MostSensitive:
    """Rule that trains the entries with the highest sensitivity scores.

    Example:
        >>> scores = {"weight": torch.tensor([0.1, 0.9])}
        >>> MostSensitive().order_by({}, scores, seed=0)
        {'weight': tensor([-0.1000, -0.9000])}
    """

    needs_scores: ClassVar[bool] = True

    def order_by(self, parameters: Tensors, scores: Tensors, seed: int) -> dict[str, Tensor]:
        """Return the negated scores as sort keys: the highest scores come first."""
        return {name: -score for name, score in scores.items()}


@final
@dataclass(frozen=True)
class LowestMagnitude:
    """Rule that trains the entries with the lowest absolute values.

    Example:
        >>> parameters = {"weight": torch.tensor([-2.0, 1.0])}
        >>> LowestMagnitude().order_by(parameters, {}, seed=0)
        {'weight': tensor([2., 1.])}
    """

    needs_scores: ClassVar[bool] = False

    def order_by(self, parameters: Tensors, scores: Tensors, seed: int) -> dict[str, Tensor]:
        """Return the absolute values of the parameters as sort keys: the lowest come first."""
        return {name: parameter.detach().abs() for name, parameter in parameters.items()}


@final
@dataclass(frozen=True)
class HighestMagnitude:
    """Rule that trains the entries with the highest absolute values.

    Example:
        >>> parameters = {"weight": torch.tensor([-2.0, 1.0])}
        >>> HighestMagnitude().order_by(parameters, {}, seed=0)
        {'weight': tensor([-2., -1.])}
    """

    needs_scores: ClassVar[bool] = False

    def order_by(self, parameters: Tensors, scores: Tensors, seed: int) -> dict[str, Tensor]:
        """Return the negated absolute values as sort keys: the highest values come first."""
        return {name: -parameter.detach().abs() for name, parameter in parameters.items()}


@final
@dataclass(frozen=True)
class RandomEntries:
    """Rule that trains entries drawn uniformly at random.

    Example:
        >>> parameters = {"weight": torch.zeros(2)}
        >>> one, other = (RandomEntries().order_by(parameters, {}, seed=3) for _ in range(2))
        >>> torch.equal(one["weight"], other["weight"])
        True
    """

    needs_scores: ClassVar[bool] = False

    def order_by(self, parameters: Tensors, scores: Tensors, seed: int) -> dict[str, Tensor]:
        """Return random sort keys, uniform and independent; they depend only on the seed and the shapes."""
        generator = numpy_generator(seed, "random mask")
        return {
            # 53 random bits: ties, which would favour the first entry, practically never occur
            name: torch.from_numpy(generator.random(tuple(p.shape))).to(p.device)
            for name, p in parameters.items()
        }


def keep_lowest(values: Tensor, allowed: Tensor, k: int) -> Tensor:
    """Return which k entries have the lowest values among those allowed, bool of shape (n,).

    Args:
        values: shape (n,), without nan.
        allowed: True for entries that may be kept, bool of shape (n,).
        k: number of entries to keep, from 0 to the number of allowed entries.

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
    """Divide k units among parts in proportion to their sizes, in whole numbers, by largest remainders.

    No part gets more than its size; of equal remainders the first is rounded up.

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
    """Shrink a mask: of its active entries, keep the k with the lowest sort keys.

    Args:
        order: sort keys by name, without NaN; of equal keys the first by flat index, in the mask's order.
        mask: mask whose active entries may be kept.
        k: number of entries to keep, in [0, mask.num_active].
        per_tensor: distribute k over the tensors by their active entries, and choose in each.

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
            f"k must be from 0 to {mask.num_active}, the number of active entries of the mask, got {k}"
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
