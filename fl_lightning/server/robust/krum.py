"""Krum and Multi-Krum: the updates with the closest company.

    s(i) = Σ |x_i - x_j|² over the n - f - 2 updates x_j nearest to x_i
    Krum: the update with the least score;  Multi-Krum: the mean of the m with the least

Source: Blanchard et al. 2017, Machine Learning with Adversaries; 2f + 2 < n. Distances
are squared. byzfl sums over n - f - 1 neighbours and so may choose another update. Clients count
alike (Flower weighs Multi-Krum's mean by examples, which attackers can claim to have). Of equal
scores the lowest client id wins.

Bulyan: choose by Krum, then take the middle of every coordinate.

    S = θ = n - 2f updates, chosen by Krum one after the other, each from those that are left
    aggregate_j = mean of the β = θ - 2f values of S nearest to their median

Source: El Mhamdi et al. 2018, The Hidden Vulnerability of Distributed Learning in Byzantium; n ≥ 4f + 3.
Where f = 1 the last choice has no neighbour left to be judged by; it is then judged by its nearest one.
The paper leaves open which of equally near values count, as on both sides of the median of whole
numbers: those of the lowest client ids. (The lower values instead would pull every round downwards.)
Differs: the median of an even number is the mean of the two in the middle, the paper's either of them.
Clients count alike.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

import numpy as np

from fl_lightning.core.errors import ConfigurationError
from fl_lightning.server.robust.matrix import ChosenRows, Floats, Rows
from fl_lightning.server.robust.passes import (
    combined,
    median_weights,
    sorted_blocks,
    squared_distances,
)
from fl_lightning.server.robust.rule import RobustRule, RuleContext, check_num_attackers


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


@final
@dataclass(frozen=True)
class Bulyan(RobustRule):
    """Krum's choices, averaged around their median.

    Args:
        num_attackers: f, ≥ 0; of 4f + 3 updates and more.

    Raises:
        ConfigurationError: if it is negative.
    """

    num_attackers: int

    def __post_init__(self) -> None:
        check_num_attackers(self, self.num_attackers)

    @property
    def min_updates(self) -> int:
        """As the paper asks."""
        return 4 * self.num_attackers + 3

    def combine(self, rows: Rows, context: RuleContext) -> Floats:
        """Return the mean around the median."""
        f = self.num_attackers
        chosen = krum_choices(squared_distances(rows), len(rows) - 2 * f, f)
        result = np.empty(rows.num_columns, rows.dtype)
        for columns, ordered, block in sorted_blocks(ChosenRows(rows, chosen), 0, len(chosen)):
            result[columns] = mean_around_median(block, ordered, len(chosen) - 2 * f)
        return result


def krum_choices(distances: Floats, count: int, num_attackers: int) -> list[int]:
    """Return Krum's choice, then its choice among the others, and so on, increasing."""
    left = list(range(len(distances)))
    chosen = []
    for _ in range(count):
        scores = krum_scores(distances[np.ix_(left, left)], num_attackers)
        chosen.append(left.pop(int(scores.argmin())))
    return sorted(chosen)


def mean_around_median(block: Floats, ordered: Floats, count: int) -> Floats:
    """Return the mean of those values of each column that are nearest to its median.

    Of values that are equally near, those in the first rows count.

    Args:
        block: columns, shape (n, width).
        ordered: the same ones, each increasing.
        count: how many values, 1 ≤ count ≤ n.

    Example:
        >>> column = np.array([[2.0], [0.0], [-2.0], [0.0], [-2.0]])
        >>> mean_around_median(column, np.sort(column, axis=0), 3).tolist()
        [0.6666666666666666]
    """
    num_values = len(ordered)
    medians = median_weights(num_values).astype(ordered.dtype) @ ordered
    starts = num_values - count + 1  # in order, the nearest values lie side by side
    reaches = np.maximum(medians - ordered[:starts], ordered[count - 1 :] - medians)
    begin = reaches.argmin(0)
    means: Floats = ordered[:count].mean(0)
    for start in range(1, starts):
        here = begin == start
        means[here] = ordered[start : start + count, here].mean(0)
    reach = reaches.min(0)
    # several runs of values reach as far: which one is right, order does not tell
    tied = np.flatnonzero(((reaches == reach).sum(0) > 1) & (reach > 0))
    means[tied] = _mean_of_first(block[:, tied], medians[tied], reach[tied], count)
    return means


def _mean_of_first(block: Floats, medians: Floats, reach: Floats, count: int) -> Floats:
    """Return means of the values nearer than the reach and of the first ones just as far."""
    distances = np.abs(block - medians)
    is_nearer, is_at_reach = distances < reach, distances == reach
    room = count - is_nearer.sum(0, dtype=np.int32)
    is_kept = is_nearer | (is_at_reach & (is_at_reach.cumsum(0, dtype=np.int32) <= room))
    means: Floats = np.where(is_kept, block, 0).sum(0) / block.dtype.type(count)
    return means
