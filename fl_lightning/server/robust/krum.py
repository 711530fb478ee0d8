"""Krum, Multi-Krum and Bulyan: rules that choose updates near many others.

    s(i) = Σ |x_i - x_j|² over the n - f - 2 updates x_j nearest to x_i
    Krum: the update with the lowest score;  Multi-Krum: the mean of the m lowest

Source: Blanchard et al. 2017, Machine Learning with Adversaries; 2f + 2 < n. Distances are squared.
byzfl sums over n - f - 1 neighbours and so may choose another update. Clients have equal weights
(Flower weighs Multi-Krum's mean by examples, which attackers can claim to have). Ties of scores go to
the lowest client id.

Bulyan: choose by Krum, then average the middle of every coordinate.

    S = θ = n - 2f updates, chosen by Krum one after the other, each from those that are left
    aggregate_j = mean of the β = θ - 2f values of S nearest to their median

Source: El Mhamdi et al. 2018, The Hidden Vulnerability of Distributed Learning in Byzantium; n ≥ 4f + 3.
For f = 1 the last choice has no neighbour left for its score; its nearest update is used then.
The paper leaves open which of equally near values are averaged, e.g. for integers on both sides of the
median: here those of the lowest client ids. (The lower values would pull every round downwards.)
Differs: the median of an even number is the mean of the two in the middle, the paper's either of them.
Clients have equal weights.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, final

import numpy as np
from typing_extensions import override

from fl_lightning.server.robust.matrix import Floats, Rows, chosen_rows
from fl_lightning.server.robust.passes import (
    combined,
    median_weights,
    sorted_blocks,
    squared_distances,
)
from fl_lightning.server.robust.rule import AgainstAttackers, RuleContext


@final
@dataclass
class Krum(AgainstAttackers):
    """Krum: the update with the smallest sum of squared distances to its n - f - 2 nearest others.

    Args:
        num_attackers: f ≥ 0; a round needs at least 2f + 3 updates.

    Raises:
        ConfigurationError: if it is negative.
    """

    needed = 2, 3

    @override
    def combine(self, rows: Rows, context: RuleContext) -> Floats:
        scores = krum_scores(squared_distances(rows), self.num_attackers)
        return combined(rows, (np.arange(len(rows)) == scores.argmin()).astype(float))


@final
@dataclass
class MultiKrum(AgainstAttackers):
    """Multi-Krum: the mean of the updates with the lowest scores of `Krum`.

    Args:
        num_attackers: f ≥ 0; a round needs at least 2f + 3 updates.
        num_kept: number m ≥ 1 of updates in the mean; n - f if None. With 1 the rule is `Krum`.

    Raises:
        ConfigurationError: for values out of range.
    """

    needed = 2, 3

    num_kept: int | None = None

    ranges: ClassVar[dict[str, str]] = {"num_kept": "at least 1 update"}

    @property
    @override
    def min_updates(self) -> int:
        return max(super().min_updates, self.num_kept or 0)

    @override
    def combine(self, rows: Rows, context: RuleContext) -> Floats:
        scores = krum_scores(squared_distances(rows), self.num_attackers)
        kept = np.argsort(scores, kind="stable")[: self.num_kept or len(rows) - self.num_attackers]
        coefficients = np.zeros(len(rows))
        coefficients[kept] = 1 / len(kept)
        return combined(rows, coefficients)


def krum_scores(distances: Floats, num_attackers: int) -> Floats:
    """Return Krum's score of every update, shape (n,): summed squared distances to its n - f - 2 nearest others.

    Args:
        distances: squared distances, shape (n, n).
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
@dataclass
class Bulyan(AgainstAttackers):
    """Bulyan: selects updates by Krum, and averages the values nearest to the median per coordinate.

    Args:
        num_attackers: f ≥ 0; a round needs at least 4f + 3 updates.

    Raises:
        ConfigurationError: if it is negative.
    """

    needed = 4, 3

    @override
    def combine(self, rows: Rows, context: RuleContext) -> Floats:
        f = self.num_attackers
        chosen = krum_choices(squared_distances(rows), len(rows) - 2 * f, f)
        result = np.empty(rows.num_columns, rows.dtype)
        for columns, ordered, block in sorted_blocks(chosen_rows(rows, chosen), 0, len(chosen)):
            result[columns] = mean_around_median(block, ordered, len(chosen) - 2 * f)
        return result


def krum_choices(distances: Floats, count: int, num_attackers: int) -> list[int]:
    """Select ``count`` updates by repeated Krum, and return their row numbers, increasing."""
    left = list(range(len(distances)))
    chosen = []
    for _ in range(count):
        scores = krum_scores(distances[np.ix_(left, left)], num_attackers)
        chosen.append(left.pop(int(scores.argmin())))
    return sorted(chosen)


def mean_around_median(block: Floats, ordered: Floats, count: int) -> Floats:
    """Return the mean of each column's ``count`` values nearest to its median, shape (width,).

    Of equally near values, those in the first rows are used.

    Args:
        block: columns, shape (n, width).
        ordered: the same columns, each sorted in increasing order.
        count: number of values in the mean, 1 ≤ count ≤ n.

    Example:
        >>> column = np.array([[2.0], [0.0], [-2.0], [0.0], [-2.0]])
        >>> mean_around_median(column, np.sort(column, axis=0), 3).tolist()
        [0.6666666666666666]
    """
    num_values = len(ordered)
    medians = median_weights(num_values).astype(ordered.dtype) @ ordered
    starts = num_values - count + 1  # in sorted order the nearest values are adjacent
    reaches = np.maximum(medians - ordered[:starts], ordered[count - 1 :] - medians)
    begin = reaches.argmin(0)
    means: Floats = ordered[:count].mean(0)
    for start in range(1, starts):
        here = begin == start
        means[here] = ordered[start : start + count, here].mean(0)
    reach = reaches.min(0)
    # several runs of values reach equally far: the sorted order does not tell which is right
    tied = np.flatnonzero(((reaches == reach).sum(0) > 1) & (reach > 0))
    means[tied] = _mean_of_first(block[:, tied], medians[tied], reach[tied], count)
    return means


def _mean_of_first(block: Floats, medians: Floats, reach: Floats, count: int) -> Floats:
    """Return the mean of each column's ``count`` values nearest to its median; in a tie the first rows count."""
    distances = np.abs(block - medians)
    is_nearer, is_at_reach = distances < reach, distances == reach
    room = count - is_nearer.sum(0, dtype=np.int32)
    is_kept = is_nearer | (is_at_reach & (is_at_reach.cumsum(0, dtype=np.int32) <= room))
    means: Floats = np.where(is_kept, block, 0).sum(0) / block.dtype.type(count)
    return means
