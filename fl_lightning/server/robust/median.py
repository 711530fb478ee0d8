"""Coordinate-wise median and trimmed mean.

    median_j = median_i x_ij,      trimmed_j = mean of x_(f+1)j … x_(n-f)j, in increasing order

Source: Yin et al. 2018, Byzantine-Robust Distributed Learning, Definitions 1 and 2; there a
fraction β of the updates is trimmed at each end, here a number f of them. The median of an even
number is the mean of the two in the middle (torch's is the lower one). Clients have equal weights.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

from typing_extensions import override

from fl_lightning.server.robust.matrix import Floats, Rows
from fl_lightning.server.robust.passes import median_weights, sorted_sum, trimmed_weights
from fl_lightning.server.robust.rule import RobustRule, RuleContext, check_num_attackers


@final
@dataclass(frozen=True)
class Median(RobustRule):
    """The median of every coordinate; tolerates fewer than half of the clients as attackers."""

    by_coordinate = True

    @override
    def combine(self, rows: Rows, context: RuleContext) -> Floats:
        return sorted_sum(rows, median_weights(len(rows)))


@final
@dataclass(frozen=True)
class TrimmedMean(RobustRule):
    """The mean of every coordinate without its f smallest and its f largest values.

    Args:
        num_attackers: f ≥ 0; a round needs at least 2f + 1 updates. With 0 it is the mean.

    Raises:
        ConfigurationError: if it is negative.
    """

    num_attackers: int

    by_coordinate = True

    def __post_init__(self) -> None:
        check_num_attackers(self, self.num_attackers)

    @property
    @override
    def min_updates(self) -> int:
        return 2 * self.num_attackers + 1

    @override
    def combine(self, rows: Rows, context: RuleContext) -> Floats:
        return sorted_sum(rows, trimmed_weights(len(rows), self.num_attackers))
