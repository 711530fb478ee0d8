"""A mean to which no client adds more than a ball's radius, over a cohort of fixed expected size.

    aggregate = Σ_k clip(Δ_k) / qN

Clients count alike, whatever the number of their examples; the denominator is the expected cohort,
not the number of replies, which is data as well. With everybody's reply it is the plain mean of the
clipped updates, to the bit. Source: McMahan et al. 2018 (1710.06963), Section 2, estimator f̃_f.
Differs: updates are clipped where they arrive, after whatever was done to them on the way, so
that the bound holds for every compression.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fl_lightning.core.update import ClientUpdate
from fl_lightning.core.whole_numbers import Draw
from fl_lightning.privacy.noise.grid import Grid
from fl_lightning.server.aggregator import PrivateAggregator
from fl_lightning.server.means.running_mean import new_mean
from fl_lightning.updates.clip import clipped

# (clipped delta, client) -> what the client sends of it
Release = Callable[[Tensor, int], Tensor]


class PrivateMean(PrivateAggregator):
    """Folds clipped updates, and counts those that needed no clipping.

    Args:
        expected: clients of a round, qN > 0.
        exact: see `Mean`.
        release: what a client does to its clipped update before it sends it; nothing if None.

    Attributes:
        exact: as given.
        clip_norm: of the present round, set by whoever opens it.
        release: likewise.
        clips: whether updates are clipped here; not where that, and the release, was done at their site.
        coins: likewise: client -> coins with which its update is rounded to a grid, for sums in whole
            numbers; None for sums in floating point.
        grid: of the open round, with coins.
        total: the sum in the grid's steps, int64 of shape (k,), with coins.

    Example:
        >>> mean = PrivateMean(expected=4)
        >>> mean.clip_norm = 1.0
        >>> mean.open(torch.empty(2))
        >>> mean.add(ClientUpdate(0, torch.tensor([3.0, 4.0]), torch.empty(0), 10, 1))
        >>> mean.add(ClientUpdate(1, torch.tensor([0.2, 0.0]), torch.empty(0), 99, 1))
        >>> mean.close(), mean.num_unclipped, mean.num_replies
        (tensor([0.2000, 0.2000]), 1, 2)
    """

    def __init__(
        self, expected: float, exact: bool = False, release: Release | None = None
    ) -> None:
        self.exact = exact
        self.clip_norm = float("inf")
        self.clips = True
        self.release = release
        self.coins: Callable[[int], Draw] | None = None
        self.grid: Grid | None = None
        self._expected = expected

    def open(self, like: Tensor) -> None:
        """Start from zero."""
        self._like = like
        self._mean = new_mean(like, exact=self.exact)
        self._counts = torch.zeros(2, dtype=torch.int64, device=like.device)
        self.grid = None if self.coins is None else Grid.of(self.clip_norm, len(like))
        self.total = torch.zeros(
            0 if self.grid is None else len(like), dtype=torch.int64, device=like.device
        )

    def add(self, update: ClientUpdate) -> None:
        """Clip and add one update."""
        norm = self.clip_norm if self.clips else float("inf")
        delta, is_within = clipped(update.delta, norm)
        if self.release is not None:
            delta = self.release(delta, update.client_id)
        if self.grid is None or self.coins is None:
            self._mean.add(delta, 1)
        else:
            steps = self.grid.to_steps(delta, self.coins(update.client_id))
            self.total += torch.from_numpy(steps).to(self.total.device)
        self._counts += torch.stack([is_within, torch.ones_like(is_within)])

    def sums(self) -> list[Tensor]:
        """Return what adds up over processes."""
        return [*self._mean.sums(), self.total, self._counts]

    def load_sums(self, sums: list[Tensor]) -> None:
        """Go on with the updates of all processes."""
        *mean, self.total, self._counts = sums
        self._mean.load_sums(mean)

    def close(self) -> Tensor:
        """Return the sum over the expected cohort, without noise that a server adds."""
        if self.grid is not None:
            return self.grid.value(self.total).to(self._like) / self._expected
        return self._mean.value() * (self.num_replies / self._expected)

    @property
    def num_unclipped(self) -> int:
        """Updates that were within the clip norm."""
        return int(self._counts[0])

    @property
    def num_replies(self) -> int:
        """Updates so far."""
        return int(self._counts[1])

    def state_dict(self) -> dict[str, Any]:
        """Return the sums so far."""
        return {"mean": self._mean.state_dict(), "total": self.total, "counts": self._counts}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on with an open round."""
        self._mean.load_state_dict(state["mean"])
        self.total.copy_(state["total"])
        self._counts.copy_(state["counts"])
