"""The geometric median: the point with the least sum of distances to the updates.

    z* = argmin_z Σ a_i |x_i - z|;      z ← Σ β_i x_i / Σ β_i,   β_i = a_i / max(ν, |x_i - z|)

Source: Pillutla et al. 2022, Robust Aggregation for Federated Learning (RFA), Algorithm 2, the
smoothed Weiszfeld iteration. It runs until it stands still, not for a few steps (byzfl's default is
three, with ν = 0.1). z is a weighted mean of the updates throughout, so that the iteration is one
on n weights: |x_i - Σ a_j x_j|² = (D a)_i - aᵀ D a / 2, with D the squared distances. a_i = 1 / n,
or the share of examples, as in the paper, if that is wished for.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

import numpy as np

from fl_lightning.core.errors import ConfigurationError
from fl_lightning.server.robust.matrix import Floats, Rows
from fl_lightning.server.robust.passes import combined, squared_distances
from fl_lightning.server.robust.rule import RobustRule, RuleContext

# the iteration nears its end linearly; it stops when a step is so short a part of the distances
_TOLERANCE = 1e-9
_MOST_STEPS = 100_000


@final
@dataclass(frozen=True)
class GeometricMedian(RobustRule):
    """The geometric median of the updates, RFA; withstands fewer than half of the clients.

    Args:
        smoothing: ν, > 0, in units of an update's norm: nearer than that, an update attracts no
            more strongly.
        weight_by_examples: weigh updates by their examples, which clients claim to have.

    Raises:
        ConfigurationError: if the smoothing is not positive.
    """

    smoothing: float = 1e-6
    weight_by_examples: bool = False

    def __post_init__(self) -> None:
        if not 0 < self.smoothing < float("inf"):
            raise ConfigurationError(
                f"GeometricMedian: smoothing must be greater than 0 and finite, got {self.smoothing}"
            )

    def combine(self, rows: Rows, context: RuleContext) -> Floats:
        """Return the point."""
        shares = rows.num_examples if self.weight_by_examples else np.ones(len(rows))
        return combined(rows, weiszfeld(squared_distances(rows), shares, self.smoothing))


def weiszfeld(distances: Floats, shares: Floats, smoothing: float) -> Floats:
    """Return the weights of the points in their geometric median, shape (n,), adding up to 1.

    Points infinitely far from the others have weight 0.

    Args:
        distances: squared, shape (n, n).
        shares: how much each point counts, shape (n,).
        smoothing: see `GeometricMedian`.

    Example:
        >>> points = np.array([0.0, 1.0, 5.0])
        >>> weiszfeld((points[:, None] - points) ** 2, np.ones(3), 1e-9).round(6).tolist()
        [0.0, 1.0, 0.0]
    """
    near = np.isfinite(distances).sum(1) * 2 > len(distances)
    shares = shares * near
    finite = np.where(np.isfinite(distances), distances, 0.0)
    weights: Floats = shares / shares.sum()
    for _ in range(_MOST_STEPS):
        to_all = finite @ weights
        reach = np.sqrt(np.maximum(to_all - weights @ to_all / 2, 0))
        pulls = shares / np.maximum(reach, smoothing)
        new = pulls / pulls.sum()
        change, weights = new - weights, new
        step = -change @ finite @ change / 2
        if step <= _TOLERANCE**2 * (weights @ finite @ weights):
            break
    return weights
