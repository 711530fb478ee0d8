"""Which trial is next: one that was interrupted, or a new one, as long as there are some left.

A trial belongs to the process that holds the lock in its folder. Who finds an unfinished trial whose
lock is free takes it up where its last checkpoint is. Machines without a common disk cannot do that:
there a trial that was not heard of for long is given up, and another one takes its place.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import optuna
from filelock import FileLock, Timeout
from optuna.trial import FrozenTrial, TrialState

from fl_lightning.experiments.sweeps.plan import Plan

SECONDS_BETWEEN_SIGNS = 30.0
SECONDS_OF_SILENCE = 600.0  # clocks of machines may differ by minutes
_COUNTED = (TrialState.COMPLETE, TrialState.PRUNED, TrialState.RUNNING)


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
        plan: of the search.
        budget: how many there are in all; those that failed do not count.
    """

    def __init__(self, study: optuna.Study, plan: Plan, budget: int) -> None:
        self.study, self.plan, self.budget = study, plan, budget
        self._held: set[int] = set()

    def next(self) -> Held | None:
        """Return a trial to run; None if there is none left."""
        for held in self._interrupted():
            return held
        while self.num_counted() < self.budget:
            asked = self._ask()
            if asked is not None:
                return asked
        return None

    def num_counted(self) -> int:
        """Return how many trials there are, running ones included."""
        return len(self.study.get_trials(deepcopy=False, states=_COUNTED))

    def finished(self) -> list[FrozenTrial]:
        """Return the trials that have ended well, or were stopped."""
        states = (TrialState.COMPLETE, TrialState.PRUNED)
        return self.study.get_trials(deepcopy=False, states=states)

    def completed(self) -> list[FrozenTrial]:
        """Return the trials that have a value."""
        return self.study.get_trials(deepcopy=False, states=(TrialState.COMPLETE,))

    def elsewhere(self) -> int:
        """Return how many trials run in other processes."""
        running = self.study.get_trials(deepcopy=False, states=(TrialState.RUNNING,))
        return sum(trial.number not in self._held for trial in running)

    def complete(self, held: Held, value: float, **known: Any) -> None:
        """Note a trial's value."""
        self._note(held, known)
        self.study.tell(held.trial, value)
        self._release(held)

    def stop(self, held: Held, **known: Any) -> None:
        """Note that a trial was stopped, for it was not good enough or could not train."""
        self._note(held, known)
        self.study.tell(held.trial, state=TrialState.PRUNED)
        self._release(held)

    def fail(self, held: Held, reason: str) -> None:
        """Note that a trial says nothing; another one takes its place."""
        self._note(held, {"reason": reason})
        self.study.tell(held.trial, state=TrialState.FAIL)
        self._release(held)

    def leave(self, held: Held) -> None:
        """Leave a trial unfinished, to be taken up again."""
        held.give_sign()
        self._release(held)

    def _note(self, held: Held, known: dict[str, Any]) -> None:
        held.give_sign()
        for name, value in known.items():
            held.trial.set_user_attr(name, value)

    def _release(self, held: Held) -> None:
        self._held.discard(held.number)
        held.lock.release()

    def _interrupted(self) -> Iterator[Held]:
        for known in self.study.get_trials(deepcopy=False, states=(TrialState.RUNNING,)):
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
        space = {path: one.distribution() for path, one in self.plan.parameters.items()}
        trial = self.study.ask(space)
        self.plan.folder(trial.number).mkdir(parents=True, exist_ok=True)
        lock = self._locked(trial.number)
        if lock is None:
            return None  # it was taken up as an interrupted one
        held = self._hold(trial, lock, 0.0)
        everything = self.study.get_trials(deepcopy=False, states=_COUNTED)
        if sum(one.number < trial.number for one in everything) >= self.budget:
            self.fail(held, "one too many: another process was faster")
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
