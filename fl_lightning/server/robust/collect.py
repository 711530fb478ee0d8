"""Aggregation by a rule that looks at all updates of a round together.

Robust rules are functions of the round's updates: `RobustRule`. `Collected` makes an aggregator of
one: it keeps the updates (see `UpdateRows`) and asks the rule when the round ends. Every update
counts alike unless the rule says otherwise: the number of examples is what a client claims.

Buffers (batch norm's statistics) travel with updates and can be poisoned like these. A rule that looks
at each coordinate by itself combines them as it does deltas. The others judge a whole update by its
direction or length, which buffers have no part in; with them buffers become the median of every
coordinate.
"""

from __future__ import annotations

from typing import final

import numpy as np
import torch
from torch import Tensor

from fl_lightning.core.errors import ConfigurationError, RoundFailure
from fl_lightning.core.traits import Trait, Traits
from fl_lightning.server.kept_updates import KeptUpdates
from fl_lightning.server.robust.matrix import UpdateRows
from fl_lightning.server.robust.passes import median_weights, sorted_sum
from fl_lightning.server.robust.rule import RobustRule, RuleContext


@final
class Collected(KeptUpdates):
    """The aggregator of a robust rule; `Federation` makes one where it is given a rule.

    Args:
        rule: what becomes of the updates.
        memory_gb: 2³⁰ bytes of updates that are kept in memory, ≥ 0; more go to a file.
        folder: of that file, the system's temporary folder if None. In several processes each
            keeps all updates of the round in the end.

    Raises:
        ConfigurationError: if the limit is negative.

    Example:
        >>> from fl_lightning.core.update import ClientUpdate
        >>> from fl_lightning.server.robust.median import Median
        >>> aggregator = Collected(Median())
        >>> aggregator.open(torch.empty(1))
        >>> for client, value in enumerate((1.0, 2.0, 1e9)):
        ...     aggregator.add(ClientUpdate(client, torch.tensor([value]), torch.empty(0), 1, 1))
        >>> aggregator.close()
        tensor([2.])
    """

    def __init__(self, rule: RobustRule, memory_gb: float = 1.0, folder: str | None = None) -> None:
        if not 0 <= memory_gb < float("inf"):
            raise ConfigurationError(
                f"Collected: memory_gb must be at least 0 and finite, got {memory_gb}"
            )
        self.rule, self.folder = rule, folder
        self._limit = int(memory_gb * 2**30)
        self._context = RuleContext()
        self._combined: Tensor | None = None

    @property
    def robust_rule(self) -> RobustRule:
        """The rule."""
        return self.rule

    @property
    def traits(self) -> Traits:
        """Rules compare whole updates."""
        whole = {Trait.ONE_MASK: "compares whole updates, which have the same coordinates"}
        ways = {Trait.ONE_MASK: "share one mask, or set aggregator to OverlapMean"}
        return super().traits | Traits(needs=whole, instead=ways)

    @property
    def buffers(self) -> Tensor | None:
        """What the buffers of the round that was closed became; None without buffers."""
        return self._combined

    @property
    def reader(self) -> str:
        """The rule."""
        return type(self.rule).__name__

    @property
    def memory(self) -> dict[str, Tensor]:
        """What the rule keeps from round to round."""
        return {name: torch.from_numpy(v) for name, v in self._context.memory.items()}

    @memory.setter
    def memory(self, values: dict[str, Tensor]) -> None:
        self._context.memory = {name: value.cpu().numpy() for name, value in values.items()}

    def start_round(self, round_index: int) -> None:
        """Learn which round comes next."""
        self._context.round_index = round_index

    def new_rows(self, like: Tensor) -> UpdateRows:
        """Return a place for updates within the memory that is given, and in that folder."""
        return UpdateRows(like, memory_limit=self._limit, folder=self.folder)

    def open(self, like: Tensor) -> None:
        """Start without updates."""
        self._like = like
        self._rows = self.new_rows(like)

    def close(self) -> Tensor:
        """Return the rule's word on the round.

        Raises:
            RoundFailure: if it needs more updates than there are.
        """
        check_count(self.rule, len(self._rows))
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


def check_count(rule: RobustRule, count: int) -> None:
    """Refuse a round with too few updates for the rule.

    Raises:
        RoundFailure: with the rule, what it needs and what there is.
    """
    if count < rule.min_updates:
        raise RoundFailure(
            f"{rule} needs at least {rule.min_updates} updates, this round has {count}: take a "
            "larger cohort, or set num_attackers lower"
        )
