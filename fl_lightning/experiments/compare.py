"""The command ``fl-lightning compare``: trains the variants of an experiment and reports tables and charts.

Curves and bars are means over seeds, bands and whiskers one standard deviation. Over another metric than rounds,
e.g. virtual time, the curves of seeds are not averaged, because each seed has other times.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from jsonargparse import ArgumentParser
from jsonargparse.typing import PositiveInt

from fl_lightning.core.errors import ConfigurationError
from fl_lightning.core.processes import sole_writer
from fl_lightning.experiments.experiment import BEFORE, Experiment, PlannedRun, Resolve, plan_runs
from fl_lightning.experiments.processes import Fit, prepare_processes, train_all
from fl_lightning.experiments.results import (
    RunResult,
    by_variant,
    curves_table,
    head_and_rows,
    latex,
    over_axes,
    read_result,
    results_cells,
    runs_table,
    spreads,
)
from fl_lightning.experiments.runs import is_finished
from fl_lightning.reports.charts import Panel, draw, series, write_figure
from fl_lightning.reports.layout import in_lines, is_terminal, width_of
from fl_lightning.reports.page import Page
from fl_lightning.reports.panels import Line, bars, curves, table_map
from fl_lightning.reports.screen import in_blocks, markdown


def add_arguments(parser: ArgumentParser) -> None:
    """Add the options of ``fl-lightning compare`` to its parser."""
    parser.add_argument("-c", "--config", action="config", help="The experiment's YAML file.")
    parser.add_class_arguments(Experiment, None)
    parser.add_argument(
        "--workers", type=PositiveInt, default=2, help="Runs at a time, one thread each."
    )
    parser.add_argument(
        "--only",
        nargs="+",
        metavar="VARIANT",
        help="Names of the variants to train; all if null. All finished variants are reported.",
    )
    parser.add_argument(
        "--out",
        type=str | None,
        default=None,
        help="Folder of runs and results; runs/<name of the experiment's file> if null. A run that is "
        "finished there, with the same configuration, is not repeated.",
    )


def compare(given: Any, *, options: Sequence[str], resolve: Resolve, fit: Fit) -> None:
    """Run ``fl-lightning compare``, with ``options`` added to every run; exit with code 1 if a run failed.

    Raises:
        ConfigurationError: before any run starts, if an option or a configuration is refused.
    """
    context = prepare_processes(fit)
    experiment = Experiment(**{key: given[key] for key in Experiment.__dataclass_fields__})
    out = Path(
        given.out or Path("runs", Path(given.config[-1]).stem if given.config else "compare")
    )
    runs = plan_runs(experiment, out=out, options=options, resolve=resolve)
    wanted = _wanted(runs, given.only)
    with sole_writer(out / ".lock", "wait for its end, or give another --out"):
        print(_planned(experiment, wanted, given.workers), flush=True)
        failures = train_all(wanted, context, fit, workers=given.workers)
        finished = [run for run in runs if run.variant.name != BEFORE and is_finished(run)]
        if finished:
            _report(experiment, [read_result(run, experiment) for run in finished], out)
    if failures:
        lines = (f"  {name}: {failure}" for name, failure in failures.items())
        told = "\n".join(in_lines(line, sys.stderr) for line in lines)
        sys.exit(f"fl-lightning: {len(failures)} of {len(wanted)} runs failed:\n{told}")


def _planned(experiment: Experiment, runs: Sequence[PlannedRun], workers: int) -> str:
    """Describe the planned runs in one line.

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
    """Return the runs of the variants in ``names``, and the runs from whose checkpoints these start."""
    if names is None:
        return list(runs)
    known = list(dict.fromkeys(run.variant.name for run in runs if run.variant.name != BEFORE))
    if unknown := [name for name in names if name not in known]:
        raise ConfigurationError(
            f"--only: there is no variant {unknown[0]!r}: the variants are {', '.join(map(repr, known))}"
        )
    chosen = [run for run in runs if run.variant.name in names]
    before = {run.before.name for run in chosen if run.before is not None}
    return [run for run in runs if run in chosen or run.name in before]


def _report(experiment: Experiment, results: Sequence[RunResult], out: Path) -> None:
    """Write the results as CSV files, tables, a figure and a page; print the tables."""
    values = results_cells(results)
    table = head_and_rows(values)
    text = markdown(*table)
    for metric in experiment.report if len(experiment.axes) == 2 else ():
        down, across = experiment.axes
        cells = over_axes(results, values[metric], experiment.axes).fillna("-")
        grid = markdown(*head_and_rows(cells, f"{down} \\ {across}"))
        text += f"\n\n{metric}: {down} by {across}\n\n{grid}"
    runs_table(results).to_csv(out / "results.csv", index=False)
    curves_table(results).to_csv(out / "curves.csv", index=False)
    (out / "results.md").write_text(text + "\n")
    write_figure(draw(comparison_panels(results, experiment))[0], out / "results")
    write_comparison(out, experiment, results)
    shown = text
    if is_terminal(sys.stdout):  # results.md has the whole table
        shown = in_blocks(*table, width_of(sys.stdout) - 1)
    files = "results.csv, curves.csv, results.md, results.tex, results.png"
    print(f"\n{shown}\n\nresults:    {out}/\n            {files}")
    print(f"report:     {out}/{REPORT}")
    print(f"look:       tensorboard --logdir {out}")


REPORT, FIGURES, LATEX = "report.html", "figures", "results.tex"


def write_comparison(out: Path, experiment: Experiment, results: Sequence[RunResult]) -> None:
    """Write an experiment's results: the page ``report.html``, its ``figures/``, and the table ``results.tex``."""
    (out / LATEX).write_text(
        latex(results, experiment.report, goals(experiment)) + "\n", encoding="utf-8"
    )
    groups = by_variant(results)
    seeds = len({result.seed for result in results})
    page = Page(out.name, f"{len(groups)} variants, {seeds} seeds, {len(results)} runs · {out}")
    page.heading("Results")
    page.text("Mean ± standard deviation over seeds; bytes are totals over rounds and clients.")
    values = results_cells(results)
    page.table(*head_and_rows(values))
    if len(experiment.axes) == 2:
        for metric in experiment.report:
            page.text(metric)
            cells = over_axes(results, values[metric], experiment.axes).fillna("-")
            page.table(*head_and_rows(cells, " \\ ".join(experiment.axes)))
    page.heading("Figures")
    page.text(caption(results, experiment))
    page.charts(comparison_panels(results, experiment), out / FIGURES)
    page.heading("Runs")
    runs = runs_table(results).set_index("variant").map(_cell)
    page.table(*head_and_rows(runs), fold=f"All {len(results)} runs")
    for variant in experiment.all_variants:
        if variant.name in groups:
            plain = json.loads(json.dumps(variant.difference, default=str))  # without YAML's tags
            text = "".join(map(yaml.safe_dump, plain))
            page.verbatim(text, f"{variant.name}: difference to the common configuration")
    page.write(out / REPORT)


def goals(experiment: Experiment) -> dict[str, str]:
    """Return ``max`` or ``min`` for each reported metric for which it is known whether high or low values are good.

    Example:
        >>> goals(Experiment(variants={"a": {}}, report=["test/accuracy", "test/loss", "round/seconds"]))
        {'test/accuracy': 'max', 'test/loss': 'min'}
    """
    known = {"accuracy": "max", "loss": "min"}
    found = {
        name: goal for name in experiment.report for word, goal in known.items() if word in name
    }
    if experiment.monitor in experiment.report:
        found[experiment.monitor] = experiment.mode
    return found


def _cell(value: Any) -> str:
    if isinstance(value, float):
        return "" if math.isnan(value) else f"{value:.6g}"
    return str(value)


def comparison_panels(results: Sequence[RunResult], experiment: Experiment) -> dict[str, Panel]:
    """Return the panels of the figure by title: metrics over rounds, then each reported metric's final value."""
    metrics = (experiment.monitor, *experiment.report)
    logged = [m for m in metrics if min(len(r.curves.get(m, ())) for r in results) > 0]
    logged = [m for m in logged if max(len(r.curves[m]) for r in results) > 1]
    shown = list(dict.fromkeys(logged))[: 1 if len(experiment.axes) == 2 else None]
    panels = {metric: _curves(metric, results, experiment.over) for metric in shown}
    for metric in experiment.report:
        is_matrix = len(experiment.axes) == 2
        last = _matrix(metric, results, experiment) if is_matrix else _bars(metric, results)
        panels[f"{metric}, at the end"] = last
    return panels


def caption(results: Sequence[RunResult], experiment: Experiment) -> str:
    """Return the caption of the figures, which explains their curves, bands and whiskers."""
    seeds = len({result.seed for result in results})
    if experiment.over is not None:
        return "Bars are means over seeds. Each seed has its own curve, because its times differ."
    band = (
        f" Bands and whiskers are one standard deviation over {seeds} seeds." if seeds > 1 else ""
    )
    return f"Means over seeds.{band}"


def _curves(metric: str, results: Sequence[RunResult], over: str | None) -> Panel:
    lines: list[Line] = []
    for number, (name, group) in enumerate(by_variant(results).items()):
        colour = series(number)
        if group[0].clock is not None:
            for place, result in enumerate(group):
                curve, clock = result.curves[metric], result.clock or {}
                rounds = sorted(curve.keys() & clock.keys())
                times, values = [clock[n] for n in rounds], [curve[n] for n in rounds]
                lines.append(Line(times, values, "" if place else name, colour=colour))
            continue
        every = [result.curves[metric] for result in group]
        rounds = sorted(set.intersection(*(set(curve) for curve in every)))
        table = np.array([[curve[one] for one in rounds] for curve in every])
        spread = table.std(axis=0, ddof=1).tolist() if len(group) > 1 else None
        lines.append(Line(rounds, table.mean(axis=0).tolist(), name, spread, colour))
    return curves(lines, x=over or "round")


def _bars(metric: str, results: Sequence[RunResult]) -> Panel:
    mean, std, _ = spreads(results)
    return bars([*mean.index], mean[metric].tolist(), std[metric].tolist())


def _matrix(metric: str, results: Sequence[RunResult], experiment: Experiment) -> Panel:
    (down, rows), (across, columns) = experiment.axes.items()
    means, _, _ = spreads(results)
    values = over_axes(results, means[metric], experiment.axes).to_numpy(float)
    return table_map(values, x=across, y=down, columns=columns, rows=rows, numbers=True)
