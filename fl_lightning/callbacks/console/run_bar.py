"""Lines of a bar: how far a run is, how long it will take, and what goes on within a round."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence

from fl_lightning.callbacks.console.round_line import number
from fl_lightning.core.console.bars import duration, filled

_WIDEST_BAR, _NARROWEST_BAR = 30, 8


class Pace:
    """How many rounds are done, and how long the others will take.

    Args:
        done: rounds at the start.
    """

    def __init__(self, done: int = 0) -> None:
        self.done = done
        self._started = self._began = time.monotonic()
        self._seconds: list[float] = []

    def begin(self) -> None:
        """Note that a round begins."""
        self._began = time.monotonic()

    def end(self) -> None:
        """Note that it has ended."""
        self.done += 1
        self._seconds.append(time.monotonic() - self._began)

    def words(self, total: int | None) -> str:
        """Return the time that is left, or, at the end or without an end, the time that it took.

        Args:
            total: rounds of the run, None if nobody knows.
        """
        if total is None or self.done >= total:
            return f"in {duration(time.monotonic() - self._started)}"
        # what is measured and compiled in the first round takes its time once
        known = self._seconds[1:][-10:] or self._seconds
        if not known:
            return ""
        return f"{duration((total - self.done) * sum(known) / len(known))} left"


class Inner:
    """What goes on within a round: clients, or batches, that are done.

    Args:
        what: is counted.
        total: how many there are; infinite if nobody knows.
    """

    def __init__(self, what: str, total: float) -> None:
        self.what, self.total, self.done = what, total, 0
        self._began = time.monotonic()

    @property
    def seconds(self) -> float:
        """Since it began."""
        return time.monotonic() - self._began

    def line(self, width: int) -> str:
        """Return a bar.

        Args:
            width: columns of the line.
        """
        is_known = 0 < self.total < float("inf")
        label = f"{self.what} {self.done}{f'/{self.total:.0f}' if is_known else ''}"
        share = self.done / self.total if is_known else None
        return run_line(label, share, duration(self.seconds), {}, width)


def run_line(
    label: str, share: float | None, clock: str, metrics: Mapping[str, float], width: int
) -> str:
    """Return a bar with metrics, of which as many are shown as there is room for, the first ones first.

    Args:
        label: what is counted, and how far.
        share: that is done, in [0, 1]; None for no bar.
        clock: time, left or taken.
        metrics: by name.
        width: columns of the line.

    Example:
        >>> metrics = {"val/accuracy": 0.861, "val/loss": 0.412}
        >>> run_line("round 12/50", 0.24, "1:03 left", metrics, 72)
        'round 12/50  ━━━─────────  1:03 left  val/accuracy 0.861  val/loss 0.412'
    """
    words = [label] if share is None else [label, ""]
    bar = 0 if share is None else _NARROWEST_BAR
    words += [clock] if clock else []
    parts = [f"{name} {number(value)}" for name, value in metrics.items()]
    if parts and _length([*words, parts[0]]) + bar > width and share is not None:
        words, bar, share = (
            [word for word in words if word],
            0,
            None,
        )  # a metric goes before the bar
    for part in parts:
        if _length([*words, part]) + bar > width:
            break
        words.append(part)
    if share is not None:
        bar = min(_WIDEST_BAR, width - _length(words))
        words[1] = filled(share, bar)
    return "  ".join(words)[:width]


def _length(words: Sequence[str]) -> int:
    return len("  ".join(words))
