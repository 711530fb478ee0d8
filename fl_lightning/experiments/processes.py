"""One run of a trial, in a process of its own, which reports every round and asks whether to continue."""

from __future__ import annotations

import os
import traceback
from collections.abc import Callable, Mapping
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from lightning.pytorch import Callback, LightningModule, Trainer

from fl_lightning.core.errors import ClientFailure, ConfigurationError, Interrupted, RoundFailure
from fl_lightning.core.processes import end_with_parent, sole_writer
from fl_lightning.experiments.experiment import PlannedRun
from fl_lightning.experiments.runs import is_finished, last_words, prepare, state_of
from fl_lightning.federation import begin_round, logged_in_round


class ReportRounds(Callback):
    """Tells a metric after every round, e.g. to a search's trial.

    Args:
        metric: as the run logs it.
        tell: gets the round, counted from 1, and the value; returns whether the fit goes on. It is
            called in one process, after every round that has measured the metric.

    Attributes:
        values: round to value, of the rounds before a resume as well.
        is_stopped: whether the answer was to stop.

    Raises:
        ConfigurationError: after the first round, if the run does not log the metric.

    Example:
        With Optuna, inside of an objective::

            def tell(round_number: int, value: float) -> bool:
                trial.report(value, round_number)
                return not trial.should_prune()

            Trainer(callbacks=[federation, ReportRounds("val/accuracy", tell)])
    """

    def __init__(self, metric: str, tell: Callable[[int, float], bool]) -> None:
        super().__init__()
        self.metric, self.tell = metric, tell
        self.values: dict[int, float] = {}
        self.is_stopped = False

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Tell this round's metrics from older ones."""
        begin_round(trainer)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Tell the value; all processes follow the answer."""
        logged = logged_in_round(trainer)
        if self.metric not in logged:
            known = trainer.callback_metrics
            first = trainer.check_val_every_n_epoch or 1
            if self.metric in known or trainer.current_epoch + 1 < first:
                return  # it is not validated in every round
            raise ConfigurationError(
                f"metric: the runs do not log {self.metric!r} in every round. There is "
                f"{', '.join(sorted(known)) or 'nothing'}"
            )
        number, value = trainer.current_epoch + 1, float(logged[self.metric])
        self.values[number] = value
        goes_on = self.tell(number, value) if trainer.is_global_zero else True
        if not trainer.strategy.broadcast(goes_on):
            self.is_stopped = trainer.should_stop = True

    def state_dict(self) -> dict[str, Any]:
        """Return the values so far."""
        return {"values": dict(self.values)}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Restore what `state_dict` returned."""
        self.values = dict(state_dict["values"])


# Runs a fit's command line with a callback of ours.
Fit = Callable[[list[str], Callback], None]
Cause = Literal["setting", "training", "crash"]


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
    """Train one run, unless that was done before.

    After every round it sends the metric, round to value, and gets whether to go on; at last it sends
    its `Ended`.
    """
    end_with_parent()
    os.chdir(folder)
    _redirect(Path(os.devnull))
    torch.set_num_threads(1)  # as many runs at a time as there are cores
    # a process whose search was killed may still be about to end
    lock = run.folder.with_suffix(".lock")
    with sole_writer(lock, "end it"), suppress(BrokenPipeError, Interrupted):
        if is_finished(run):
            kept: Any = state_of(run)["values"]
            connection.send(Ended({int(number): float(value) for number, value in kept.items()}))
            return
        words = prepare(run)
        _redirect(run.folder / "log.txt")
        # of several processes the first one tells, which need not be this one
        report = ReportRounds(metric, lambda _, __: _goes_on(connection, report.values))
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


def _goes_on(connection: Connection, values: dict[int, float]) -> bool:
    """Ask; nobody there means no: the run can be taken up again."""
    try:
        connection.send(values)
        return bool(connection.recv())
    except (EOFError, OSError):
        return False


def _redirect(path: Path) -> None:
    """Write all that is printed to a file."""
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(file, 1)
    os.dup2(file, 2)
    os.close(file)
