"""How many updates become one: folds with constant memory.

    mean = Σ_k w_k Δ_k / Σ_k w_k        w_k = n_k, or 1 if clients count alike

Source: McMahan et al. 2017, Algorithm 1 with the paper's own erratum: the sum of weights runs over
the clients that were sampled, not over all. Updates are added in the order in which they arrive;
clients train in increasing order of their ids, so the sum is the same in every run. Several
processes each fold the updates of their own clients; what they have then is added up.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from fl_lightning.core.update import ClientUpdate, LazyDeltas
from fl_lightning.server.means.exact_mean import ExactMean


class Aggregator(Protocol):
    """A fold over a round's updates.

    Attributes:
        exact: whether the aggregate has the same bits in whatever order the updates come and over
            however many processes they are spread. Buffers are then averaged in the same way.
    """

    exact: bool

    def open(self, like: Tensor) -> None:
        """Start a round; updates have shape, dtype and device of ``like``, shape (k,)."""

    def add(self, update: ClientUpdate) -> None:
        """Take in one update."""

    def sums(self) -> list[Tensor]:
        """Return tensors which, added up over processes, are those of all updates together."""

    def load_sums(self, sums: list[Tensor]) -> None:
        """Take the updates of all processes for one's own, given the added `sums`."""

    def close(self) -> Tensor:
        """End the round and return the aggregate, shape (k,)."""

    def state_dict(self) -> dict[str, Any]:
        """Return the open round's state: tensors and numbers."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on with an open round."""


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

    def add_group(self, vectors: Tensor | LazyDeltas, weights: Sequence[float]) -> None:
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


class Mean:
    """The mean of a round's updates, FedAvg's aggregation.

    Args:
        weight_by_examples: weigh each update by its ``num_examples``; else count clients alike.
        exact: give the same bits over any number of processes, see `ExactMean`, for four times the
            memory. Else results over different numbers of processes agree to about 1e-6.

    Example:
        >>> def aggregate(aggregator):
        ...     aggregator.open(torch.empty(1))
        ...     for value, n in ((2.0, 1), (4.0, 3)):
        ...         aggregator.add(ClientUpdate(0, torch.tensor([value]), torch.empty(0), n, 1))
        ...     return aggregator.close()
        >>> aggregate(Mean()), aggregate(Mean(weight_by_examples=False))
        (tensor([3.5000]), tensor([3.]))
    """

    def __init__(self, weight_by_examples: bool = True, exact: bool = False) -> None:
        self.weight_by_examples = weight_by_examples
        self.exact = exact

    def open(self, like: Tensor) -> None:
        """Start from zero."""
        self._mean = new_mean(like, exact=self.exact)

    def add(self, update: ClientUpdate) -> None:
        """Add one update."""
        self._mean.add(update.delta, update.num_examples if self.weight_by_examples else 1)

    def add_group(self, deltas: Tensor | LazyDeltas, num_examples: Sequence[int]) -> None:
        """Add the updates of several clients at once.

        Args:
            deltas: one row per client, shape (m, k).
            num_examples: of each.
        """
        alike = [1] * len(num_examples)
        self._mean.add_group(deltas, num_examples if self.weight_by_examples else alike)

    def sums(self) -> list[Tensor]:
        """Return what adds up over processes."""
        return self._mean.sums()

    def load_sums(self, sums: list[Tensor]) -> None:
        """Go on with the updates of all processes."""
        self._mean.load_sums(sums)

    def close(self) -> Tensor:
        """Return the mean."""
        return self._mean.value()

    def state_dict(self) -> dict[str, Any]:
        """Return the mean so far and its weight."""
        return self._mean.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from there."""
        self._mean.load_state_dict(state)
