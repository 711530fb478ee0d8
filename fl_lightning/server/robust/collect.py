"""`Collected`: the aggregator of a robust rule.

It keeps the updates (see `UpdateRows`) and applies the rule when the round ends. Updates have equal
weights unless the rule weighs them: the number of examples is only a client's claim.

Buffers (batch norm's statistics) can be poisoned like deltas. A rule that treats each coordinate by
itself combines them as it does deltas. Other rules judge a whole update by its direction or length,
which does not include buffers; with such a rule each buffer becomes its coordinate-wise median.
"""

from __future__ import annotations

from typing import final

import numpy as np
import torch
from torch import Tensor
from typing_extensions import override

from fl_lightning.core.errors import RoundFailure, check_range
from fl_lightning.core.traits import Trait, Traits
from fl_lightning.server.aggregator import KeptUpdates
from fl_lightning.server.robust.matrix import UpdateRows
from fl_lightning.server.robust.passes import median_weights, sorted_sum
from fl_lightning.server.robust.rule import RobustRule, RuleContext


@final
class Collected(KeptUpdates):
    """The aggregator of a robust rule; `Federation` creates it if it is given a rule.

    Args:
        rule: the robust rule.
        memory_gb: memory for updates in GiB (2³⁰ bytes), ≥ 0; the rest goes to a file. With several
            processes, each of them holds all updates of the round at its end.
        folder: folder of that file; the system's temporary folder if None.

    Raises:
        ConfigurationError: if the limit is negative.

    Example:
        >>> from fl_lightning.core.update import ClientUpdate
        >>> from fl_lightning.server.robust.rule import Median
        >>> aggregator = Collected(Median())
        >>> aggregator.open(torch.empty(1))
        >>> for client, value in enumerate((1.0, 2.0, 1e9)):
        ...     aggregator.add(ClientUpdate(client, torch.tensor([value]), torch.empty(0), 1, 1))
        >>> aggregator.close()
        tensor([2.])
    """

    def __init__(self, rule: RobustRule, memory_gb: float = 1.0, folder: str | None = None) -> None:
        check_range("Collected: memory_gb", memory_gb, "at least 0 and finite")
        self.rule, self.folder = rule, folder
        self._limit = int(memory_gb * 2**30)
        self._context = RuleContext()
        self._combined: Tensor | None = None

    @property
    @override
    def robust_rule(self) -> RobustRule:
        return self.rule

    @property
    @override
    def traits(self) -> Traits:
        whole = {Trait.ONE_MASK: "compares whole updates, which have the same coordinates"}
        ways = {Trait.ONE_MASK: "share one mask, or set aggregator to OverlapMean"}
        return super().traits | Traits(needs=whole, instead=ways)

    @property
    @override
    def buffers(self) -> Tensor | None:
        return self._combined

    @property
    @override
    def reader(self) -> str:
        return type(self.rule).__name__

    @property
    @override
    def memory(self) -> dict[str, Tensor]:
        return {name: torch.from_numpy(v) for name, v in self._context.memory.items()}

    @memory.setter
    def memory(self, values: dict[str, Tensor]) -> None:
        self._context.memory = {name: value.cpu().numpy() for name, value in values.items()}

    @override
    def start_round(self, round_index: int) -> None:
        self._context.round_index = round_index

    @override
    def new_rows(self, like: Tensor) -> UpdateRows:
        return UpdateRows(like, memory_limit=self._limit, folder=self.folder)

    @override
    def open(self, like: Tensor) -> None:
        self._like = like
        self._rows = self.new_rows(like)

    def close(self) -> Tensor:
        """Apply the rule to the updates and return the aggregate, shape (k,).

        Raises:
            RoundFailure: if the rule needs more updates than there are.
        """
        if (count := len(self._rows)) < self.rule.min_updates:
            raise RoundFailure(
                f"{self.rule} needs at least {self.rule.min_updates} updates, this round has {count}: use a "
                "larger cohort, or set num_attackers lower"
            )
        self._combined = self._combined_buffers(self._rows.buffer_rows())
        vector = self.rule.combine(self._rows, self._context)
        del self._rows  # and its file
        return torch.from_numpy(np.ascontiguousarray(vector)).to(self._like)

    def _combined_buffers(self, rows: UpdateRows) -> Tensor | None:
        if not rows.num_columns:
            return None
        if self.rule.by_coordinate:
            vector = self.rule.combine(rows, RuleContext(self._context.round_index))
        else:
            vector = sorted_sum(rows, median_weights(len(rows)))
        return torch.from_numpy(vector).to(self._like.device)
