"""One run of a trial, in a process of its own, which tells every round and asks whether to go on."""

from __future__ import annotations

import os
import traceback
from collections.abc import Callable, Mapping
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from lightning.pytorch import Callback

from fl_lightning.core.errors import ClientFailure, ConfigurationError, Interrupted, RoundFailure
from fl_lightning.core.processes import end_with_parent, sole_writer
from fl_lightning.experiments.plan import PlannedRun
from fl_lightning.experiments.sweeps.report_rounds import ReportRounds
from fl_lightning.experiments.training import (
    is_finished,
    last_words,
    prepare,
    save_state,
    state_of,
)

# Runs a fit's command line with a callback of ours.
Fit = Callable[[list[str], Callback], None]
Cause = Literal["setting", "training", "crash"]


class Told(NamedTuple):
    """The metric so far, round to value; the answer is whether to go on."""

    values: dict[int, float]


class Ended(NamedTuple):
    """The end of a run.

    Attributes:
        values: of a run that had ended before: the metric, round to value.
        failure: what went wrong, None if nothing.
        cause: of that: a setting that cannot work, training that came to nothing, or another error.
    """

    values: dict[int, float]
    failure: str | None = None
    cause: Cause | None = None


def train_run(run: PlannedRun, metric: str, connection: Connection, fit: Fit, folder: str) -> None:
    """Train one run, unless that was done before; tell its end.

    Args:
        run: to train.
        metric: to tell.
        connection: to who has started this process.
        fit: runs a fit's command line.
        folder: in which the search was started.
    """
    end_with_parent()
    os.chdir(folder)
    _redirect(Path(os.devnull))
    torch.set_num_threads(1)  # as many runs at a time as there are cores
    # a process whose search was killed may still be about to end
    lock = run.folder.with_suffix(".lock")
    with sole_writer(lock, "end it"), suppress(BrokenPipeError, Interrupted):
        if is_finished(run):
            connection.send(Ended(_values(state_of(run)["values"])))
            return
        words = prepare(run)
        _redirect(run.folder / "log.txt")
        # of several processes the first one tells, which need not be this one
        report = ReportRounds(metric, lambda _, __: _goes_on(connection, Told(report.values)))
        connection.send(_ended(run, fit, words, report))


def _ended(run: PlannedRun, fit: Fit, words: list[str], report: ReportRounds) -> Ended:
    try:
        fit(words, report)
    except (ClientFailure, RoundFailure) as error:
        return Ended({}, str(error), "training")
    except ConfigurationError as error:
        return Ended({}, str(error), "setting")
    except SystemExit as end:  # the parser's
        if end.code:
            return Ended({}, last_words(run, 2), "setting")
    except Exception as error:  # noqa: BLE001 - told to who has started this process
        traceback.print_exc()
        said = str(error).splitlines() or [""]
        return Ended({}, f"{type(error).__name__}: {said[0]}", "crash")
    return Ended(report.values)


def finish(run: PlannedRun, values: Mapping[int, float], seconds: float) -> None:
    """Note that a run has ended well.

    Args:
        run: that has ended.
        values: of the metric, round to value.
        seconds: that it took.
    """
    if not is_finished(run):
        save_state(run, {"seconds": seconds, "values": dict(values)})


def _goes_on(connection: Connection, told: Told) -> bool:
    """Ask; nobody there means no: the run can be taken up again."""
    try:
        connection.send(told)
        return bool(connection.recv())
    except (EOFError, OSError):
        return False


def _values(kept: Any) -> dict[int, float]:
    return {int(number): float(value) for number, value in kept.items()}


def _redirect(path: Path) -> None:
    """Write all that is printed to a file."""
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(file, 1)
    os.dup2(file, 2)
    os.close(file)
