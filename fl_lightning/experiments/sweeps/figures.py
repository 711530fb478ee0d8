"""Pictures of a search: which options matter, and what every trial gave.

Importance: the share of the variance of the values over the whole space that an option explains alone,
of a forest fitted to the trials (fANOVA), as shares of a sum of 1. Stopped trials are no better than the
worst complete one.
Source: Hutter et al. 2014, ICML; Optuna's implementation.
Differs: Optuna leaves stopped trials out, and with them the option that often matters most.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import optuna
from optuna.trial import FrozenTrial, TrialState

from fl_lightning.experiments.sweeps.parameters import Parameter, Range
from fl_lightning.experiments.sweeps.study import is_maximised

_FEWEST = 6  # trials that say anything about importance
_MOST_ACROSS = 3  # panels in a row


def importances(study: optuna.Study) -> dict[str, float]:
    """Return by path how much an option matters, the most important one first; none if unknown."""
    trials = study.get_trials(deepcopy=False)
    complete = [value for _, value in _points(trials, TrialState.COMPLETE)]
    stopped = sum(one.state == TrialState.PRUNED for one in trials)
    if len(complete) + stopped < _FEWEST or len(set(complete)) < 2:
        return {}
    worst = min if is_maximised(study) else max
    known = optuna.create_study(direction=study.direction)
    for one in trials:
        if one.state == TrialState.COMPLETE:
            _add(known, one, float(one.value or 0.0))
        elif one.state == TrialState.PRUNED:
            _add(known, one, worst([*complete, *([] if one.value is None else [one.value])]))
    try:
        found: dict[str, float] = optuna.importance.get_param_importances(
            known, evaluator=optuna.importance.FanovaImportanceEvaluator(seed=0)
        )
    except (RuntimeError, ValueError):  # e.g. an option that had one value only
        return {}
    return {option: float(share) for option, share in found.items()}


def _add(known: optuna.Study, trial: FrozenTrial, value: float) -> None:
    known.add_trial(
        optuna.trial.create_trial(
            value=value, params=trial.params, distributions=trial.distributions
        )
    )


def draw_importance(path: Path, shares: Mapping[str, float], names: Mapping[str, str]) -> None:
    """Write bars of importances, as PNG and SVG.

    Args:
        path: without a suffix.
        shares: of the options, by path.
        names: short ones of the options, by path.
    """
    from matplotlib.figure import Figure  # a second to import

    figure = Figure(figsize=(6.0, 1.0 + 0.45 * len(shares)), layout="constrained")
    axes = figure.subplots()
    bars = axes.barh([names[option] for option in shares], list(shares.values()), color="C0")
    axes.bar_label(bars, fmt="%.2f", padding=3)
    axes.invert_yaxis()
    axes.set(xlabel="importance, share of all", xlim=(0, 1.1 * max(shares.values(), default=1)))
    axes.spines[["top", "right"]].set_visible(False)
    _save(figure, path)


def draw_trials(
    path: Path,
    study: optuna.Study,
    metric: str,
    parameters: Mapping[str, Parameter],
    names: Mapping[str, str],
) -> None:
    """Write every trial's value, over time and over each option, as PNG and SVG.

    Args:
        path: without a suffix.
        study: with at least one complete trial.
        metric: what values are of.
        parameters: what was searched, by path.
        names: short ones of the options, by path.
    """
    from matplotlib.figure import Figure

    trials = study.get_trials(deepcopy=False)
    count = 1 + len(parameters)
    across = 2 if count == 4 else min(count, _MOST_ACROSS)
    down = -(-count // across)
    figure = Figure(figsize=(4.2 * across, 3.3 * down), layout="constrained")
    panels = figure.subplots(down, across, squeeze=False).flat
    first, *others = panels
    _draw_history(first, trials, is_maximised(study))
    first.set(xlabel="trial", ylabel=metric)
    first.xaxis.get_major_locator().set_params(integer=True)
    for panel, (option, parameter) in zip(others, parameters.items(), strict=False):
        _draw_option(panel, trials, option, parameter)
        panel.set(xlabel=names[option], ylabel=metric)
    for panel in others[len(parameters) :]:
        panel.set_axis_off()
    handles, labels = first.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=len(labels), frameon=False)
    _save(figure, path)


def _draw_history(panel: Any, trials: Sequence[FrozenTrial], maximised: bool) -> None:
    complete = _points(trials, TrialState.COMPLETE)
    stopped = _points(trials, TrialState.PRUNED)
    panel.scatter(*_columns([(one.number, value) for one, value in complete]), label="complete")
    panel.scatter(
        *_columns([(one.number, value) for one, value in stopped]), label="stopped", **_STOPPED
    )
    running = np.maximum.accumulate if maximised else np.minimum.accumulate
    if complete:
        numbers, values = _columns([(one.number, value) for one, value in complete])
        panel.step(numbers, running(values), where="post", color="C1", label="best so far")
    panel.grid(alpha=0.3)


_STOPPED = {"facecolors": "none", "edgecolors": "0.5"}


def _draw_option(
    panel: Any, trials: Sequence[FrozenTrial], option: str, parameter: Parameter
) -> None:
    is_range = isinstance(parameter, Range)
    keys = [] if is_range else [str(key) for key in parameter.grid(option)]
    for state, style in ((TrialState.PRUNED, _STOPPED), (TrialState.COMPLETE, {"color": "C0"})):
        points = [
            (one.params[option] if is_range else keys.index(str(one.params[option])), value)
            for one, value in _points(trials, state)
            if option in one.params
        ]
        panel.scatter(*_columns(points), **style)
    if isinstance(parameter, Range):
        panel.set_xscale("log" if parameter.log else "linear")
    else:
        panel.set_xticks(range(len(keys)), keys)
        panel.set_xlim(-0.5, len(keys) - 0.5)
    panel.grid(alpha=0.3)


def _points(trials: Sequence[FrozenTrial], state: TrialState) -> list[tuple[FrozenTrial, float]]:
    """Return trials with their values; a stopped one's is that of its last round."""
    return [(one, one.value) for one in trials if one.state == state and one.value is not None]


def _columns(points: Sequence[tuple[float, float]]) -> tuple[list[float], list[float]]:
    return [x for x, _ in points], [y for _, y in points]


def _save(figure: Any, path: Path) -> None:
    for suffix in (".png", ".svg"):
        figure.savefig(path.with_suffix(suffix), dpi=130)
