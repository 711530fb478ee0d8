"""Progress of running fits, read from their log files: a bar a run, and one for all."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator, Sequence

from rich.console import RenderableType
from rich.progress_bar import ProgressBar as Bar
from rich.table import Column, Table

from fl_lightning.experiments.plan import PlannedRun
from fl_lightning.reports.layout import duration

# run.log, which every run writes: "… | INFO | round 3/50: val/accuracy 0.486, …"
_LOG = "run.log"
_ROUND = re.compile(r"\| INFO \| (?:round|epoch) (\d+)/(\d+): ([^,\n]*)")
_LAST_BYTES = 4096
_BAR = 12


class Watch:
    """Knows how far runs are.

    Args:
        num_runs: of the experiment that are still to be trained.
        workers: how many train at a time.
    """

    def __init__(self, num_runs: int, workers: int) -> None:
        self._num_runs, self._workers = num_runs, workers
        self._num_done = 0
        self._began = time.monotonic()
        self._first: dict[str, tuple[int, float]] = {}
        self._seconds: list[float] = []

    def end(self, seconds: float | None = None) -> None:
        """Count a run that has ended, in so many seconds if it ended well."""
        self._num_done += 1
        if seconds is not None:
            self._seconds.append(seconds)

    def bars(self, running: Sequence[PlannedRun], width: int) -> Table:
        """A line about all runs, and one about each that is running.

        Args:
            running: at present.
            width: columns of a line.
        """
        grid = Table.grid(*[Column(no_wrap=True) for _ in range(5)], padding=(0, 2))
        left = ""
        if self._seconds:
            mean = sum(self._seconds) / len(self._seconds)
            left = f"{duration(mean * (self._num_runs - self._num_done) / self._workers)} left"
        of = f"{self._num_done}/{self._num_runs}"
        grid.add_row("runs", Bar(self._num_runs, self._num_done, width=_BAR), of, left)
        for run in running:
            grid.add_row(_short(run, width // 3), *self._progress(run))
        return grid

    def _progress(self, run: PlannedRun) -> Iterator[RenderableType]:
        found = last_round(run)
        if found is None:
            yield "starting"
            return
        number, total, metric = found
        first, at = self._first.setdefault(run.name, (number, time.monotonic()))
        yield from (Bar(total, number, width=_BAR), f"{number}/{total}")
        seconds = (time.monotonic() - at) / max(1, number - first)
        yield f"{duration(seconds * (total - number))} left" if number > first else ""
        yield metric


def _short(run: PlannedRun, width: int) -> str:
    """Return a run's name, of a long variant's only the beginning: the seed has to be seen."""
    seed = f", seed {run.seed}"
    return f"{run.variant.name[: width - len(seed)]}{seed}"


def last_round(run: PlannedRun) -> tuple[int, int, str] | None:
    """Return a run's last round, how many there are to be, and its first metric; None if it has none."""
    try:
        with (run.folder / _LOG).open("rb") as file:
            file.seek(0, 2)
            file.seek(max(0, file.tell() - _LAST_BYTES))
            text = file.read().decode(errors="replace")
    except OSError:
        return None
    rounds = _ROUND.findall(text)
    if not rounds:
        return None
    number, total, metric = rounds[-1]
    return int(number), int(total), metric
