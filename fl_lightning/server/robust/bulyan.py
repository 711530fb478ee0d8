"""Bulyan: choose by Krum, then take the middle of every coordinate.

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

from fl_lightning.server.robust.checks import check_num_attackers
from fl_lightning.server.robust.krum import krum_scores
from fl_lightning.server.robust.matrix import Floats, Rows
from fl_lightning.server.robust.passes import median_weights, sorted_blocks, squared_distances
from fl_lightning.server.robust.rule import RobustRule, RuleContext
from fl_lightning.server.robust.views import ChosenRows


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
