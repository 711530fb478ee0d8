"""Trials side by side: which one is next, its rounds, and those that are stopped early.

A trial belongs to the process that holds the lock in its folder. An unfinished trial whose lock is free is
resumed from its last checkpoint. Machines without a common disk cannot do that: there a trial that was not
heard of for long is given up, and another one takes its place.

Processes are forked from one that has imported everything and trained nothing, so that a trial begins
at once. They end with the command, however it ends, and by themselves when nobody hears them any more.
"""

from __future__ import annotations

import math
import multiprocessing
import os
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import optuna
from filelock import FileLock, Timeout
from optuna.trial import FrozenTrial, TrialState

from fl_lightning.experiments.experiment import PlannedRun
from fl_lightning.experiments.runs import Watch, is_finished, save_state
from fl_lightning.experiments.space import Search
from fl_lightning.experiments.study import ask, shown_values, told
from fl_lightning.experiments.sweep_plan import Plan
from fl_lightning.experiments.trial import Ended, Fit, train_run
from fl_lightning.reports.layout import in_lines
from fl_lightning.reports.screen import StatusLines

SECONDS_BETWEEN_SIGNS = 30.0
SECONDS_OF_SILENCE = 600.0  # clocks of machines may differ by minutes
DONE = (TrialState.COMPLETE, TrialState.PRUNED)


@dataclass
class Held:
    """A trial that this process runs.

    Attributes:
        trial: of Optuna's.
        lock: of its folder.
        began: when, by the monotonic clock.
        seconds_before: that it had run before it was taken up.
        is_taken_up: whether it was interrupted before.
        reported: rounds that the study knows of.
    """

    trial: optuna.Trial
    lock: FileLock
    began: float
    seconds_before: float = 0.0
    is_taken_up: bool = False
    reported: set[int] = field(default_factory=set)
    _signed: float = 0.0

    @property
    def number(self) -> int:
        """Of the trial, from 0."""
        return self.trial.number

    @property
    def seconds(self) -> float:
        """Since it began, without the time for which it was interrupted."""
        return round(self.seconds_before + time.monotonic() - self.began, 1)

    def give_sign(self) -> None:
        """Tell others that it goes on."""
        self._signed = time.monotonic()
        self.trial.set_user_attr("heard of", time.time())
        self.trial.set_user_attr("seconds", self.seconds)

    def give_sign_if_due(self) -> None:
        """Do so every half a minute: others may be many, and the storage far away."""
        if time.monotonic() - self._signed >= SECONDS_BETWEEN_SIGNS:
            self.give_sign()


class Trials:
    """The trials of a study.

    Args:
        study: of Optuna's.
        search: says how many there are in all; those that failed do not count.
        plan: of the search.
    """

    def __init__(self, study: optuna.Study, search: Search, plan: Plan) -> None:
        self.study, self.search, self.plan = study, search, plan
        self._held: set[int] = set()

    def next(self) -> Held | None:
        """Return a trial to run, at first one that was interrupted; None if there is none left."""
        held = next(self._interrupted(), None)
        while held is None and len(self.of(*DONE, TrialState.RUNNING)) < self.search.num_trials:
            held = self._ask()
        return held

    def of(self, *states: TrialState) -> list[FrozenTrial]:
        """Return the trials in one of some states."""
        return self.study.get_trials(deepcopy=False, states=states)

    def elsewhere(self) -> int:
        """Number of trials that run in other processes."""
        return sum(trial.number not in self._held for trial in self.of(TrialState.RUNNING))

    def end(
        self, held: Held, state: TrialState | None, value: float | None = None, **known: Any
    ) -> None:
        """Note how a trial has ended.

        Args:
            held: the trial.
            state: complete; stopped, for it was not good enough or could not train; failed, so that
                another one takes its place; None to leave it unfinished, to be taken up again.
            value: of a complete one.
            known: further facts to keep.
        """
        held.give_sign()
        for name, fact in known.items():
            held.trial.set_user_attr(name, fact)
        if state is not None:
            self.study.tell(held.trial, value, state)
        self._held.discard(held.number)
        held.lock.release()

    def _interrupted(self) -> Iterator[Held]:
        for known in self.of(TrialState.RUNNING):
            if known.number in self._held:
                continue
            if not self.plan.folder(known.number).exists():
                self._give_up_if_silent(known)
                continue
            lock = self._locked(known.number)
            if lock is None:
                continue
            if self.study.trials[known.number].state != TrialState.RUNNING:  # has just ended
                lock.release()
                continue
            trial = optuna.Trial(self.study, known._trial_id)
            before = float(known.user_attrs.get("seconds", 0.0))
            held = self._hold(trial, lock, before, is_taken_up=True)
            held.reported |= set(known.intermediate_values)
            yield held

    def _ask(self) -> Held | None:
        """Return a new trial; None if another process was faster."""
        trial = ask(self.study, self.search)
        self.plan.folder(trial.number).mkdir(parents=True, exist_ok=True)
        lock = self._locked(trial.number)
        if lock is None:
            return None  # it was taken up as an interrupted one
        held = self._hold(trial, lock, 0.0)
        earlier = [
            n for one in self.of(*DONE, TrialState.RUNNING) if (n := one.number) < trial.number
        ]
        if len(earlier) >= self.search.num_trials:
            self.end(held, TrialState.FAIL, reason="one too many: another process was faster")
            return None
        return held

    def _hold(
        self, trial: optuna.Trial, lock: FileLock, before: float, *, is_taken_up: bool = False
    ) -> Held:
        held = Held(trial, lock, time.monotonic(), before, is_taken_up)
        self._held.add(trial.number)
        held.give_sign()
        return held

    def _locked(self, number: int) -> FileLock | None:
        lock = FileLock(Path(self.plan.folder(number), "trial.lock"))
        try:
            lock.acquire(timeout=0)
        except Timeout:
            return None
        return lock

    def _give_up_if_silent(self, known: FrozenTrial) -> None:
        began = known.datetime_start.timestamp() if known.datetime_start else 0.0
        if time.time() - float(known.user_attrs.get("heard of", began)) > SECONDS_OF_SILENCE:
            trial = optuna.Trial(self.study, known._trial_id)
            trial.set_user_attr("reason", "its machine was not heard of any more")
            self.study.tell(trial, state=TrialState.FAIL)


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
    """Return how processes are started, and import in the background what they need."""
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
        fit: runs a fit's command line.
        context: how processes are started.
    """

    def __init__(self, trials: Trials, fit: Fit, context: Any) -> None:
        self._trials, self._fit, self._context = trials, fit, context
        self._search, self._plan = trials.search, trials.plan
        self._num_done = len(trials.of(*DONE))
        self._watch = Watch("trials", self._search.num_trials, self._num_done)
        self._screen = StatusLines(self._show)
        self._running: list[Running] = []
        self._failures = 0

    def run(self, count: int) -> None:
        """Run all trials that are left, so many at a time.

        Raises:
            TrialsFail: if several in a row fail, or the first one cannot work.
        """
        self._screen.open()
        try:
            while self._fill(count):
                ready = wait([one.connection for one in self._running], SECONDS_BETWEEN_SIGNS)
                for running in [one for one in self._running if one.connection in ready]:
                    self._hear(running)
                for running in self._running:
                    running.held.give_sign_if_due()
        finally:
            self._end_all()
            self._screen.close()

    def _show(self) -> None:
        running = [one.run for one in self._running]
        self._screen.show(self._watch.bars(self._num_done, running, self._screen.width))

    def _fill(self, count: int) -> bool:
        """Start trials; return whether any runs."""
        while len(self._running) < count:
            held = self._trials.next()
            if held is None:
                break
            if held.is_taken_up:
                print(f"trial {held.number}: taken up where it was interrupted", flush=True)
            self._running.append(Running(held, *self._started(held, 0)))
        self._num_done = len(self._trials.of(*DONE))
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
        if isinstance(message, Ended):
            running.connection.close()
            running.process.join()
            self._end(running, message)
        else:
            self._answer(running, message)

    def _answer(self, running: Running, values: dict[int, float]) -> None:
        trial = running.held.trial
        running.told = values
        number, value = running.rounds, values[max(values)]
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

    def _end(self, running: Running, ended: Ended) -> None:
        running.told = running.told or ended.values
        if ended.failure is None and running.stopped is None and not running.told:
            said = f"metric: the run has not logged {self._search.metric!r}"
            ended = Ended({}, said, "setting")
        if ended.failure is None and running.stopped is None:
            if not is_finished(running.run):
                seconds = round(time.monotonic() - running.began, 1)
                save_state(running.run, {"seconds": seconds, "values": running.told})
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
            self._trials.end(held, TrialState.PRUNED, rounds=rounds, reason=reason)
        else:
            values = running.values
            mean = sum(values) / len(values)
            self._trials.end(held, TrialState.COMPLETE, mean, rounds=rounds, values=values)
        study, done = self._trials.study, len(self._trials.of(*DONE))
        one = study.trials[held.number]
        is_best = reason is None and study.best_trial.number == held.number
        text = told(one, done, self._search.num_trials, reason, is_best=is_best)
        text = f"{text}: {shown_values(one.params, self._plan.names)}"
        print(in_lines(text, sys.stdout), flush=True)

    def _fail(self, running: Running, ended: Ended) -> None:
        held, reason = running.held, str(ended.failure)
        self._trials.end(held, TrialState.FAIL, reason=reason)
        self._failures += 1
        print(f"trial {held.number} failed: {reason}", flush=True)
        is_hopeless = ended.cause == "setting" and not self._trials.of(*DONE)
        if is_hopeless or self._failures >= _MOST_FAILURES:
            said = f"{reason} (logs: {self._plan.folder(held.number)})"
            if not is_hopeless:
                said = f"{self._failures} trials in a row failed, the last one so: {said}"
            raise TrialsFail(said)

    def _value(self, values: dict[int, float]) -> float:
        if self._search.value == "last":
            return values[max(values)]
        return (max if self._search.mode == "max" else min)(values.values())

    def _end_all(self) -> None:
        """End what still runs, after an interruption or an error; it can be taken up again."""
        for running in self._running:
            running.connection.close()  # nobody hears it: it ends after its round
        for running in self._running:
            running.process.join(_SECONDS_TO_END)
            if running.process.is_alive():
                running.process.kill()
                running.process.join()
            self._trials.end(running.held, None)
        self._running = []
