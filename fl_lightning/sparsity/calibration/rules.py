"""In which order entries are kept: the five rules.

A mask of density d lets the first d · N entries of a rule's order move, so density is the fraction
that trains, under every rule: "least sensitive at density 0.1" trains the tenth of all entries
with the lowest scores and freezes the rest.

Source: Iurada et al. 2025, ICLR (TaLoS), section 4.2, keeps the least sensitive: training them
moves the model's function least. The other four are what it is compared with.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Protocol, final

import torch
from torch import Tensor

from fl_lightning.core.seeds import numpy_generator

Tensors = Mapping[str, Tensor]


class Rule(Protocol):
    """Orders entries.

    `needs_scores` says whether sensitivities matter; rules that do not need them are given none.
    `order_by` returns a tensor a parameter, of its shape: the lowest values are kept first.
    """

    needs_scores: ClassVar[bool]

    def order_by(self, parameters: Tensors, scores: Tensors, seed: int) -> dict[str, Tensor]:
        """Return what entries are sorted by, ascending."""


@final
@dataclass(frozen=True)
class LeastSensitive:
    """Entries with the lowest sensitivity train.

    Example:
        >>> scores = {"weight": torch.tensor([0.1, 0.9])}
        >>> LeastSensitive().order_by({}, scores, seed=0)
        {'weight': tensor([0.1000, 0.9000])}
    """

    needs_scores: ClassVar[bool] = True

    def order_by(self, parameters: Tensors, scores: Tensors, seed: int) -> dict[str, Tensor]:
        """Return the scores."""
        return dict(scores)


@final
@dataclass(frozen=True)
class MostSensitive:
    """Entries with the highest sensitivity train.

    Example:
        >>> scores = {"weight": torch.tensor([0.1, 0.9])}
        >>> MostSensitive().order_by({}, scores, seed=0)
        {'weight': tensor([-0.1000, -0.9000])}
    """

    needs_scores: ClassVar[bool] = True

    def order_by(self, parameters: Tensors, scores: Tensors, seed: int) -> dict[str, Tensor]:
        """Return the scores' negatives."""
        return {name: -score for name, score in scores.items()}


@final
@dataclass(frozen=True)
class LowestMagnitude:
    """Entries with the lowest absolute value train.

    Example:
        >>> parameters = {"weight": torch.tensor([-2.0, 1.0])}
        >>> LowestMagnitude().order_by(parameters, {}, seed=0)
        {'weight': tensor([2., 1.])}
    """

    needs_scores: ClassVar[bool] = False

    def order_by(self, parameters: Tensors, scores: Tensors, seed: int) -> dict[str, Tensor]:
        """Return absolute values."""
        return {name: parameter.detach().abs() for name, parameter in parameters.items()}


@final
@dataclass(frozen=True)
class HighestMagnitude:
    """Entries with the highest absolute value train.

    Example:
        >>> parameters = {"weight": torch.tensor([-2.0, 1.0])}
        >>> HighestMagnitude().order_by(parameters, {}, seed=0)
        {'weight': tensor([-2., -1.])}
    """

    needs_scores: ClassVar[bool] = False

    def order_by(self, parameters: Tensors, scores: Tensors, seed: int) -> dict[str, Tensor]:
        """Return the negatives of absolute values."""
        return {name: -parameter.detach().abs() for name, parameter in parameters.items()}


@final
@dataclass(frozen=True)
class RandomEntries:
    """Entries drawn uniformly from all, not tensor by tensor, train.

    Example:
        >>> parameters = {"weight": torch.zeros(2)}
        >>> one, other = (RandomEntries().order_by(parameters, {}, seed=3) for _ in range(2))
        >>> torch.equal(one["weight"], other["weight"])
        True
    """

    needs_scores: ClassVar[bool] = False

    def order_by(self, parameters: Tensors, scores: Tensors, seed: int) -> dict[str, Tensor]:
        """Return independent uniform numbers: a pure function of the seed and the shapes."""
        generator = numpy_generator(seed, "random mask")
        return {
            # 53 random bits: equal numbers, which would favour the first, practically do not occur
            name: torch.from_numpy(generator.random(tuple(p.shape))).to(p.device)
            for name, p in parameters.items()
        }
