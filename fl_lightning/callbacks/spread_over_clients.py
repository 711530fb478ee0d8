"""How unequal clients are: what the worst tenth has, and how far from equal shares."""

from __future__ import annotations

import torch
from torch import Tensor


def worst_decile(values: Tensor, *, higher_is_better: bool) -> Tensor:
    """Return the mean over the tenth of the clients (at least one) that do worst.

    Example:
        >>> worst_decile(torch.linspace(0, 1, 20), higher_is_better=True)
        tensor(0.0263)
    """
    count = max(1, round(len(values) / 10))
    return values.sort(descending=not higher_is_better).values[:count].mean()


def jains_index(values: Tensor) -> Tensor:
    """Return Jain's index (Σx)² / (n Σx²): 1 if all clients do alike, 1/n if one has everything.

    Source: Jain et al. 1984, A Quantitative Measure of Fairness, Section 3. For values ≥ 0.

    Example:
        >>> jains_index(torch.tensor([1.0, 1.0, 1.0])), jains_index(torch.tensor([0.0, 5.0]))
        (tensor(1.), tensor(0.5000))
    """
    squares = values.square().sum() * len(values)
    return values.sum().square() / squares if squares else torch.ones_like(squares)
