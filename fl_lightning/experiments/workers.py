"""Trials of a search in worker processes: which trial is next, early stopping, and resuming.

The command that has locked a file in a trial's folder runs the trial. An unfinished trial with an unlocked file is
resumed from its last checkpoint. A trial whose folder is on another machine is marked as failed after 10 minutes
without a sign of life, and a new trial replaces it.
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
class LockedTrial:
    """A trial that this command runs, with the locked file that keeps other commands away, and its values so far.

    Attributes:
        trial: Optuna's trial.
        lock: locked file in the trial's folder.
        began: start of the trial here, by the monotonic clock.
        seconds_before: seconds that the trial had run before it was resumed.
        is_resumed: whether the trial was interrupted before.
        reported: rounds whose values were reported to the study.
        values: values of the ended runs, one per seed.
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
        """Last round whose metric the trial's current run has reported; 0 before the first."""
        return max(self.told, default=0)

    @property
    def seconds(self) -> float:
        """Seconds that the trial has run, without the time during which it was interrupted."""
        return round(self.seconds_before + time.monotonic() - self.began, 1)

    def give_sign(self) -> None:
        """Record in the Optuna study that this trial is still running."""
        self._signed = time.monotonic()
        self.trial.set_user_attr("heard of", time.time())
        self.trial.set_user_attr("seconds", self.seconds)

    def give_sign_if_due(self) -> None:
        """Call `give_sign`, but at most twice a minute, because the storage may be slow."""
        if time.monotonic() - self._signed >= SECONDS_BETWEEN_SIGNS:
            self.give_sign()


class Trials:
    """The trials of an Optuna study, which several commands may work on at the same time."""

    def __init__(self, study: optuna.Study, search: Search, plan: Plan) -> None:
        self.study, self.search, self.plan = study, search, plan
        self._locked: set[int] = set()

    def next(self) -> LockedTrial | None:
        """Return the next trial to run: an interrupted trial, or else a new trial; None if there are enough trials."""
        locked = next(self._interrupted(), None)
        while locked is None and len(self.of(*DONE, TrialState.RUNNING)) < self.search.num_trials:
            locked = self._ask()
        return locked

    def of(self, *states: TrialState) -> list[FrozenTrial]:
        """Return the study's trials that are in one of the given states, e.g. complete."""
        return self.study.get_trials(deepcopy=False, states=states)

    def elsewhere(self) -> int:
        """Return the number of trials that other commands run."""
        return sum(trial.number not in self._locked for trial in self.of(TrialState.RUNNING))

    def end(
        self,
        locked: LockedTrial,
        state: TrialState | None,
        value: float | None = None,
        **known: Any,
    ) -> None:
        """Record the end of a trial, and release its lock.

        Args:
            locked: the trial.
            state: complete; pruned, if it was stopped early or could not train; failed, so that another
                trial replaces it; None to leave it unfinished, so that it can be resumed.
            value: value of a complete trial.
            known: further facts to record.
        """
        locked.give_sign()
        for name, fact in known.items():
            locked.trial.set_user_attr(name, fact)
        if state is not None:
            self.study.tell(locked.trial, value, state)
        self._locked.discard(locked.number)
        locked.lock.close()

    def _interrupted(self) -> Iterator[LockedTrial]:
        for known in self.of(TrialState.RUNNING):
            if known.number in self._locked:
                continue
            if not self.plan.folder(known.number).exists():
                self._give_up_if_silent(known)
                continue
            lock = self._lock(known.number)
            if lock is None:
                continue
            if self.study.trials[known.number].state != TrialState.RUNNING:  # has just ended
                lock.close()
                continue
            trial = optuna.Trial(self.study, known._trial_id)
            before = float(known.user_attrs.get("seconds", 0.0))
            locked = self._locked_trial(trial, lock, before, is_resumed=True)
            locked.reported |= set(known.intermediate_values)
            yield locked

    def _ask(self) -> LockedTrial | None:
        """Create and lock a new trial; None if another command was faster to lock it or to start the last trial."""
        trial = ask(self.study, self.search)
        self.plan.folder(trial.number).mkdir(parents=True, exist_ok=True)
        lock = self._lock(trial.number)
        if lock is None:
            return None  # another command has taken it for an interrupted trial
        locked = self._locked_trial(trial, lock, 0.0)
        earlier = [
            n for one in self.of(*DONE, TrialState.RUNNING) if (n := one.number) < trial.number
        ]
        if len(earlier) >= self.search.num_trials:
            self.end(
                locked,
                TrialState.FAIL,
                reason="superfluous: another command started the last trial",
            )
            return None
        return locked

    def _locked_trial(
        self, trial: optuna.Trial, lock: TextIO, before: float, *, is_resumed: bool = False
    ) -> LockedTrial:
        locked = LockedTrial(trial, lock, time.monotonic(), before, is_resumed)
        self._locked.add(trial.number)
        locked.give_sign()
        return locked

    def _lock(self, number: int) -> TextIO | None:
        """Lock the file in a trial's folder and return it; None if another command has locked it."""
        file = Path(self.plan.folder(number), "trial.lock").open("a+")  # noqa: SIM115 - it stays open
        if try_lock(file):
            return file
        file.close()
        return None

    def _give_up_if_silent(self, known: FrozenTrial) -> None:
        began = known.datetime_start.timestamp() if known.datetime_start else 0.0
        if time.time() - float(known.user_attrs.get("heard of", began)) > SECONDS_OF_SILENCE:
            trial = optuna.Trial(self.study, known._trial_id)
            trial.set_user_attr("reason", "no sign of life from its machine for 10 minutes")
            self.study.tell(trial, state=TrialState.FAIL)


_MOST_FAILURES = 3


class TrialsFail(RuntimeError):  # noqa: N818 - the name says what is wrong
    """Error that ends a search because its trials fail for a reason that other values would not change."""


class Workers:
    """Trains the trials of a search in worker processes, and stops those that the pruner rejects."""

    def __init__(self, trials: Trials, fit: Fit, context: Any) -> None:
        self._trials, self._search, self._plan = trials, trials.search, trials.plan
        watch = Watch("trials", self._search.num_trials, len(trials.of(*DONE)))
        self._processes = RunPool(context, fit, watch, self._search.metric)
        self._running: dict[Path, LockedTrial] = {}  # by folder
        self._failures = 0

    def run(self, count: int) -> None:
        """Run the search's remaining trials, at most ``count`` at a time.

        Raises:
            TrialsFail: if three trials in a row fail, or the first one has a configuration error.
        """
        try:
            with self._processes as processes:
                while self._fill(count):
                    for running, message in processes.messages(SECONDS_BETWEEN_SIGNS):
                        locked = self._running[running.run.folder.parent]
                        if isinstance(message, Ended):
                            self._end(locked, running, message)
                        else:
                            self._answer(locked, running, message)
                    for locked in self._running.values():
                        locked.give_sign_if_due()
        finally:  # after an interruption or an error, so that the trials can be resumed
            for locked in self._running.values():
                self._trials.end(locked, None)

    def _fill(self, count: int) -> bool:
        """Start trials until ``count`` trials are running; return whether any trial is running."""
        while len(self._running) < count:
            locked = self._trials.next()
            if locked is None:
                break
            if locked.is_resumed:
                print(f"trial {locked.number}: resumed where it was interrupted", flush=True)
            self._running[self._plan.folder(locked.number)] = locked
            self._start(locked)
        self._processes.watch.done = len(self._trials.of(*DONE))
        return bool(self._running)

    def _start(self, locked: LockedTrial) -> None:
        """Start the run of a trial with the next of the search's seeds."""
        locked.told, seed = {}, self._plan.seeds[len(locked.values)]
        self._processes.start(self._plan.run(locked.number, locked.trial.params, seed))

    def _answer(self, locked: LockedTrial, running: Running, values: dict[int, float]) -> None:
        locked.told = values
        value = values[locked.rounds]
        if not math.isfinite(value):
            locked.stopped = f"{self._search.metric} is {value} in round {locked.rounds}"
        elif not locked.values:  # only the run with the first seed can be stopped early
            if locked.rounds not in locked.reported:  # before it was interrupted
                locked.trial.report(value, locked.rounds)
                locked.reported.add(locked.rounds)
            if locked.rounds != self._plan.num_rounds and locked.trial.should_prune():
                locked.stopped = f"stopped after round {locked.rounds}"
        with suppress(OSError):  # the worker has died: the next message says so
            running.connection.send(locked.stopped is None)

    def _end(self, locked: LockedTrial, running: Running, ended: Ended) -> None:
        if ended.failure is None and locked.stopped is None:
            if locked.told:  # else the run was finished by an earlier command
                seconds = round(time.monotonic() - running.began, 1)
                save_state(running.run, {"seconds": seconds, "values": locked.told})
            kept: Any = state_of(running.run).get("values", {})
            locked.told = {int(number): value for number, value in kept.items()}
            if locked.told:
                locked.values.append(self._value(locked.told))
            else:
                ended = Ended(f"metric: the run has not logged {self._search.metric!r}", "setting")
            if locked.told and len(locked.values) < len(self._plan.seeds):
                self._start(locked)
                return
        del self._running[self._plan.folder(locked.number)]
        if ended.failure is not None and ended.cause != "training":
            self._fail(locked, ended)
        else:
            self._note(locked, ended.failure or locked.stopped)

    def _note(self, locked: LockedTrial, reason: str | None) -> None:
        """Record a complete trial's value, or why a trial was stopped; print a line about the trial."""
        self._failures = 0
        if reason is not None:
            self._trials.end(locked, TrialState.PRUNED, rounds=locked.rounds, reason=reason)
        else:
            mean = sum(locked.values) / len(locked.values)
            known = {"rounds": locked.rounds, "values": locked.values}
            self._trials.end(locked, TrialState.COMPLETE, mean, **known)
        study, done = self._trials.study, len(self._trials.of(*DONE))
        one = study.trials[locked.number]
        is_best = reason is None and study.best_trial.number == locked.number
        text = trial_line(one, done, self._search.num_trials, reason, is_best=is_best)
        text = f"{text}: {shown_values(one.params, self._plan.names)}"
        print(in_lines(text, sys.stdout), flush=True)

    def _fail(self, locked: LockedTrial, ended: Ended) -> None:
        reason = str(ended.failure)
        self._trials.end(locked, TrialState.FAIL, reason=reason)
        self._failures += 1
        print(f"trial {locked.number} failed: {reason}", flush=True)
        is_hopeless = ended.cause == "setting" and not self._trials.of(*DONE)
        if is_hopeless or self._failures >= _MOST_FAILURES:
            said = f"{reason} (logs: {self._plan.folder(locked.number)})"
            if not is_hopeless:
                said = f"{self._failures} trials in a row failed, the last because: {said}"
            raise TrialsFail(said)

    def _value(self, values: dict[int, float]) -> float:
        if self._search.value == "last":
            return values[max(values)]
        return (max if self._search.mode == "max" else min)(values.values())
