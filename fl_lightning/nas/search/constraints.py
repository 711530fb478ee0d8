"""Constraints of a search, e.g. ``latency_ms<=8``: what a network may cost.

A constraint's excess is by how much a cost misses the bound, as a share of the bound: 0 if it is met.
Excesses of several constraints add up, whatever their units.
"""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from fl_lightning.core.errors import ConfigurationError

_PIECES = re.compile(r"\s*(?P<measure>[A-Za-z_]\w*)?\s*(?P<sign><=|>=)?\s*(?P<bound>\S+)?\s*")


@dataclass(frozen=True)
class Constraint:
    """A bound on one cost; `parse` reads one.

    Attributes:
        measure: the name of the cost.
        bound: in the cost's unit, above 0.
        is_upper: whether the cost may be at most the bound; else at least.

    Example:
        >>> constraint = Constraint.parse("flops <= 4e7", ["flops", "params"])
        >>> str(constraint), constraint.excess({"flops": 5e7})
        ('flops<=4e+07', 0.25)
    """

    measure: str
    bound: float
    is_upper: bool = True

    @classmethod
    def parse(cls, text: str, measures: Sequence[str]) -> Constraint:
        """Read a constraint.

        Args:
            text: cost, ``<=`` or ``>=``, bound.
            measures: the names of the costs that there are.

        Raises:
            ConfigurationError: with the place where the text stops making sense.
        """
        pieces = _PIECES.match(text)
        assert pieces is not None, "every piece may be missing"
        measure, sign, bound = pieces.groups()
        if measure not in measures:
            close = difflib.get_close_matches(measure or "", measures, n=1)
            advice = f"Did you mean {close[0]!r}?" if close else f"There are {', '.join(measures)}"
            if measure == "latency_ms":
                advice = "Give a latency file (--latency), which fl-lightning latency writes"
            _refuse(text, 0, "the name of a cost", advice)
        if sign is None:
            _refuse(text, pieces.end("measure"), "<= or >=", "e.g. " + f"{measure}<=1e6")
        value = _positive(bound)
        if value is None or pieces.end() < len(text):
            place = pieces.end("sign") if value is None else pieces.end()
            _refuse(text, place, "a number above 0" if value is None else "the end", "")
        assert value is not None
        return cls(measure, value, sign == "<=")

    def excess(self, costs: Mapping[str, float]) -> float:
        """Return by which share of the bound a network misses it; 0: it meets the constraint."""
        beyond = costs[self.measure] - self.bound
        return max(0.0, beyond if self.is_upper else -beyond) / self.bound

    def __str__(self) -> str:
        return f"{self.measure}{'<=' if self.is_upper else '>='}{self.bound:g}"


def shown(value: float) -> str:
    """Return a cost to read.

    Example:
        >>> shown(15647370), shown(3.14159)
        ('15,647,370', '3.14')
    """
    return f"{value:,.0f}" if float(value).is_integer() else f"{value:,.3g}"


def _positive(text: str | None) -> float | None:
    try:
        value = float(text or "")
    except ValueError:
        return None
    return value if 0 < value < math.inf else None


def _refuse(text: str, place: int, expected: str, advice: str) -> None:
    found = text[place:].strip()
    at = f"character {place + 1} is {found!r}" if found else "it ends too early"
    raise ConfigurationError(
        f"constraint {text!r}: {at}; expected {expected}{f'. {advice}' if advice else ''}"
    )
