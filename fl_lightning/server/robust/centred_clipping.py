"""Centred clipping: the mean of the updates, each drawn to the last aggregate if it is far off.

    v ← v + (1/n) Σ_i (x_i - v) min(1, τ / |x_i - v|),   L times, from the last round's v

Source: Karimireddy et al. 2021, Learning from History for Byzantine Robust Optimization, Algorithm
2. Differs: the paper's workers send momenta, ours the updates themselves. v starts at 0.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

import numpy as np

from fl_lightning.core.errors import ConfigurationError
from fl_lightning.server.robust.matrix import Floats, Rows
from fl_lightning.server.robust.passes import combined, squared_distances
from fl_lightning.server.robust.rule import RobustRule, RuleContext
from fl_lightning.server.robust.views import RowsAndOne

_CENTRE = "centre"


@final
@dataclass(frozen=True)
class CentredClipping(RobustRule):
    """Clips updates around the last round's aggregate.

    Args:
        radius: τ, > 0, in units of an update's norm: no update moves the aggregate by more than
            τ / n in an iteration.
        num_iterations: L, ≥ 1.

    Raises:
        ConfigurationError: for values out of range.
    """

    radius: float = 1.0
    num_iterations: int = 1

    def __post_init__(self) -> None:
        if not self.radius > 0:
            raise ConfigurationError(
                f"CentredClipping: radius must be greater than 0, got {self.radius}"
            )
        if self.num_iterations < 1:
            raise ConfigurationError(
                f"CentredClipping: num_iterations must be at least 1, got {self.num_iterations}"
            )

    def combine(self, rows: Rows, context: RuleContext) -> Floats:
        """Return the new centre, and remember it."""
        centre = context.memory.get(_CENTRE, np.zeros(rows.num_columns, rows.dtype))
        points = RowsAndOne(rows, centre)
        shares = clipped_shares(squared_distances(points), self.radius, self.num_iterations)
        centre = context.memory[_CENTRE] = combined(points, shares)
        return centre


def clipped_shares(distances: Floats, radius: float, num_iterations: int) -> Floats:
    """Return the weights of the points in the new centre, adding up to 1.

    Args:
        distances: squared, of all points and, last, the old centre; shape (n + 1, n + 1).
        radius: τ.
        num_iterations: L.

    Example:
        >>> points = np.array([1.0, 8.0, 0.0])
        >>> clipped_shares((points[:, None] - points) ** 2, radius=2.0, num_iterations=1).tolist()
        [0.5, 0.125, 0.375]
    """
    count = len(distances) - 1
    finite = np.where(np.isfinite(distances), distances, 0.0)
    is_far = ~np.isfinite(distances[:-1, -1])
    weights = np.zeros(count + 1)
    weights[-1] = 1.0
    for _ in range(num_iterations):
        to_all = finite @ weights
        reach = np.sqrt(np.maximum(to_all - weights @ to_all / 2, 0))[:-1]
        with np.errstate(divide="ignore"):
            factors = np.minimum(1, radius / reach) * ~is_far / count
        weights *= 1 - factors.sum()
        weights[:-1] += factors
    return weights
