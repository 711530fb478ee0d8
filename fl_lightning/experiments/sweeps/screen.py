"""Terminal view of a search: a line a trial, and below them the progress of the running ones."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Self

import optuna
from optuna.trial import FrozenTrial, TrialState
from rich.text import Text

from fl_lightning.experiments.sweeps.plan import Plan
from fl_lightning.experiments.sweeps.results import shown_values
from fl_lightning.reports.layout import in_lines
from fl_lightning.reports.screen import StatusLines

_DONE = (TrialState.COMPLETE, TrialState.PRUNED)


class Screen:
    """Prints a line for each trial and, at a terminal, shows the running ones below.

    Args:
        study: whose trials are told of.
        plan: of the search.
        budget: trials in all.
        names: short ones of the options, by path.
    """

    def __init__(
        self, study: optuna.Study, plan: Plan, budget: int, names: Mapping[str, str]
    ) -> None:
        self._study, self._plan, self._budget, self._names = study, plan, budget, names
        self._began, self._done_before = time.monotonic(), self._num_done()
        self._lines = StatusLines()

    def __enter__(self) -> Self:
        self._lines.open()
        return self

    def __exit__(self, *error: object) -> None:
        self._lines.close()

    def status(self, running: Sequence[tuple[int, int]]) -> None:
        """Show how far the running trials are.

        Args:
            running: numbers of trials, and of their rounds so far.
        """
        total = self._plan.num_rounds
        of = f"/{total}" if total > 0 else ""
        done = self._num_done()
        parts = [f"{done}/{self._budget} done{self._left(done)}"]
        parts += [f"trial {number} round {rounds}{of}" for number, rounds in running]
        self._lines.show(Text(", ".join(parts)))

    def ended(self, number: int, reason: str | None) -> None:
        """Print how a trial has ended."""
        one = self._study.trials[number]
        is_best = reason is None and self._study.best_trial.number == number
        text = told(one, self._num_done(), self._budget, reason, is_best=is_best)
        text = f"{text}: {shown_values(one.params, self._names)}"
        print(in_lines(text, sys.stdout), flush=True)

    def _num_done(self) -> int:
        return len(self._study.get_trials(deepcopy=False, states=_DONE))

    def _left(self, done: int) -> str:
        """Return how long the others will take, if they take as long as those so far."""
        if done <= self._done_before:
            return ""
        seconds = (time.monotonic() - self._began) / (done - self._done_before)
        return f", {math.ceil(seconds * (self._budget - done) / 60)} min left"


def told(trial: FrozenTrial, done: int, budget: int, reason: str | None, *, is_best: bool) -> str:
    """Return a trial's end in a line.

    Args:
        trial: that has ended.
        done: how many trials have ended.
        budget: how many there are in all.
        reason: why it was stopped, None if it was not.
        is_best: whether it is the best one so far.
    """
    seconds = f"{float(trial.user_attrs.get('seconds', 0)):.0f} s"
    value = f"{trial.value:.4f}" if reason is None and trial.value is not None else reason
    mark = ", best so far" if is_best else ""
    return f"[{done}/{budget}] trial {trial.number}: {value}{mark}, {seconds}"
