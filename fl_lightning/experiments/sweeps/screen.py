"""Terminal view of a search: a line a trial, and below them the progress of the running ones."""

from __future__ import annotations

import math
import shutil
import sys
import textwrap
import time
from collections.abc import Mapping, Sequence

import optuna
from optuna.trial import FrozenTrial, TrialState

from fl_lightning.experiments.sweeps.plan import Plan
from fl_lightning.experiments.sweeps.results import best_of, shown_values, wrapped
from fl_lightning.experiments.sweeps.study import is_maximised

_DONE = (TrialState.COMPLETE, TrialState.PRUNED)
_CLEAR = "\r\x1b[2K"


class Screen:
    """Prints lines to stdout and, at a terminal, a status that is no line.

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
        self._has_status = False
        self._began, self._done_before = time.monotonic(), self._num_done()
        self._is_terminal = sys.stderr.isatty() and sys.stdout.isatty()

    def line(self, text: str) -> None:
        """Print a line."""
        if self._has_status:
            print(_CLEAR, end="", file=sys.stderr, flush=True)
            self._has_status = False
        print(text, flush=True)

    def status(self, running: Sequence[tuple[int, int]]) -> None:
        """Show how far the running trials are, instead of what was shown before.

        Args:
            running: numbers of trials, and of their rounds so far.
        """
        if not self._is_terminal or not running:
            return
        total = self._plan.num_rounds
        of = f"/{total}" if total > 0 else ""
        done = self._num_done()
        parts = [f"{done}/{self._budget} done{self._left(done)}"]
        parts += [f"trial {number} round {rounds}{of}" for number, rounds in running]
        width = shutil.get_terminal_size().columns - 1
        text = textwrap.shorten(", ".join(parts), width, placeholder=" …")
        print(f"{_CLEAR}{text}", end="", file=sys.stderr, flush=True)
        self._has_status = bool(text)

    def ended(self, number: int, reason: str | None) -> None:
        """Print how a trial has ended."""
        trials = self._study.get_trials(deepcopy=False)
        done = self._num_done()
        best = best_of(trials, maximised=is_maximised(self._study))
        text = told(trials[number], best, done, self._budget, reason)
        values = shown_values(trials[number].params, self._names)
        width = shutil.get_terminal_size().columns if self._is_terminal else 10_000
        self.line(wrapped(f"{text}:", values, width, "    "))

    def _num_done(self) -> int:
        return len(self._study.get_trials(deepcopy=False, states=_DONE))

    def _left(self, done: int) -> str:
        """Return how long the others will take, if they take as long as those so far."""
        if done <= self._done_before:
            return ""
        seconds = (time.monotonic() - self._began) / (done - self._done_before)
        return f", {math.ceil(seconds * (self._budget - done) / 60)} min left"


def told(
    trial: FrozenTrial,
    best: FrozenTrial | None,
    done: int,
    budget: int,
    reason: str | None,
) -> str:
    """Return a trial's end in a line.

    Args:
        trial: that has ended.
        best: of all so far.
        done: how many trials have ended.
        budget: how many there are in all.
        reason: why it was stopped, None if it was not.
    """
    seconds = f"{float(trial.user_attrs.get('seconds', 0)):.0f} s"
    value = f"{trial.value:.4f}" if reason is None and trial.value is not None else reason
    mark = ", best so far" if best is not None and best.number == trial.number else ""
    return f"[{done}/{budget}] trial {trial.number}: {value}{mark}, {seconds}"
