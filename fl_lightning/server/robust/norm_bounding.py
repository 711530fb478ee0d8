"""Norm bounding: no update is longer than a bound.

    aggregate = Σ_i w_i x_i min(1, M / |x_i|) / Σ_i w_i

Source: Sun et al. 2019, Can You Really Backdoor Federated Learning? The paper's bound
is a number that one has to know; without one it is the median of the round's norms.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

import numpy as np

from fl_lightning.core.errors import ConfigurationError
from fl_lightning.server.robust.matrix import Floats, Rows
from fl_lightning.server.robust.passes import combined, row_norms
from fl_lightning.server.robust.rule import RobustRule, RuleContext


@final
@dataclass(frozen=True)
class NormBounding(RobustRule):
    """The mean of updates of bounded norm.

    Args:
        bound: M, > 0, the largest L2 norm of an update, ∞ for the plain mean; the median of the
            round's norms if None.
        weight_by_examples: weigh updates by their examples, which clients claim to have.

    Raises:
        ConfigurationError: if the bound is not positive.
    """

    bound: float | None = None
    weight_by_examples: bool = False

    def __post_init__(self) -> None:
        if self.bound is not None and not self.bound > 0:
            raise ConfigurationError(
                f"NormBounding: bound must be greater than 0, got {self.bound}"
            )

    def combine(self, rows: Rows, context: RuleContext) -> Floats:
        """Return the mean of the bounded updates."""
        norms = row_norms(rows)
        bound = float(np.median(norms)) if self.bound is None else self.bound
        if not bound:  # most updates are 0
            return np.zeros(rows.num_columns, rows.dtype)
        weights = rows.num_examples if self.weight_by_examples else np.ones(len(rows))
        factors = np.divide(bound, norms, out=np.ones_like(norms), where=norms > bound)
        return combined(rows, factors * weights / weights.sum())
