"""Results of a search: its table, trials.csv, trials.md and best.yaml."""

from __future__ import annotations

import csv
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from optuna.trial import FrozenTrial, TrialState

from fl_lightning.experiments.sweeps.plan import Plan, as_text
from fl_lightning.experiments.table import markdown

_STATES = {
    TrialState.COMPLETE: "complete",
    TrialState.PRUNED: "stopped",
    TrialState.FAIL: "failed",
    TrialState.RUNNING: "running",
    TrialState.WAITING: "waiting",
}


def best_of(trials: Sequence[FrozenTrial], *, maximised: bool) -> FrozenTrial | None:
    """Return the complete trial with the best value, of equal ones the earliest."""
    complete = [one for one in trials if one.state == TrialState.COMPLETE]
    return min(complete, key=lambda one: _rank(one, maximised), default=None)


def ranked(trials: Sequence[FrozenTrial], *, maximised: bool) -> list[FrozenTrial]:
    """Return complete trials, the best first; then stopped ones, those that came far first."""

    def order(trial: FrozenTrial) -> tuple[Any, ...]:
        if trial.state == TrialState.COMPLETE:
            return (0, *_rank(trial, maximised))
        place = 1 if trial.state == TrialState.PRUNED else 2
        return (place, -int(trial.user_attrs.get("rounds", 0)), trial.number)

    return sorted(trials, key=order)


def table(trials: Sequence[FrozenTrial], metric: str, names: Mapping[str, str]) -> str:
    """Return trials as Markdown.

    Args:
        trials: in the order of the rows.
        metric: what values are of.
        names: short ones of the options, by path: a column each.
    """
    head = ["trial", metric, "rounds", "seconds", *names.values()]
    rows = [
        [
            str(one.number),
            _value(one),
            str(one.user_attrs.get("rounds", "-")),
            f"{float(one.user_attrs.get('seconds', 0)):.0f}",
            *(shown(one.params.get(path)) for path in names),
        ]
        for one in trials
    ]
    return markdown(head, rows)


def fitting_table(
    trials: Sequence[FrozenTrial], metric: str, names: Mapping[str, str], width: int
) -> str:
    """Return the same with the columns of as many options as a terminal has room for.

    Args:
        trials: in the order of the rows.
        metric: what values are of.
        names: short ones of the options, by path, in the order in which they are wanted.
        width: of the terminal, in characters.
    """
    wanted = list(names)
    while wanted:
        found = table(trials, metric, {path: names[path] for path in wanted})
        if len(found.partition("\n")[0]) <= width:
            break
        wanted.pop()
    if len(wanted) == len(names):
        return found
    left_out = ", ".join(name for path, name in names.items() if path not in wanted)
    return f"{table(trials, metric, {p: names[p] for p in wanted})}\nnot shown: {left_out}"


def write_csv(path: Path, trials: Sequence[FrozenTrial], options: Sequence[str]) -> None:
    """Write a row a trial, with as many digits as there are.

    Args:
        path: of the file.
        trials: in the order of the rows.
        options: the paths that were searched.
    """
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(
            ["trial", "state", "value", "rounds", "seconds", "reason", *options, "values of seeds"]
        )
        for one in trials:
            known = one.user_attrs
            value = one.value if one.state == TrialState.COMPLETE else None
            writer.writerow(
                [
                    *(one.number, _STATES[one.state], "" if value is None else value),
                    *(known.get(name, "") for name in ("rounds", "seconds", "reason")),
                    *(one.params.get(option, "") for option in options),
                    " ".join(map(str, known.get("values", []))),
                ]
            )


def write_best(path: Path, best: FrozenTrial, plan: Plan, metric: str) -> None:
    """Write the configuration of the best trial, complete."""
    lines = [f"# {metric} {best.value:.6g}: trial {best.number} of a search over"]
    lines += [f"#   {option}: {best.params[option]}" for option in plan.parameters]
    lines += [f"# fl-lightning fit --config {path}", ""]
    path.write_text("\n".join(lines) + as_text(plan.with_keys(best.params)))


def shown_values(params: Mapping[str, Any], names: Mapping[str, str]) -> str:
    """Return values to read, by the short names of their options.

    Example:
        >>> shown_values({"model.optimizer.lr": 0.00312345}, {"model.optimizer.lr": "lr"})
        'lr 0.003123'
    """
    return ", ".join(f"{names[path]} {shown(value)}" for path, value in params.items())


def wrapped(text: str, values: str, width: int, indent: str) -> str:
    """Return a text and values after it, in lines that part no value from its option.

    Args:
        text: before the values.
        values: as `shown_values` returns them.
        width: of a line, in characters.
        indent: of the lines after the first.

    Example:
        >>> print(wrapped("trial 1:", "lr 0.1, steps 4", 16, "  "))
        trial 1: lr 0.1,
          steps 4
    """
    fixed = ", ".join(one.replace(" ", "\N{NO-BREAK SPACE}") for one in values.split(", "))
    lines = textwrap.wrap(
        f"{text}{fixed}" if not text.strip() else f"{text} {fixed}",
        width,
        subsequent_indent=indent,
        break_long_words=False,
        break_on_hyphens=False,
    )
    return "\n".join(lines).replace("\N{NO-BREAK SPACE}", " ")


def shown(value: Any) -> str:
    """Return a value to read."""
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _value(trial: FrozenTrial) -> str:
    if trial.state == TrialState.COMPLETE and trial.value is not None:
        return f"{trial.value:.4f}"
    return _STATES[trial.state]


def _rank(trial: FrozenTrial, maximised: bool) -> tuple[float, int]:
    assert trial.value is not None, "complete trials have one"
    return (-trial.value if maximised else trial.value, trial.number)
