"""Rules that look at all updates of a round together."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import ClassVar

from fl_lightning.core.errors import ConfigurationError
from fl_lightning.server.robust.matrix import Floats, Rows


@dataclass
class RuleContext:
    """What a rule knows besides the updates.

    Attributes:
        round_index: which round, for rules that draw.
        memory: vectors of shape (k,) by name, which the rule may change and finds again next round.
    """

    round_index: int = 0
    memory: dict[str, Floats] = field(default_factory=dict)


class RobustRule(ABC):
    """How the updates of a round become one, seen together.

    Attributes:
        by_coordinate: whether it does with every coordinate the same, whatever the others are.

    Example:
        >>> class Largest(RobustRule):
        ...     by_coordinate = True
        ...     def combine(self, rows, context):
        ...         return np.concatenate([block.max(0) for _, block in rows.blocks()])
    """

    by_coordinate: ClassVar[bool] = False

    @property
    def trusted_client(self) -> int | None:
        """The client by whose update it judges, so that it must be in every round; None if there is none."""
        return None

    @property
    def min_updates(self) -> int:
        """With fewer the rule means nothing, ≥ 1."""
        return 1

    @abstractmethod
    def combine(self, rows: Rows, context: RuleContext) -> Floats:
        """Return the aggregate, shape (k,)."""


def check_num_attackers(rule: object, num_attackers: int) -> None:
    """Refuse a negative number of attackers.

    Raises:
        ConfigurationError: naming the rule.
    """
    if num_attackers < 0:
        raise ConfigurationError(
            f"{type(rule).__name__}: num_attackers must be at least 0 clients, got {num_attackers}"
        )
