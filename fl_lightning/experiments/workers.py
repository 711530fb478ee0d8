"""Trials of a search in worker processes: the choice of the next trial, early stopping, and resuming.

The process that holds the lock in a trial's folder runs the trial. An unfinished trial whose lock is free is
resumed from its last checkpoint. If its folder is on another machine, a trial without a sign of life for
10 minutes is marked as failed, and a new one takes its place.
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TextIO

import optuna
from optuna.trial import FrozenTrial, TrialState

from fl_lightning.core.processes import try_lock
from fl_lightning.experiments.processes import Ended, Fit, Running, RunPool
from fl_lightning.experiments.runs import Watch, save_state, state_of
from fl_lightning.experiments.space import Search
from fl_lightning.experiments.study import ask, shown_values, trial_line
from fl_lightning.experiments.sweep_plan import Plan
from fl_lightning.reports.layout import in_lines

SECONDS_BETWEEN_SIGNS = 30.0
SECONDS_OF_SILENCE = 600.0  # long, because the clocks of machines may differ by minutes
DONE = (TrialState.COMPLETE, TrialState.PRUNED)


@dataclass
class Held:
    """A trial that this command runs.

    Attributes:
        trial: Optuna's trial.
        lock: locked file in the trial's folder.
        began: start of the trial here, by the monotonic clock.
        seconds_before: seconds that the trial had run before it was resumed.
        is_resumed: whether the trial was interrupted before.
        reported: rounds whose values the study has.
        values: values of the runs that have ended, one for each seed.
        told: values of the metric in the current run, by round.
        stopped: reason why the trial was stopped; None if it was not.
    """

    trial: optuna.Trial
    lock: TextIO
    began: float
    seconds_before: float = 0.0
    is_resumed: bool = False
    reported: set[int] = field(default_factory=set)
    values: list[float] = field(default_factory=list)
    told: dict[int, float] = field(default_factory=dict)
    stopped: str | None = None
    _signed: float = 0.0

    @property
    def number(self) -> int:
        """Number of the trial, from 0."""
        return self.trial.number

    @property
    def rounds(self) -> int:
        """Number of rounds of the current run whose values are known."""
        return max(self.told, default=0)

    @property
    def seconds(self) -> float:
        """Seconds that the trial has run, without the time for which it was interrupted."""
        return round(self.seconds_before + time.monotonic() - self.began, 1)

    def give_sign(self) -> None:
        """Record in the study that the trial is still running."""
        self._signed = time.monotonic()
        self.trial.set_user_attr("heard of", time.time())
        self.trial.set_user_attr("seconds", self.seconds)

    def give_sign_if_due(self) -> None:
        """Call `give_sign` at most twice a minute, because the storage may be slow."""
        if time.monotonic() - self._signed >= SECONDS_BETWEEN_SIGNS:
            self.give_sign()


class Trials:
    """The trials of a study, which other commands may run as well."""

    def __init__(self, study: optuna.Study, search: Search, plan: Plan) -> None:
        self.study, self.search, self.plan = study, search, plan
        self._held: set[int] = set()

    def next(self) -> Held | None:
        """Return the next trial to run, interrupted ones first; None once there are enough."""
        held = next(self._interrupted(), None)
        while held is None and len(self.of(*DONE, TrialState.RUNNING)) < self.search.num_trials:
            held = self._ask()
        return held

    def of(self, *states: TrialState) -> list[FrozenTrial]:
        """Return the trials that are in one of the given states."""
        return self.study.get_trials(deepcopy=False, states=states)

    def elsewhere(self) -> int:
        """Return the number of trials that other commands run."""
        return sum(trial.number not in self._held for trial in self.of(TrialState.RUNNING))

    def end(
        self, held: Held, state: TrialState | None, value: float | None = None, **known: Any
    ) -> None:
        """Record the end of a trial, and release its lock.

        Args:
            held: the trial.
            state: complete; pruned, if it was stopped early or could not train; failed, so that another
                one takes its place; None to leave it unfinished, so that it can be resumed.
            value: value of a complete trial.
            known: further facts to record.
        """
        held.give_sign()
        for name, fact in known.items():
            held.trial.set_user_attr(name, fact)
        if state is not None:
            self.study.tell(held.trial, value, state)
        self._held.discard(held.number)
        held.lock.close()

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
                lock.close()
                continue
            trial = optuna.Trial(self.study, known._trial_id)
            before = float(known.user_attrs.get("seconds", 0.0))
            held = self._hold(trial, lock, before, is_resumed=True)
            held.reported |= set(known.intermediate_values)
            yield held

    def _ask(self) -> Held | None:
        """Return a new trial; None if another command has begun it, or has begun the last one."""
        trial = ask(self.study, self.search)
        self.plan.folder(trial.number).mkdir(parents=True, exist_ok=True)
        lock = self._locked(trial.number)
        if lock is None:
            return None  # another command has resumed it
        held = self._hold(trial, lock, 0.0)
        earlier = [
            n for one in self.of(*DONE, TrialState.RUNNING) if (n := one.number) < trial.number
        ]
        if len(earlier) >= self.search.num_trials:
            self.end(held, TrialState.FAIL, reason="one too many: another process was faster")
            return None
        return held

    def _hold(
        self, trial: optuna.Trial, lock: TextIO, before: float, *, is_resumed: bool = False
    ) -> Held:
        held = Held(trial, lock, time.monotonic(), before, is_resumed)
        self._held.add(trial.number)
        held.give_sign()
        return held

    def _locked(self, number: int) -> TextIO | None:
        """Return the locked file of a trial's folder; None if another command has locked it."""
        file = Path(self.plan.folder(number), "trial.lock").open("a+")  # noqa: SIM115 - it stays open
        if try_lock(file):
            return file
        file.close()
        return None

    def _give_up_if_silent(self, known: FrozenTrial) -> None:
        began = known.datetime_start.timestamp() if known.datetime_start else 0.0
        if time.time() - float(known.user_attrs.get("heard of", began)) > SECONDS_OF_SILENCE:
            trial = optuna.Trial(self.study, known._trial_id)
            trial.set_user_attr("reason", "its machine was not heard of any more")
            self.study.tell(trial, state=TrialState.FAIL)


_MOST_FAILURES = 3


class TrialsFail(RuntimeError):  # noqa: N818 - the name says what is wrong
    """Raised if trials fail for a reason that other values would not change."""


class Workers:
    """Trains trials in worker processes, and stops those that the pruner rejects."""

    def __init__(self, trials: Trials, fit: Fit, context: Any) -> None:
        self._trials, self._search, self._plan = trials, trials.search, trials.plan
        watch = Watch("trials", self._search.num_trials, len(trials.of(*DONE)))
        self._processes = RunPool(context, fit, watch, self._search.metric)
        self._running: dict[Path, Held] = {}  # by folder
        self._failures = 0

    def run(self, count: int) -> None:
        """Run the remaining trials, at most a given number at a time.

        Raises:
            TrialsFail: if three trials in a row fail, or the first one has a configuration error.
        """
        try:
            with self._processes as processes:
                while self._fill(count):
                    for running, message in processes.messages(SECONDS_BETWEEN_SIGNS):
                        held = self._running[running.run.folder.parent]
                        if isinstance(message, Ended):
                            self._end(held, running, message)
                        else:
                            self._answer(held, running, message)
                    for held in self._running.values():
                        held.give_sign_if_due()
        finally:  # after an interruption or an error, so that the trials can be resumed
            for held in self._running.values():
                self._trials.end(held, None)

    def _fill(self, count: int) -> bool:
        """Start trials until the given number runs; return whether any runs."""
        while len(self._running) < count:
            held = self._trials.next()
            if held is None:
                break
            if held.is_resumed:
                print(f"trial {held.number}: resumed where it was interrupted", flush=True)
            self._running[self._plan.folder(held.number)] = held
            self._start(held)
        self._processes.watch.done = len(self._trials.of(*DONE))
        return bool(self._running)

    def _start(self, held: Held) -> None:
        """Start the trial's run with the next seed."""
        held.told, seed = {}, self._plan.seeds[len(held.values)]
        self._processes.start(self._plan.run(held.number, held.trial.params, seed))

    def _answer(self, held: Held, running: Running, values: dict[int, float]) -> None:
        held.told = values
        value = values[held.rounds]
        if not math.isfinite(value):
            held.stopped = f"{self._search.metric} is {value} in round {held.rounds}"
        elif not held.values:  # only the run with the first seed can be stopped early
            if held.rounds not in held.reported:  # before it was interrupted
                held.trial.report(value, held.rounds)
                held.reported.add(held.rounds)
            if held.rounds != self._plan.num_rounds and held.trial.should_prune():
                held.stopped = f"stopped after round {held.rounds}"
        with suppress(OSError):  # the worker has died: the next message says so
            running.connection.send(held.stopped is None)

    def _end(self, held: Held, running: Running, ended: Ended) -> None:
        if ended.failure is None and held.stopped is None:
            if held.told:  # else the run was finished by an earlier command
                seconds = round(time.monotonic() - running.began, 1)
                save_state(running.run, {"seconds": seconds, "values": held.told})
            kept: Any = state_of(running.run).get("values", {})
            held.told = {int(number): value for number, value in kept.items()}
            if held.told:
                held.values.append(self._value(held.told))
            else:
                ended = Ended(f"metric: the run has not logged {self._search.metric!r}", "setting")
            if held.told and len(held.values) < len(self._plan.seeds):
                self._start(held)
                return
        del self._running[self._plan.folder(held.number)]
        if ended.failure is not None and ended.cause != "training":
            self._fail(held, ended)
        else:
            self._note(held, ended.failure or held.stopped)

    def _note(self, held: Held, reason: str | None) -> None:
        """Record the value of a complete trial, or the reason of a stopped one, and print a line."""
        self._failures = 0
        if reason is not None:
            self._trials.end(held, TrialState.PRUNED, rounds=held.rounds, reason=reason)
        else:
            mean = sum(held.values) / len(held.values)
            known = {"rounds": held.rounds, "values": held.values}
            self._trials.end(held, TrialState.COMPLETE, mean, **known)
        study, done = self._trials.study, len(self._trials.of(*DONE))
        one = study.trials[held.number]
        is_best = reason is None and study.best_trial.number == held.number
        text = trial_line(one, done, self._search.num_trials, reason, is_best=is_best)
        text = f"{text}: {shown_values(one.params, self._plan.names)}"
        print(in_lines(text, sys.stdout), flush=True)

    def _fail(self, held: Held, ended: Ended) -> None:
        reason = str(ended.failure)
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
