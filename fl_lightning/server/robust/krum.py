"""Krum and Multi-Krum: the updates with the closest company.

    s(i) = Σ |x_i - x_j|² over the n - f - 2 updates x_j nearest to x_i
    Krum: the update with the least score;  Multi-Krum: the mean of the m with the least

Source: Blanchard et al. 2017, Machine Learning with Adversaries; 2f + 2 < n. Distances
are squared. byzfl sums over n - f - 1 neighbours and so may choose another update. Clients count
alike (Flower weighs Multi-Krum's mean by examples, which attackers can claim to have). Of equal
scores the lowest client id wins.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

import numpy as np

from fl_lightning.core.errors import ConfigurationError
from fl_lightning.server.robust.checks import check_num_attackers
from fl_lightning.server.robust.matrix import Floats, Rows
from fl_lightning.server.robust.passes import combined, squared_distances
from fl_lightning.server.robust.rule import RobustRule, RuleContext


@final
@dataclass(frozen=True)
class Krum(RobustRule):
    """The one update that is nearest to its n - f - 2 nearest others.

    Args:
        num_attackers: f, ≥ 0; of 2f + 3 updates and more.

    Raises:
        ConfigurationError: if it is negative.
    """

    num_attackers: int

    def __post_init__(self) -> None:
        check_num_attackers(self, self.num_attackers)

    @property
    def min_updates(self) -> int:
        """More than 2f + 2."""
        return 2 * self.num_attackers + 3

    def combine(self, rows: Rows, context: RuleContext) -> Floats:
        """Return the one."""
        scores = krum_scores(squared_distances(rows), self.num_attackers)
        return combined(rows, (np.arange(len(rows)) == scores.argmin()).astype(float))


@final
@dataclass(frozen=True)
class MultiKrum(RobustRule):
    """The mean of the updates with the lowest scores, which are those of `Krum`.

    Args:
        num_attackers: f, ≥ 0; of 2f + 3 updates and more.
        num_kept: m, ≥ 1, of how many updates; n - f of them if None. With 1 it is Krum.

    Raises:
        ConfigurationError: for values out of range.
    """

    num_attackers: int
    num_kept: int | None = None

    def __post_init__(self) -> None:
        check_num_attackers(self, self.num_attackers)
        if self.num_kept is not None and self.num_kept < 1:
            raise ConfigurationError(
                f"MultiKrum: num_kept must be at least 1 update, got {self.num_kept}"
            )

    @property
    def min_updates(self) -> int:
        """More than 2f + 2, and those that are kept."""
        return max(2 * self.num_attackers + 3, self.num_kept or 0)

    def combine(self, rows: Rows, context: RuleContext) -> Floats:
        """Return the mean of the best."""
        scores = krum_scores(squared_distances(rows), self.num_attackers)
        kept = np.argsort(scores, kind="stable")[: self.num_kept or len(rows) - self.num_attackers]
        coefficients = np.zeros(len(rows))
        coefficients[kept] = 1 / len(kept)
        return combined(rows, coefficients)


def krum_scores(distances: Floats, num_attackers: int) -> Floats:
    """Return every update's sum of squared distances to its n - f - 2 nearest others.

    Args:
        distances: squared, shape (n, n).
        num_attackers: f.

    Example:
        >>> points = np.array([0.0, 1.0, 2.0, 9.0])
        >>> krum_scores((points[:, None] - points) ** 2, num_attackers=0).tolist()
        [5.0, 2.0, 5.0, 113.0]
    """
    count = max(1, len(distances) - num_attackers - 2)
    nearest = np.sort(distances, axis=1)[:, 1 : 1 + count]  # the first is the update itself
    scores: Floats = nearest.sum(1)
    return scores
