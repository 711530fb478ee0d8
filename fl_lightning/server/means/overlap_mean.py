"""The mean where clients move different coordinates: each is averaged over those that may move it.

    Δ_j = Σ_i n_i m_ij Δ_ij / Σ_i n_i m_ij,   0 where nobody may

With masks of the clients' own, the plain mean would count a client that may not move a coordinate
as one that wants it to stay. If all may move all, this is the plain mean, bit for bit. A coordinate
that nobody of a round may move keeps its bits in it, whatever the server's optimizer remembers.
"""

from __future__ import annotations

from typing import Any, final

import torch
from torch import Tensor

from fl_lightning.core.traits import Trait, Traits
from fl_lightning.core.update import ClientUpdate
from fl_lightning.server.aggregator import Aggregator


@final
class OverlapMean(Aggregator):
    """The mean of a round's updates over the clients that may move each coordinate.

    Takes three times the memory of `Mean`: the sum of weights belongs to a coordinate.

    Args:
        weight_by_examples: weigh each update by its ``num_examples``; else count clients alike.

    Example:
        >>> aggregator = OverlapMean()
        >>> aggregator.open(torch.empty(3))
        >>> for delta, active in (([2.0, 4.0, 0.0], [1, 1, 0]), ([0.0, 8.0, 0.0], [0, 1, 0])):
        ...     values = torch.tensor(delta), torch.empty(0), 10, 1
        ...     aggregator.add(ClientUpdate(0, *values, active=torch.tensor(active) > 0))
        >>> aggregator.close()
        tensor([2., 6., 0.])
    """

    def __init__(self, weight_by_examples: bool = True) -> None:
        self.weight_by_examples = weight_by_examples

    @property
    def traits(self) -> Traits:
        """It counts, for every coordinate, only clients that may move it."""
        return super().traits.without(Trait.ONE_MASK)

    def open(self, like: Tensor) -> None:
        """Start from zero."""
        self._mean = torch.zeros_like(like)
        self._weights = torch.zeros_like(like, dtype=torch.float64)

    def add(self, update: ClientUpdate) -> None:
        """Add one update; without ``active`` all its coordinates count."""
        weight = update.num_examples if self.weight_by_examples else 1
        own: Tensor | int = weight if update.active is None else weight * update.active
        self._weights += own
        share = own / self._weights.clamp(min=1)
        self._mean.lerp_(update.delta, share.to(self._mean.dtype))

    def sums(self) -> list[Tensor]:
        """Return what adds up over processes."""
        return [self._mean * self._weights, self._weights]

    def load_sums(self, sums: list[Tensor]) -> None:
        """Go on with the updates of all processes."""
        total, self._weights = sums
        self._mean = (total / self._weights.clamp(min=1)).to(self._mean.dtype)

    def close(self) -> Tensor:
        """Return the mean."""
        return self._mean

    @property
    def untouched(self) -> Tensor:
        """The coordinates that nobody may move: bool, shape (k,)."""
        return self._weights == 0

    def state_dict(self) -> dict[str, Any]:
        """Return the mean so far and its weights."""
        return {"mean": self._mean, "weights": self._weights}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from there."""
        self._mean.copy_(state["mean"])
        self._weights.copy_(state["weights"])
