"""The command ``fl-lightning compare``: plan, train, read, report."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml
from jsonargparse import ArgumentParser
from jsonargparse.typing import PositiveInt

from fl_lightning.core.errors import ConfigurationError
from fl_lightning.core.processes import sole_writer
from fl_lightning.experiments.experiment import BEFORE, Experiment
from fl_lightning.experiments.plan import PlannedRun, Resolve, plan_runs
from fl_lightning.experiments.report import REPORT, write_comparison, write_picture
from fl_lightning.experiments.results import (
    RunResult,
    curves_table,
    head_and_rows,
    matrix_table,
    read_result,
    results_cells,
    results_table,
    runs_table,
)
from fl_lightning.experiments.runs import is_finished, train_all
from fl_lightning.reports.layout import in_lines, is_terminal, width_of
from fl_lightning.reports.screen import in_blocks


def add_arguments(parser: ArgumentParser) -> None:
    """Give a parser the options of the command."""
    parser.add_argument("-c", "--config", action="config", help="The experiment's YAML file.")
    parser.add_class_arguments(Experiment, None)
    parser.add_argument(
        "--workers", type=PositiveInt, default=2, help="Runs at a time, one thread each."
    )
    parser.add_argument(
        "--only",
        nargs="+",
        metavar="VARIANT",
        help="Names of the variants to train; all if null. Those that are finished are reported.",
    )
    parser.add_argument(
        "--out",
        type=str | None,
        default=None,
        help="Folder of runs and results; runs/<name of the experiment's file> if null. What is "
        "finished there, with the same configuration, is not run again.",
    )


def compare(given: Any, *, options: Sequence[str], resolve: Resolve) -> None:
    """Run the command; ends the process with code 1 if a run failed.

    Args:
        given: the parsed options of the command.
        options: words of the command line that go to every run.
        resolve: from the words of a fit's command line to its complete configuration as YAML.

    Raises:
        ConfigurationError: if anything is refused, before any run starts.
    """
    experiment = Experiment(**{key: given[key] for key in Experiment.__dataclass_fields__})
    out = Path(
        given.out or Path("runs", Path(given.config[-1]).stem if given.config else "compare")
    )
    runs = plan_runs(experiment, out=out, options=options, resolve=resolve)
    wanted = _wanted(runs, given.only)
    with sole_writer(out / ".lock", "wait for its end, or give another --out") as lock:
        print(_planned(experiment, wanted, given.workers), flush=True)
        failures = train_all(wanted, lock, workers=given.workers)
        finished = [run for run in runs if run.variant.name != BEFORE and is_finished(run)]
        if finished:
            _report(experiment, [read_result(run, experiment) for run in finished], out)
    if failures:
        lines = (f"  {name}: {failure}" for name, failure in failures.items())
        told = "\n".join(in_lines(line, sys.stderr) for line in lines)
        sys.exit(f"fl-lightning: {len(failures)} of {len(wanted)} runs failed:\n{told}")


def _planned(experiment: Experiment, runs: Sequence[PlannedRun], workers: int) -> str:
    """Return what is to be trained, in a line.

    Example:
        >>> experiment = Experiment(variants={"a": None, "b": None}, seeds="0,1,2")
        >>> runs = [PlannedRun(v, seed, "trainer: {max_epochs: 50}", Path())
        ...         for v in experiment.all_variants for seed in experiment.all_seeds]
        >>> _planned(experiment, runs, workers=2)
        'planned: 6 runs of 50 rounds, 2 variants x 3 seeds, 2 at a time'
    """
    names = {run.variant.name for run in runs} - {BEFORE}
    rounds = {
        (yaml.safe_load(run.configuration).get("trainer") or {}).get("max_epochs") for run in runs
    }
    known = sorted(number for number in rounds if number)
    of = f" of {' or '.join(map(str, known))} rounds" if known else ""
    seeds = len(experiment.all_seeds)
    return (
        f"planned: {len(runs)} run{'s' * (len(runs) > 1)}{of}, {len(names)} variant"
        f"{'s' * (len(names) > 1)} x {seeds} seed{'s' * (seeds > 1)}, {workers} at a time"
    )


def _wanted(runs: Sequence[PlannedRun], names: Sequence[str] | None) -> list[PlannedRun]:
    """Return the runs of some variants, with those that they start from."""
    if names is None:
        return list(runs)
    known = list(dict.fromkeys(run.variant.name for run in runs if run.variant.name != BEFORE))
    if unknown := [name for name in names if name not in known]:
        raise ConfigurationError(
            f"--only: there is no variant {unknown[0]!r}; there are {', '.join(map(repr, known))}"
        )
    chosen = [run for run in runs if run.variant.name in names]
    before = {run.before.name for run in chosen if run.before is not None}
    return [run for run in runs if run in chosen or run.name in before]


def _report(experiment: Experiment, results: Sequence[RunResult], out: Path) -> None:
    """Write results as tables, as a picture and as a page; print the tables."""
    axes = experiment.axes
    text = results_table(results)
    if len(axes) == 2:
        text = "\n\n".join([text, *(matrix_table(results, m, axes) for m in experiment.report)])
    runs_table(results).to_csv(out / "results.csv", index=False)
    curves_table(results).to_csv(out / "curves.csv", index=False)
    (out / "results.md").write_text(text + "\n")
    write_picture(out / "results.png", results, experiment)
    write_comparison(out, experiment, results)
    shown = text
    if is_terminal(sys.stdout):  # the whole table is in the file
        shown = in_blocks(*head_and_rows(results_cells(results)), width_of(sys.stdout) - 1)
    files = "results.csv, curves.csv, results.md, results.tex, results.png"
    print(f"\n{shown}\n\nresults:    {out}/\n            {files}")
    print(f"report:     {out}/{REPORT}")
    print(f"look:       tensorboard --logdir {out}")
