"""Base of robust rules, which need all updates of a round together."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import ClassVar

from fl_lightning.core.errors import check_range
from fl_lightning.server.robust.matrix import Floats, Rows


@dataclass
class RuleContext:
    """Inputs of a rule besides the updates.

    Attributes:
        round_index: number of the round, for rules that draw at random.
        memory: vectors of shape (k,) by name, which the rule may change; kept from round to round.
    """

    round_index: int = 0
    memory: dict[str, Floats] = field(default_factory=dict)


class RobustRule(ABC):
    """A rule that combines all updates of a round.

    Attributes:
        by_coordinate: whether it treats each coordinate by itself, and all of them alike.

    Example:
        >>> class Largest(RobustRule):
        ...     by_coordinate = True
        ...     def combine(self, rows, context):
        ...         return np.concatenate([block.max(0) for _, block in rows.blocks()])
    """

    by_coordinate: ClassVar[bool] = False

    @property
    def trusted_client(self) -> int | None:
        """Client whose update judges the others and must be in every round, or None."""
        return None

    @property
    def min_updates(self) -> int:
        """Smallest number of updates for which the rule is defined, ≥ 1."""
        return 1

    @abstractmethod
    def combine(self, rows: Rows, context: RuleContext) -> Floats:
        """Return the aggregate, shape (k,)."""


def check_num_attackers(rule: object, num_attackers: int) -> None:
    """Raise ConfigurationError, naming the rule, if the number of attackers is negative."""
    check_range(f"{type(rule).__name__}: num_attackers", num_attackers, "at least 0 clients")
