"""The command ``fl-lightning sweep``: plan, try, report. Many may run on one study."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import optuna
from optuna.trial import TrialState

from fl_lightning.core.errors import Interrupted
from fl_lightning.core.optuna_extra import quiet
from fl_lightning.experiments.plan import Resolve
from fl_lightning.experiments.space import Search
from fl_lightning.experiments.study import open_study
from fl_lightning.experiments.sweep_plan import Plan, plan_search, short_names
from fl_lightning.experiments.sweep_results import (
    Screen,
    cells,
    draw_importance,
    draw_trials,
    importances,
    ranked,
    shown_values,
    trials_table,
    write_best,
)
from fl_lightning.experiments.trial import Fit
from fl_lightning.experiments.workers import Trials, TrialsFail, Workers, prepare_processes
from fl_lightning.reports.layout import in_lines, width_of
from fl_lightning.reports.screen import in_blocks, markdown

_MOST_ROWS = 10


def sweep(
    search: Search,
    configs: Sequence[str],
    options: Sequence[str],
    *,
    out: Path,
    storage: str | None,
    name: str,
    workers: int,
    resolve: Resolve,
    fit: Fit,
) -> None:
    """Search; ends the process with code 1 if trials fail.

    Args:
        search: what is searched.
        configs: further files of the configuration.
        options: further words of every run's command line.
        out: folder of the runs and of what is found.
        storage: of the study; a file in that folder if None.
        name: of the study.
        workers: trials at a time, one thread each.
        resolve: from the words of a fit's command line to its complete configuration as YAML.
        fit: runs a fit's command line, in another process.

    Raises:
        ConfigurationError: if anything is refused, before any trial starts.
        Interrupted: by Ctrl-C; the same command goes on.
    """
    context = prepare_processes(fit)
    plan = plan_search(search, configs, options, out=out.absolute(), resolve=resolve)
    names = short_names(list(plan.parameters))
    with quiet(optuna):
        study = open_study(search, plan, storage, name)
        trials = Trials(study, plan, search.num_trials)
        screen = Screen(study, plan, search.num_trials, names)
        _introduce(search, plan, trials, out)
        failure = None
        try:
            with screen:
                Workers(trials, search, fit, context, screen).run(workers)
        except TrialsFail as error:
            failure = str(error)
        except Interrupted as stop:
            print(flush=True)
            raise Interrupted(stop.signum, "the same command goes on") from stop
        _report(search, plan, trials, out, names)
    if failure is not None:
        sys.exit(in_lines(f"fl-lightning: {failure}", sys.stderr))


def _introduce(search: Search, plan: Plan, trials: Trials, out: Path) -> None:
    done, total = len(trials.finished()), search.num_trials
    rounds = f"{plan.num_rounds} rounds" if plan.num_rounds > 0 else "rounds without a limit"
    seeds = f", {len(plan.seeds)} seeds" if len(plan.seeds) > 1 else ""
    before = f", {done} done before" if done else ""
    print(f"search: {total} trials of {rounds}{seeds}{before}: {search.sampler}, {_pruner(search)}")
    print(f"metric: {search.metric}, {search.mode}, of the {search.value} round")
    print(f"folder: {out}", flush=True)


def _pruner(search: Search) -> str:
    return (
        "none is stopped early" if search.pruner == "none" else f"stopped early by {search.pruner}"
    )


def _report(search: Search, plan: Plan, trials: Trials, out: Path, names: dict[str, str]) -> None:
    """Write what was found, and print the best of it."""
    study = trials.study
    trials_table(study, list(plan.parameters)).to_csv(out / "trials.csv", index=False)
    told = [one for one in ranked(study) if one.state != TrialState.FAIL]
    (out / "trials.md").write_text(markdown(*cells(told, search.metric, names)) + "\n")
    if not trials.completed():
        print(f"\nno trial was completed, so that none is the best: see {out}/trials.csv")
        return
    best = study.best_trial
    draw_trials(out / "trials", study, search.metric, plan.parameters, names)
    shares = importances(study)
    if shares:
        draw_importance(out / "importance", shares, names)
    by_importance = {path: names[path] for path in [*shares, *names]}
    files = ["trials.csv", "trials.md", "trials.png", *(["importance.png"] if shares else [])]
    write_best(out / "best.yaml", best, plan, search.metric)
    width = width_of(sys.stdout)
    rows = cells(told[:_MOST_ROWS], search.metric, by_importance)
    print(f"\n{in_blocks(*rows, width)}\n")
    if elsewhere := trials.elsewhere():
        print(f"running:  {elsewhere} more in other processes")
    print(f"best:     {search.metric} {best.value:.4f}, trial {best.number}{_than(plan, told)}")
    print(f"          {shown_values(best.params, names)}")
    print(f"results:  {out}/\n          {', '.join(files)}")
    print(f"next:     fl-lightning fit --config {out}/best.yaml")


def _than(plan: Plan, trials: Sequence[Any]) -> str:
    """Return what the configuration's own values gave, if they were tried."""
    own = next(
        (
            one
            for one in trials
            if one.state == TrialState.COMPLETE and one.params == plan.as_configured
        ),
        None,
    )
    return "" if own is None else f"; as configured {own.value:.4f}"
