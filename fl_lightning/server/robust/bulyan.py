"""Bulyan: choose by Krum, then take the middle of every coordinate.

    S = θ = n - 2f updates, chosen by Krum one after the other, each from those that are left
    aggregate_j = mean of the θ - 2f values of S nearest to their median

Source: El Mhamdi et al. 2018, The Hidden Vulnerability of Distributed Learning in Byzantium; n ≥ 4f + 3.
Where f = 1 the last choice has no neighbour left to be judged by; it is then judged by its nearest one.
Clients count alike.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

import numpy as np

from fl_lightning.server.collected import RuleContext
from fl_lightning.server.robust.checks import check_num_attackers
from fl_lightning.server.robust.krum import krum_scores
from fl_lightning.server.row_passes import median_weights, sorted_blocks, squared_distances
from fl_lightning.server.row_views import ChosenRows
from fl_lightning.server.update_rows import Floats, Rows


@final
@dataclass(frozen=True)
class Bulyan:
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
        for columns, ordered in sorted_blocks(ChosenRows(rows, chosen), 0, len(chosen)):
            result[columns] = mean_around_median(ordered, len(chosen) - 2 * f)
        return result


def krum_choices(distances: Floats, count: int, num_attackers: int) -> list[int]:
    """Return Krum's choice, then its choice among the others, and so on, increasing."""
    left = list(range(len(distances)))
    chosen = []
    for _ in range(count):
        scores = krum_scores(distances[np.ix_(left, left)], num_attackers)
        chosen.append(left.pop(int(scores.argmin())))
    return sorted(chosen)


def mean_around_median(ordered: Floats, count: int) -> Floats:
    """Return the mean of those values of each column that are nearest to its median.

    Args:
        ordered: increasing columns, shape (n, width).
        count: how many values, 1 ≤ count ≤ n; they lie side by side.

    Example:
        >>> mean_around_median(np.array([[0.0], [4.0], [5.0], [7.0], [99.0]]), 3).tolist()
        [5.333333333333333]
    """
    num_values = len(ordered)
    medians = median_weights(num_values).astype(ordered.dtype) @ ordered
    starts = num_values - count + 1
    reach = np.maximum(medians - ordered[:starts], ordered[count - 1 :] - medians)
    begin = reach.argmin(0)
    means: Floats = ordered[:count].mean(0)
    for start in range(1, starts):
        here = begin == start
        means[here] = ordered[start : start + count, here].mean(0)
    return means
