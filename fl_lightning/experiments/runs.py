"""Runs of a comparison or a search: what is in their folders, and how far they are.

A run's folder has `run.yaml`, its whole configuration; `run.json`, its fingerprint and, once it is
finished, its seconds; `log.txt`, what it printed; Lightning's checkpoints and event files.
"""

from __future__ import annotations

import json
import re
import shutil
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import yaml
from rich.console import RenderableType
from rich.progress_bar import ProgressBar as Bar
from rich.table import Column, Table

from fl_lightning.core.errors import ConfigurationError
from fl_lightning.experiments.experiment import FIRST, PlannedRun, run_loggers
from fl_lightning.reports.layout import duration


def is_finished(run: PlannedRun) -> bool:
    """Return whether a run with this configuration has ended well."""
    state = state_of(run)
    return state.get("fingerprint") == run.fingerprint and "seconds" in state


def seconds_of(run: PlannedRun) -> float:
    """Return the wall seconds of a finished run; of a resumed one those since it was resumed."""
    return float(str(state_of(run)["seconds"]))


def checkpoint_of(run: PlannedRun) -> Path:
    """Return a run's last checkpoint: the one named so, or else the newest.

    Raises:
        ConfigurationError: if it has none.
    """
    last = _last_checkpoint(run)
    if last.exists():
        return last
    every = sorted(last.parent.glob("*.ckpt"), key=lambda path: path.stat().st_mtime)
    if not every:
        raise ConfigurationError(f"{run.name} has left no checkpoint in {last.parent}")
    return every[-1]


def _last_checkpoint(run: PlannedRun) -> Path:
    return run.folder / "checkpoints" / "last.ckpt"


def prepare(run: PlannedRun) -> list[str]:
    """Write a run's files; returns the words of its command line."""
    resumed = state_of(run).get("fingerprint") == run.fingerprint and _last_checkpoint(run).exists()
    if not resumed:
        shutil.rmtree(run.folder, ignore_errors=True)
    run.folder.mkdir(parents=True, exist_ok=True)
    first = "" if run.before is None else str(checkpoint_of(run.before).absolute())
    configuration = run.folder / "run.yaml"
    configuration.write_text(run.configuration.replace(FIRST, first))
    save_state(run, {})
    # one process a run, however many cores there are, unless the configuration says how many
    left_open = yaml.safe_load(run.configuration)["trainer"]["devices"] == "auto"
    return [
        *("--config", str(configuration)),
        *("--seed_everything", str(run.seed)),
        *("--trainer.logger", json.dumps(run_loggers(run))),
        *("--trainer.enable_progress_bar", "false"),
        *("--report", "false"),  # there is one of all runs
        *(("--trainer.devices", "1") if left_open else ()),
        *(("--ckpt_path", str(_last_checkpoint(run))) if resumed else ()),
    ]


def state_of(run: PlannedRun) -> dict[str, object]:
    """Stored state of a run: its fingerprint, and more once it is finished."""
    try:
        state = json.loads((run.folder / "run.json").read_text())
    except (OSError, ValueError):  # never begun, or killed while it was written
        return {}
    return state if isinstance(state, dict) else {}


def save_state(run: PlannedRun, more: dict[str, object]) -> None:
    """Store a run's fingerprint and further facts about it."""
    path = run.folder / "run.json"
    temporary = path.with_suffix(".part")
    temporary.write_text(json.dumps({"fingerprint": run.fingerprint, **more}))
    temporary.replace(path)


# run.log, which every run writes: "… | INFO | round 3/50: val/accuracy 0.486, …"
_ROUND = re.compile(r"\| INFO \| (?:round|epoch) (\d+)/(\d+): ([^,\n]*)")
_LAST_BYTES = 4096
_BAR = 12


class Watch:
    """Bars of a command that trains many runs.

    Args:
        what: is counted.
        total: how many there are.
        done: how many of them had ended before.
    """

    def __init__(self, what: str, total: int, done: int = 0) -> None:
        self._what, self._total, self._done_before, self.done = what, total, done, done
        self._began = time.monotonic()
        self._first: dict[str, tuple[int, float]] = {}

    def bars(self, running: Sequence[PlannedRun], width: int) -> Table:
        """A line about all, with the time left if the others take as long, and one about each running run."""
        grid = Table.grid(*[Column(no_wrap=True) for _ in range(5)], padding=(0, 2))
        done, left = self.done, ""
        if done > self._done_before:
            seconds = (time.monotonic() - self._began) / (done - self._done_before)
            left = f"{duration(seconds * (self._total - done))} left"
        of = f"{done}/{self._total}"
        grid.add_row(self._what, Bar(self._total, done, width=_BAR), of, left)
        for run in running:
            seed = (
                f", seed {run.seed}"  # of a long name only the beginning: the seed has to be seen
            )
            grid.add_row(
                f"{run.variant.name[: width // 3 - len(seed)]}{seed}", *self._progress(run)
            )
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


def last_round(run: PlannedRun) -> tuple[int, int, str] | None:
    """Return a run's last round, its planned rounds and its first metric; None if it has none."""
    try:
        with (run.folder / "run.log").open("rb") as file:
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
