"""The command ``fl-lightning sweep``: searches the best values of options; several commands may share a study."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import optuna
from jsonargparse import ArgumentParser
from jsonargparse.typing import PositiveInt
from optuna.trial import TrialState

from fl_lightning.core.errors import Interrupted
from fl_lightning.core.optuna_extra import quiet
from fl_lightning.experiments.experiment import Resolve
from fl_lightning.experiments.processes import Fit, prepare_processes
from fl_lightning.experiments.space import Search
from fl_lightning.experiments.study import (
    cells,
    draw_importance,
    draw_trials,
    importances,
    open_study,
    shown_values,
    trials_table,
    write_best,
)
from fl_lightning.experiments.sweep_plan import Plan, plan_search
from fl_lightning.experiments.workers import DONE, Trials, TrialsFail, Workers
from fl_lightning.reports.layout import in_lines, width_of
from fl_lightning.reports.screen import in_blocks, markdown

_MOST_ROWS = 10


def add_arguments(parser: ArgumentParser) -> None:
    """Add the options of ``fl-lightning sweep`` to its parser."""
    parser.add_argument(
        "-c",
        "--config",
        action="append",
        type=str,
        default=[],
        help="A configuration, as for fit; may be repeated.",
    )
    parser.add_argument(
        "-s", "--search", action="config", help="The search's YAML file: the options below."
    )
    parser.add_class_arguments(Search, None)
    parser.add_argument(
        "--workers", type=PositiveInt, default=2, help="Trials at a time here, one thread each."
    )
    parser.add_argument(
        "--out",
        type=str | None,
        default=None,
        help="Folder of runs and results; runs/sweep_<name> if null. The same command resumes "
        "unfinished trials there.",
    )
    parser.add_argument(
        "--storage",
        type=str | None,
        default=None,
        help="Storage of the study, for many machines: URL of a database, as "
        "postgresql://user@host/name, or path of a journal file on a shared disk; <out>/study.db if null.",
    )
    parser.add_argument(
        "--name",
        type=str | None,
        default=None,
        help="Name of the study in the storage; that of the search's or the configuration's file if null.",
    )


def sweep(given: Any, *, options: Sequence[str], resolve: Resolve, fit: Fit) -> None:
    """Run ``fl-lightning sweep``, with ``options`` added to every run; exit with code 1 if trials fail.

    Raises:
        ConfigurationError: before any trial starts, if an option or a configuration is refused.
        Interrupted: after Ctrl-C; the same command resumes the search.
    """
    search = Search(**{key: given[key] for key in Search.__dataclass_fields__})
    files = [str(path) for path in given.search or []] or given.config
    name = given.name or (Path(files[-1]).stem if files else "sweep")
    out = Path(given.out or Path("runs", f"sweep_{name}"))
    context = prepare_processes(fit)
    plan = plan_search(search, given.config, options, out=out.absolute(), resolve=resolve)
    with quiet(optuna):
        trials = Trials(open_study(search, plan, given.storage, name), search, plan)
        _introduce(search, plan, trials, out)
        failure = None
        try:
            Workers(trials, fit, context).run(given.workers)
        except TrialsFail as error:
            failure = str(error)
        except Interrupted as stop:
            print(flush=True)
            raise Interrupted(stop.signum, "the same command resumes") from stop
        _report(search, plan, trials, out)
    if failure is not None:
        sys.exit(in_lines(f"fl-lightning: {failure}", sys.stderr))


def _introduce(search: Search, plan: Plan, trials: Trials, out: Path) -> None:
    done, total = len(trials.of(*DONE)), search.num_trials
    rounds = f"{plan.num_rounds} rounds" if plan.num_rounds > 0 else "rounds without a limit"
    seeds = f", {len(plan.seeds)} seeds" if len(plan.seeds) > 1 else ""
    before = f", {done} done before" if done else ""
    pruner = "without pruning" if search.pruner == "none" else f"pruned by {search.pruner}"
    print(f"search: {total} trials of {rounds}{seeds}{before}: {search.sampler}, {pruner}")
    print(f"metric: {search.metric}, {search.mode}, of the {search.value} round")
    print(f"folder: {out}", flush=True)


def _report(search: Search, plan: Plan, trials: Trials, out: Path) -> None:
    """Write the tables and charts of the search, and print the best trials."""
    study, names = trials.study, plan.names
    table = trials_table(study, list(plan.parameters))
    table.to_csv(out / "trials.csv", index=False)
    told = table[table["state"] != "failed"]
    (out / "trials.md").write_text(markdown(*cells(told, search.metric, names)) + "\n")
    complete = trials.of(TrialState.COMPLETE)
    if not complete:
        print(f"\nno trial is complete, so there is no best one; {out}/trials.csv has the reasons")
        return
    best = study.best_trial
    draw_trials(out, study, search.metric)
    shares = importances(study)
    if shares:
        draw_importance(out / "importance", shares, names)
    by_importance = {path: names[path] for path in [*shares, *names]}
    files = ["trials.csv", "trials.md", "trials.png", "options.png"]
    files += ["importance.png"] if shares else []
    write_best(out / "best.yaml", best, plan, search.metric)
    rows = cells(told[:_MOST_ROWS], search.metric, by_importance)
    print(f"\n{in_blocks(*rows, width_of(sys.stdout))}\n")
    if elsewhere := trials.elsewhere():
        print(f"running:  {elsewhere} more in other processes")
    own = [one.value for one in complete if one.params == plan.as_configured]
    than = f"; as configured {own[0]:.4f}" if own else ""
    print(f"best:     {search.metric} {best.value:.4f}, trial {best.number}{than}")
    print(f"          {shown_values(best.params, names)}")
    print(f"results:  {out}/\n          {', '.join(files)}")
    print(f"next:     fl-lightning fit --config {out}/best.yaml")
