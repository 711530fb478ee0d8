"""Folders of the runs of a comparison or a search, and progress bars of the runs.

A run's folder has `run.yaml`, the complete configuration; `run.json`, with the fingerprint and, after the end
of the run, its seconds; `log.txt`, the printed output; and Lightning's checkpoints and event files.
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
from fl_lightning.core.processes import write_whole
from fl_lightning.experiments.experiment import FIRST, PlannedRun, run_loggers
from fl_lightning.reports.layout import duration


def is_finished(run: PlannedRun) -> bool:
    """Return whether a run with this configuration and seed has finished without error."""
    state = state_of(run)
    return state.get("fingerprint") == run.fingerprint and "seconds" in state


def seconds_of(run: PlannedRun) -> float:
    """Return the wall-clock seconds of a finished run; for a resumed run, those since it was resumed."""
    return float(str(state_of(run)["seconds"]))


def checkpoint_of(run: PlannedRun) -> Path:
    """Return the path of a run's ``last.ckpt``, or else of its newest checkpoint.

    Raises:
        ConfigurationError: if the run has no checkpoint.
    """
    last = _last_checkpoint(run)
    if last.exists():
        return last
    every = sorted(last.parent.glob("*.ckpt"), key=lambda path: path.stat().st_mtime)
    if not every:
        raise ConfigurationError(
            f"the run {run.name!r} has written no checkpoint into {last.parent}, from which others start: set "
            "trainer.enable_checkpointing to true in first"
        )
    return every[-1]


def _last_checkpoint(run: PlannedRun) -> Path:
    return run.folder / "checkpoints" / "last.ckpt"


def prepare(run: PlannedRun) -> list[str]:
    """Write a run's files before its start, and return its command line, which resumes it if it was interrupted."""
    resumed = state_of(run).get("fingerprint") == run.fingerprint and _last_checkpoint(run).exists()
    if not resumed:
        shutil.rmtree(run.folder, ignore_errors=True)
    run.folder.mkdir(parents=True, exist_ok=True)
    first = "" if run.before is None else str(checkpoint_of(run.before).absolute())
    configuration = run.folder / "run.yaml"
    configuration.write_text(run.configuration.replace(FIRST, first))
    save_state(run, {})
    # one process for each run, unless the configuration sets the number of devices
    left_open = yaml.safe_load(run.configuration)["trainer"]["devices"] == "auto"
    return [
        *("--config", str(configuration)),
        *("--seed_everything", str(run.seed)),
        *("--trainer.logger", json.dumps(run_loggers(run))),
        *("--trainer.enable_progress_bar", "false"),
        *("--report", "false"),  # the command writes one report about all runs
        *(("--trainer.devices", "1") if left_open else ()),
        *(("--ckpt_path", str(_last_checkpoint(run))) if resumed else ()),
    ]


def state_of(run: PlannedRun) -> dict[str, object]:
    """Return the content of ``run.json``: a run's fingerprint and facts about its end; empty without the file."""
    try:
        state = json.loads((run.folder / "run.json").read_text())
    except (OSError, ValueError):  # never begun, or killed while the file was written
        return {}
    return state if isinstance(state, dict) else {}


def save_state(run: PlannedRun, more: dict[str, object]) -> None:
    """Write the fingerprint of a run and further facts into ``run.json``."""
    text = json.dumps({"fingerprint": run.fingerprint, **more})
    write_whole(run.folder / "run.json", text)


# a line of run.log: "… | INFO | round 3/50: val/accuracy 0.486, …"
_ROUND = re.compile(r"\| INFO \| (?:round|epoch) (\d+)/(\d+): ([^,\n]*)")
_LAST_BYTES = 4096
_BAR = 12


class Watch:
    """Progress bars of a command that trains many runs, with the estimated time left.

    Args:
        what: ``runs`` or ``trials``.
        total: number of runs or trials.
        done: number of them that had ended before the command started.
    """

    def __init__(self, what: str, total: int, done: int = 0) -> None:
        self._what, self._total, self._done_before, self.done = what, total, done, done
        self._began = time.monotonic()
        self._first: dict[str, tuple[int, float]] = {}

    def bars(self, running: Sequence[PlannedRun], width: int) -> Table:
        """Return one bar for all runs together, and one bar for each run in progress."""
        grid = Table.grid(*[Column(no_wrap=True) for _ in range(5)], padding=(0, 2))
        done, left = self.done, ""
        if done > self._done_before:
            seconds = (time.monotonic() - self._began) / (done - self._done_before)
            left = f"{duration(seconds * (self._total - done))} left"
        of = f"{done}/{self._total}"
        grid.add_row(self._what, Bar(self._total, done, width=_BAR), of, left)
        for run in running:
            seed = f", seed {run.seed}"  # a long name is cut, so that the seed stays visible
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
    """Return, from a run's log, its last round, its total number of rounds, and the text of a metric.

    None before the first round.
    """
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
