"""Worker processes of comparisons and searches, each of which trains one run.

Processes are forked from a server process that has imported all modules, so that a run starts at once. They share
nothing while they train, so that results do not depend on the number of workers or on the order of runs. A process
ends when the command ends, or when its connection to the command breaks.
"""

from __future__ import annotations

import multiprocessing
import os
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, Literal, NamedTuple, Self

import torch
from lightning.pytorch import Callback, LightningModule, Trainer

from fl_lightning.core.errors import ClientFailure, ConfigurationError, Interrupted, RoundFailure
from fl_lightning.core.processes import end_with_parent, sole_writer
from fl_lightning.experiments.experiment import PlannedRun
from fl_lightning.experiments.runs import Watch, is_finished, prepare, save_state, seconds_of
from fl_lightning.federation import begin_round, logged_in_round
from fl_lightning.reports.layout import in_lines
from fl_lightning.reports.screen import StatusLines


class ReportRounds(Callback):
    """Callback that reports a metric after every round, e.g. to a trial of Optuna, and may stop the fit.

    Args:
        metric: name of the metric, as the run logs it.
        tell: function of the round, counted from 1, and the value; returns whether to continue the fit.
            It is called in the process of rank 0, after every round in which the metric was logged.

    Attributes:
        values: round to value, including rounds before a resume.
        is_stopped: whether `tell` has stopped the fit.

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
        """Mark the start of a round, so that its metrics can be told from earlier ones."""
        begin_round(trainer)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Report the metric's value in this round, and stop the fit in all processes if `tell` returns False."""
        logged = logged_in_round(trainer)
        if self.metric not in logged:
            known = trainer.callback_metrics
            first = trainer.check_val_every_n_epoch or 1
            if self.metric in known or trainer.current_epoch + 1 < first:
                return  # it is not validated in every round
            raise ConfigurationError(
                f"metric: the runs do not log {self.metric!r} in every round. Set it to one of the metrics that "
                f"they log: {', '.join(sorted(known)) or 'none'}"
            )
        number, value = trainer.current_epoch + 1, float(logged[self.metric])
        self.values[number] = value
        goes_on = self.tell(number, value) if trainer.is_global_zero else True
        if not trainer.strategy.broadcast(goes_on):
            self.is_stopped = trainer.should_stop = True

    def state_dict(self) -> dict[str, Any]:
        """Return the values of the metric reported so far, by round."""
        return {"values": dict(self.values)}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Restore the values of the metric that earlier rounds reported."""
        self.values = dict(state_dict["values"])


# Function that runs the command line of a fit, with additional callbacks.
Fit = Callable[[list[str], Sequence[Callback]], None]
Cause = Literal["setting", "training", "crash"]


class Ended(NamedTuple):
    """Message from a worker process to the main process: the worker's run has ended.

    Attributes:
        failure: error message; None if the run has finished.
        cause: ``setting`` for a configuration error, ``training`` for a failed client or round, ``crash``
            for any other error; None if the run has finished.
    """

    failure: str | None = None
    cause: Cause | None = None


def _train(
    run: PlannedRun, metric: str | None, connection: Connection, fit: Fit, folder: str
) -> None:
    """Train one run in a worker process, unless it is finished; then send the main process an `Ended`.

    With a metric, its values by round are sent after every round, and the main process answers whether to continue.
    """
    end_with_parent()
    os.chdir(folder)
    _redirect(Path(os.devnull))
    torch.set_num_threads(1)  # as many runs at a time as there are cores
    # the process of a command that was killed may not have ended yet
    lock = run.folder.with_suffix(".lock")
    with sole_writer(lock, "end it"), suppress(BrokenPipeError, Interrupted):
        connection.send(Ended() if is_finished(run) else _trained(run, metric, connection, fit))


def _trained(run: PlannedRun, metric: str | None, connection: Connection, fit: Fit) -> Ended:
    began = time.monotonic()
    reports: list[ReportRounds] = []
    if metric is not None:
        # the first process of a run reports, which may be another process than this one
        reports = [ReportRounds(metric, lambda _, __: _goes_on(connection, reports[0].values))]
    try:
        words = prepare(run)
        _redirect(run.folder / "log.txt")
        fit(words, reports)
    except SystemExit as end:
        if end.code:
            return Ended(f"ended with code {end.code}", "setting")
    except Exception as error:  # noqa: BLE001 - sent to the command
        traceback.print_exc()
        return _failed(error)
    if (
        metric is None
    ):  # with a metric, the command saves the state: it knows whether the run was stopped
        save_state(run, {"seconds": round(time.monotonic() - began, 1)})
    return Ended()


def _failed(error: Exception) -> Ended:
    if isinstance(error, ClientFailure | RoundFailure):
        return Ended(str(error), "training")
    if isinstance(error, ConfigurationError):
        return Ended(str(error), "setting")
    return Ended(f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}", "crash")


def _goes_on(connection: Connection, values: dict[int, float]) -> bool:
    """Send the metric's values to the main process, and return whether it wants the run to continue; False if it has ended."""
    try:
        connection.send(values)
        return bool(connection.recv())
    except (EOFError, OSError):
        return False


def _redirect(path: Path) -> None:
    """Redirect this process's standard output and standard error to a file."""
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(file, 1)
    os.dup2(file, 2)
    os.close(file)


_SECONDS_TO_END = 6.0
# modules that every run needs, and that take seconds to import
_IMPORTED = (
    *("lightning.pytorch.cli", "torch.utils.tensorboard", "matplotlib.figure", "torchvision"),
    *("fl_lightning.federation.federation", "fl_lightning.models.image_classifier"),
)


def prepare_processes(fit: Fit) -> Any:
    """Return the multiprocessing context for worker processes, and let its fork server import slow modules."""
    if "forkserver" not in multiprocessing.get_all_start_methods():
        return multiprocessing.get_context("spawn")
    from multiprocessing import forkserver

    context = multiprocessing.get_context("forkserver")
    tied = "fl_lightning.experiments.ends_with_command"
    context.set_forkserver_preload([tied, fit.__module__, *_IMPORTED])
    forkserver.ensure_running()
    return context


@dataclass(frozen=True)
class Running:
    """A run in progress: its worker process, the connection to this process, and its start by the monotonic clock."""

    run: PlannedRun
    process: BaseProcess
    connection: Connection
    began: float = field(default_factory=time.monotonic)


class RunPool:
    """Starts a worker process for each run, receives their messages, and shows their progress.

    With a metric, workers send its values after every round, and then wait for an answer.
    """

    def __init__(self, context: Any, fit: Fit, watch: Watch, metric: str | None = None) -> None:
        self._context, self._fit, self._metric = context, fit, metric
        self.watch, self.running = watch, list[Running]()
        self._screen = StatusLines(self._show)

    def __enter__(self) -> Self:
        self._screen.open()
        return self

    def __exit__(self, *error: object) -> None:
        """End the remaining workers after an interruption or an error, so that their runs can be resumed."""
        for each in self.running:
            each.connection.close()  # which ends the worker after its round
        for each in self.running:
            each.process.join(_SECONDS_TO_END if self._metric else 0.0)
            if each.process.is_alive():
                each.process.kill()
                each.process.join()
        self._screen.close()

    def start(self, run: PlannedRun) -> None:
        """Start a new process that trains a run."""
        own, other = self._context.Pipe()
        arguments = (run, self._metric, other, self._fit, os.getcwd())
        process = self._context.Process(target=_train, args=arguments)
        process.start()
        other.close()  # else the end of the process would not close the connection
        self.running.append(Running(run, process, own))

    def messages(self, seconds: float | None = None) -> Iterator[tuple[Running, Any]]:
        """Wait at most ``seconds`` for messages of worker processes, and yield pairs of run and message.

        A message is a mapping from rounds to values of the metric, or `Ended`.
        """
        ready = wait([each.connection for each in self.running], seconds)
        for each in [each for each in self.running if each.connection in ready]:
            try:
                message = each.connection.recv()
            except (EOFError, OSError):
                each.process.join()
                message = Ended(f"its process ended with code {each.process.exitcode}", "crash")
            if isinstance(message, Ended):
                each.connection.close()
                each.process.join()
                self.running.remove(each)
            yield each, message

    def _show(self) -> None:
        running = [each.run for each in self.running]
        self._screen.show(self.watch.bars(running, self._screen.width))


def train_all(
    runs: Sequence[PlannedRun], context: Any, fit: Fit, *, workers: int
) -> dict[str, str]:
    """Train all runs that are not finished, print a line about each, and show progress bars.

    Args:
        runs: the runs; a run comes before the runs that start from its checkpoint.
        context: multiprocessing context of the workers.
        fit: function that runs the command line of a fit.
        workers: number of processes at a time, at least 1.

    Returns:
        Error message of each run that failed, by name. A failed run does not stop the others.
    """
    waiting = [run for run in runs if not is_finished(run)]
    total, failures = len(waiting), dict[str, str]()
    if total < len(runs):
        print(f"{len(runs) - total} of {len(runs)} runs were finished before", flush=True)
    with RunPool(context, fit, Watch("runs", total)) as processes:
        while waiting or processes.running:
            ready = [run for run in waiting if run.before is None or is_finished(run.before)]
            for run in ready[: workers - len(processes.running)]:
                waiting.remove(run)
                processes.start(run)
            if not processes.running:  # the run that the others start from has failed
                failures |= {run.name: "the run it starts from failed" for run in waiting}
                break
            for each, ended in processes.messages():
                processes.watch.done += 1
                said = ""
                if ended.failure is not None:
                    failures[each.run.name] = f"{ended.failure} ({each.run.folder / 'log.txt'})"
                    said = f"FAILED: {failures[each.run.name]}"
                said = said or f"{seconds_of(each.run):.0f} s"
                told = f"[{processes.watch.done}/{total}] {each.run.name}: {said}"
                print(in_lines(told, sys.stdout), flush=True)
    return failures
