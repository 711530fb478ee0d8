"""The table: of each workload, one row a column of results.

A row is printed as soon as it is known. One that could not be measured says why and no more.
"""

from __future__ import annotations

from dataclasses import dataclass
from statistics import median

HEADER = (
    f"{'':44}{'s/round':>9}{'of bare':>9}{'of best':>9}{'start-up s':>12}{'peak MB':>9}"
    f"{'difference':>12}"
)


@dataclass(frozen=True)
class Row:
    """What is known of one column.

    Attributes:
        column: its name.
        seconds: per round, the median.
        of_bare: ratio to the plain bare loop.
        of_best: ratio to the fastest variant of the bare loop.
        start_up: seconds that are paid once.
        peak_mb: peak resident memory.
        difference: of the aggregate from the bare loop's, relative to its largest entry.
        failure: why there is nothing, if there is not.
    """

    column: str
    seconds: float | None = None
    of_bare: float | None = None
    of_best: float | None = None
    start_up: float | None = None
    peak_mb: float | None = None
    difference: float | None = None
    failure: str | None = None

    def __str__(self) -> str:
        if self.failure is not None:
            return f"  {self.column:42} n/a: {self.failure}"
        cells = (
            _cell(self.seconds, 9, ".4g"),
            _cell(self.of_bare, 9, ".2f"),
            _cell(self.of_best, 9, ".2f"),
            _cell(self.start_up, 12, ".1f"),
            _cell(self.peak_mb, 9, ",.0f"),
            _cell(self.difference, 12, ".1e"),
        )
        return f"  {self.column:42}" + "".join(cells)


def _cell(value: float | None, width: int, form: str) -> str:
    return f"{'-' if value is None else format(value, form):>{width}}"


def ratio(seconds: list[float], others: list[float]) -> float:
    """Return the median over rounds of one's time to the other's, which took turns.

    Example:
        >>> ratio([2.0, 4.0, 9.0], [1.0, 2.0, 3.0])
        2.0
    """
    return median(a / b for a, b in zip(seconds, others, strict=True))
