"""A weighted mean in one pass, with constant memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fl_lightning.core.update import LazyDeltas
from fl_lightning.server.means.exact_mean import ExactMean


class RunningMean:
    """A weighted mean of vectors, one pass over each, one accumulator.

    m ← m + w / Σw (x - m): one vector, and any number of equal ones, come out bit for bit.

    Example:
        >>> mean = RunningMean(torch.empty(1))
        >>> mean.add(torch.tensor([1.0]), weight=1)
        >>> mean.add(torch.tensor([4.0]), weight=2)
        >>> mean.value()
        tensor([3.])
    """

    def __init__(self, like: Tensor) -> None:
        self._mean = torch.zeros_like(like)
        self._weight = 0.0

    def add(self, vector: Tensor, weight: float) -> None:
        """Take in one vector; of weight 0 it must be finite, and counts for nothing."""
        self._weight += weight
        self._mean.lerp_(vector, weight / self._weight if weight else 0.0)

    def add_rows(self, vectors: Tensor | LazyDeltas, weights: Sequence[float]) -> None:
        """Take in m vectors, shape (m, k), with the bits of one after the other."""
        if isinstance(vectors, Tensor):
            for vector, weight in zip(vectors, weights, strict=True):
                self.add(vector, weight)
        else:
            own = np.array(weights, np.float64)
            totals = np.cumsum(np.concatenate([[self._weight], own]))
            shares = np.divide(own, totals[1:], out=np.zeros_like(own), where=own != 0)
            vectors.fold(self._mean, shares)
            self._weight = float(totals[-1])  # not if they are not finite

    def value(self) -> Tensor:
        """Return the mean so far; zeros if nothing was added."""
        return self._mean.clone()

    def sums(self) -> list[Tensor]:
        """Return what adds up over processes."""
        wide = torch.float32 if self._mean.device.type == "mps" else torch.float64
        weight = torch.tensor(self._weight, dtype=wide, device=self._mean.device)
        return [self._mean * weight, weight]

    def load_sums(self, sums: list[Tensor]) -> None:
        """Go on with the sums of all processes."""
        total, weight = sums
        self._weight = float(weight)
        self._mean = total / self._weight if self._weight else torch.zeros_like(total)

    def state_dict(self) -> dict[str, Any]:
        """Return mean and weight."""
        return {"mean": self._mean, "weight": self._weight}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from there."""
        self._mean.copy_(state["mean"])
        self._weight = float(state["weight"])


def new_mean(like: Tensor, *, exact: bool) -> RunningMean | ExactMean:
    """Return an empty mean for vectors of the shape, dtype and device of ``like``."""
    return ExactMean(like) if exact else RunningMean(like)
