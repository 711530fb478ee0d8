"""Runs trials side by side, hears of their rounds, and stops those that are not worth going on.

Processes are forked from one that has imported everything and trained nothing, so that a trial begins
at once. They end with the command, however it ends, and by themselves when nobody hears them any more.
"""

from __future__ import annotations

import math
import multiprocessing
import os
import time
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any

from fl_lightning.experiments.plan import PlannedRun
from fl_lightning.experiments.sweeps.plan import Plan
from fl_lightning.experiments.sweeps.screen import Screen
from fl_lightning.experiments.sweeps.search import Search
from fl_lightning.experiments.sweeps.trial_run import Ended, Fit, Told, finish, train_run
from fl_lightning.experiments.sweeps.trials import SECONDS_BETWEEN_SIGNS, Held, Trials

_MOST_FAILURES = 3
_SECONDS_TO_END = 6.0
# what every run needs, and takes seconds to import
_IMPORTED = (
    *("lightning.pytorch.cli", "torch.utils.tensorboard", "matplotlib.figure", "torchvision"),
    *("fl_lightning.federation.federation", "fl_lightning.models.image_classifier"),
)


class TrialsFail(RuntimeError):  # noqa: N818 - says what is wrong
    """Trials fail whatever their values are."""


@dataclass
class Running:
    """A trial in progress.

    Attributes:
        held: the trial.
        process: of its present run.
        run: the present one.
        connection: to that process.
        began: the present run, by the monotonic clock.
        values: of the runs that have ended.
        told: the metric of the present run, round to value.
        stopped: why it was stopped, None if it was not.
    """

    held: Held
    process: BaseProcess
    connection: Connection
    run: PlannedRun
    began: float = field(default_factory=time.monotonic)
    values: list[float] = field(default_factory=list)
    told: dict[int, float] = field(default_factory=dict)
    stopped: str | None = None

    @property
    def rounds(self) -> int:
        """How many rounds the present run has told of."""
        return max(self.told, default=0)

    @property
    def is_first_run(self) -> bool:
        """True for the run by which trials are stopped; the others only count in the mean."""
        return not self.values


def prepare_processes(fit: Fit) -> Any:
    """Return how processes are started, and import in the background what they need.

    Args:
        fit: that they run.
    """
    if "forkserver" not in multiprocessing.get_all_start_methods():
        return multiprocessing.get_context("spawn")
    from multiprocessing import forkserver

    context = multiprocessing.get_context("forkserver")
    tied = "fl_lightning.experiments.ends_with_sweep"
    context.set_forkserver_preload([tied, fit.__module__, *_IMPORTED])
    forkserver.ensure_running()
    return context


class Workers:
    """Processes that run trials.

    Args:
        trials: to run.
        search: says what a trial's value is.
        fit: runs a fit's command line.
        context: how processes are started.
        screen: what is told.
    """

    def __init__(
        self, trials: Trials, search: Search, fit: Fit, context: Any, screen: Screen
    ) -> None:
        self._trials, self._search, self._fit = trials, search, fit
        self._context, self._screen = context, screen
        self._running: list[Running] = []
        self._failures = 0

    def run(self, count: int) -> None:
        """Run all trials that are left, so many at a time.

        Raises:
            TrialsFail: if several in a row fail, or the first one cannot work.
        """
        try:
            while self._fill(count):
                ready = wait([one.connection for one in self._running], SECONDS_BETWEEN_SIGNS)
                for running in [one for one in self._running if one.connection in ready]:
                    self._hear(running)
                for running in self._running:
                    running.held.give_sign_if_due()
        finally:
            self._end_all()

    @property
    def _plan(self) -> Plan:
        return self._trials.plan

    def _fill(self, count: int) -> bool:
        """Start trials; return whether any runs."""
        while len(self._running) < count:
            held = self._trials.next()
            if held is None:
                break
            if held.is_taken_up:
                print(f"trial {held.number}: taken up where it was interrupted", flush=True)
            self._running.append(Running(held, *self._started(held, 0)))
        self._screen.status([(one.held.number, one.rounds) for one in self._running])
        return bool(self._running)

    def _started(self, held: Held, number: int) -> tuple[BaseProcess, Connection, PlannedRun]:
        run = self._plan.run(held.number, held.trial.params, self._plan.seeds[number])
        own, other = self._context.Pipe()
        arguments = (run, self._search.metric, other, self._fit, os.getcwd())
        process = self._context.Process(target=train_run, args=arguments)
        process.start()
        other.close()  # else its end would not be noticed
        return process, own, run

    def _hear(self, running: Running) -> None:
        try:
            message = running.connection.recv()
        except (EOFError, OSError):
            running.process.join()
            code = running.process.exitcode
            message = Ended({}, f"its process ended with code {code}", "crash")
        if isinstance(message, Told):
            self._answer(running, message)
        else:
            self._close(running)
            self._end(running, message)

    def _answer(self, running: Running, told: Told) -> None:
        trial = running.held.trial
        running.told = told.values
        number, value = running.rounds, told.values[max(told.values)]
        if not math.isfinite(value):
            running.stopped = f"{self._search.metric} is {value} in round {number}"
        elif running.is_first_run:
            if number not in running.held.reported:  # before it was interrupted
                trial.report(value, number)
                running.held.reported.add(number)
            if number != self._plan.num_rounds and trial.should_prune():
                running.stopped = f"stopped after round {number}"
        with suppress(OSError):  # it has died: that is heard next
            running.connection.send(running.stopped is None)
        self._screen.status([(one.held.number, one.rounds) for one in self._running])

    def _end(self, running: Running, ended: Ended) -> None:
        running.told = running.told or ended.values
        if ended.failure is None and running.stopped is None and not running.told:
            said = f"metric: the run has not logged {self._search.metric!r}"
            ended = Ended({}, said, "setting")
        if ended.failure is None and running.stopped is None:
            seconds = round(time.monotonic() - running.began, 1)
            finish(running.run, running.told, seconds)
            running.values.append(self._value(running.told))
            if len(running.values) < len(self._plan.seeds):
                started = self._started(running.held, len(running.values))
                running.process, running.connection, running.run = started
                running.began, running.told = time.monotonic(), {}
                return
        self._running.remove(running)
        self._note(running, ended)

    def _note(self, running: Running, ended: Ended) -> None:
        """Tell the study how a trial has ended."""
        held, rounds = running.held, running.rounds
        if ended.failure is not None and ended.cause != "training":
            self._fail(running, ended)
            return
        self._failures = 0
        reason = ended.failure or running.stopped
        if reason is not None:
            self._trials.stop(held, rounds=rounds, reason=reason)
        else:
            values = running.values
            self._trials.complete(held, sum(values) / len(values), rounds=rounds, values=values)
        self._screen.ended(held.number, reason)

    def _fail(self, running: Running, ended: Ended) -> None:
        held, reason = running.held, str(ended.failure)
        self._trials.fail(held, reason)
        self._failures += 1
        print(f"trial {held.number} failed: {reason}", flush=True)
        is_hopeless = ended.cause == "setting" and not self._trials.finished()
        if is_hopeless or self._failures >= _MOST_FAILURES:
            said = f"{reason} (logs: {self._plan.folder(held.number)})"
            if not is_hopeless:
                said = f"{self._failures} trials in a row failed, the last one so: {said}"
            raise TrialsFail(said)

    def _value(self, values: dict[int, float]) -> float:
        if self._search.value == "last":
            return values[max(values)]
        return (max if self._search.mode == "max" else min)(values.values())

    def _close(self, running: Running) -> None:
        running.connection.close()
        running.process.join()

    def _end_all(self) -> None:
        """End what still runs, after an interruption or an error; it can be taken up again."""
        for running in self._running:
            running.connection.close()  # nobody hears it: it ends after its round
        for running in self._running:
            running.process.join(_SECONDS_TO_END)
            if running.process.is_alive():
                running.process.kill()
                running.process.join()
            self._trials.leave(running.held)
        self._running = []
