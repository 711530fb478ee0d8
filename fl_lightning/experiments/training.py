"""One run in a process of its own: started, resumed or left alone if it is finished.

A run's folder has `run.yaml`, its whole configuration; `run.json`, its fingerprint and, once it is
finished, its seconds; `log.txt`, what it printed; Lightning's checkpoints and event files.

A run ends with the comparison that started it. It has inherited the lock of the comparison's folder, so
that the next one begins when it has ended.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

import yaml

from fl_lightning.core.processes import tied
from fl_lightning.experiments.experiment import FIRST
from fl_lightning.experiments.loggers import run_loggers
from fl_lightning.experiments.plan import PlannedRun


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
