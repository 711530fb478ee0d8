"""Runs of a comparison, each in a process of its own: started, resumed or left alone if finished.

A run's folder has `run.yaml`, its whole configuration; `run.json`, its fingerprint and, once it is
finished, its seconds; `log.txt`, what it printed; Lightning's checkpoints and event files.

As many run at a time as there are workers. They do not share anything while they train, so their results
do not depend on how many run side by side, nor on the order. A run ends with the comparison that started
it. It has inherited the lock of the comparison's folder, so that the next one begins when it has ended.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from pathlib import Path

import yaml
from rich.console import RenderableType
from rich.progress_bar import ProgressBar as Bar
from rich.table import Column, Table

from fl_lightning.core.processes import tied
from fl_lightning.experiments.experiment import FIRST, PlannedRun, run_loggers
from fl_lightning.reports.layout import duration, laid_out
from fl_lightning.reports.screen import StatusLines


class RunFailure(RuntimeError):  # noqa: N818
    """A run ended with an error; the message is its last line."""


def is_finished(run: PlannedRun) -> bool:
    """Return whether a run with this configuration has ended well."""
    state = state_of(run)
    return state.get("fingerprint") == run.fingerprint and "seconds" in state


def seconds_of(run: PlannedRun) -> float:
    """Return the wall seconds of a finished run's process, start-up included.

    Of a resumed run they are those since it was resumed.
    """
    return float(str(state_of(run)["seconds"]))


def train(run: PlannedRun, lock: int) -> None:
    """Train and test one run.

    Args:
        run: that is not finished.
        lock: of the folder of all runs, which its process inherits.

    Raises:
        RunFailure: if its process ends with an error.
    """
    words = prepare(run)
    began = time.monotonic()
    # one thread each: so many runs at a time as there are cores
    threads = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    with Path(run.folder, "log.txt").open("w") as log:
        done = subprocess.run(
            tied([sys.executable, "-m", "fl_lightning", "fit", *words]),
            check=False,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            env={**os.environ, **threads},
            pass_fds=[lock],
        )
    if done.returncode:
        raise RunFailure(last_words(run, done.returncode))
    save_state(run, {"seconds": round(time.monotonic() - began, 1)})


def checkpoint_of(run: PlannedRun) -> Path:
    """Return a run's last checkpoint: the one named so, or else the newest.

    Raises:
        RunFailure: if it has none.
    """
    last = _last_checkpoint(run)
    if last.exists():
        return last
    every = sorted(last.parent.glob("*.ckpt"), key=lambda path: path.stat().st_mtime)
    if not every:
        raise RunFailure(f"{run.name} has left no checkpoint in {last.parent}")
    return every[-1]


def _last_checkpoint(run: PlannedRun) -> Path:
    return run.folder / "checkpoints" / "last.ckpt"


def prepare(run: PlannedRun) -> list[str]:
    """Write what the run needs; return the words of its command line."""
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


def last_words(run: PlannedRun, code: int) -> str:
    """Return what a run that failed said last, or else the code it ended with."""
    lines = [line for line in (run.folder / "log.txt").read_text().splitlines() if line.strip()]
    said = lines[-1].strip().removeprefix("fl-lightning: ") if lines else f"ended with code {code}"
    said = re.sub(r"^(\w+\.)+(?=\w+: )", "", said)  # a class of errors without its modules
    return f"{said} ({run.folder / 'log.txt'})"


def state_of(run: PlannedRun) -> dict[str, object]:
    """Return what is kept of a run: its fingerprint, and more once it is finished."""
    try:
        state = json.loads((run.folder / "run.json").read_text())
    except (OSError, ValueError):  # never begun, or killed while it was written
        return {}
    return state if isinstance(state, dict) else {}


def save_state(run: PlannedRun, more: dict[str, object]) -> None:
    """Keep a run's fingerprint, and what else is known of it."""
    path = run.folder / "run.json"
    temporary = path.with_suffix(".part")
    temporary.write_text(json.dumps({"fingerprint": run.fingerprint, **more}))
    temporary.replace(path)


_SECONDS_BETWEEN_LOOKS = 0.5


def train_all(runs: Sequence[PlannedRun], lock: int, *, workers: int) -> dict[str, str]:
    """Train every run that is not finished, and say so in one line each; show how far they are.

    Args:
        runs: those that others start from come first.
        lock: of the folder of all runs.
        workers: processes at a time, at least 1.

    Returns:
        What went wrong, by the name of the run; the others have gone on.
    """
    missing = [run for run in runs if not is_finished(run)]
    if len(missing) < len(runs):
        print(f"{len(runs) - len(missing)} of {len(runs)} runs were finished before", flush=True)
    failures: dict[str, str] = {}
    watch, screen = Watch("runs", len(missing)), StatusLines()
    pool = ThreadPoolExecutor(workers)
    started: dict[str, Future[None]] = {}
    screen.open()
    try:
        for run in missing:
            before = started.get(run.before.name) if run.before else None
            started[run.name] = pool.submit(_train_after, before, run, lock)
        pending = {future: run for run, future in zip(missing, started.values(), strict=True)}
        while pending:
            running = [run for future, run in pending.items() if future.running()]
            screen.show(watch.bars(len(missing) - len(pending), running, screen.width))
            pause = _SECONDS_BETWEEN_LOOKS if screen.is_open else None
            for future in wait(pending, pause, FIRST_COMPLETED).done:
                run = pending.pop(future)
                if failure := future.exception():
                    if not isinstance(failure, RunFailure):
                        raise failure
                    failures[run.name] = str(failure)
                ended = f"FAILED: {failure}" if failure else f"{seconds_of(run):.0f} s"
                told = f"[{len(missing) - len(pending)}/{len(missing)}] {run.name}: {ended}"
                print(laid_out(told, screen.width) if screen.is_open else told, flush=True)
    finally:  # interrupted: what runs is interrupted as well, what has not begun never will
        pool.shutdown(cancel_futures=True)
        screen.close()
    return failures


def _train_after(before: Future[None] | None, run: PlannedRun, lock: int) -> None:
    # No deadlock: the run that is waited for came into the pool earlier, so it has a worker.
    if before is not None and before.exception() is not None:
        raise RunFailure(f"the run it starts from failed ({run.before and run.before.name})")
    train(run, lock)


# run.log, which every run writes: "… | INFO | round 3/50: val/accuracy 0.486, …"
_LOG = "run.log"
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
        self._what, self._total, self._done_before = what, total, done
        self._began = time.monotonic()
        self._first: dict[str, tuple[int, float]] = {}

    def bars(self, done: int, running: Sequence[PlannedRun], width: int) -> Table:
        """A line about all, with the time left if the others take as long, and one about each running run."""
        grid = Table.grid(*[Column(no_wrap=True) for _ in range(5)], padding=(0, 2))
        left = ""
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
