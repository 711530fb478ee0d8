"""The report of a comparison: one page over all variants and seeds, charts, a table for LaTeX.

Over another metric than rounds, e.g. virtual time, the lines of seeds are not averaged: each has
its own times. Lines and bars are means over seeds, bands and whiskers one standard deviation.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from fl_lightning.experiments.experiment import Experiment
from fl_lightning.experiments.results import (
    RunResult,
    by_variant,
    head_and_rows,
    latex,
    matrix_cells,
    results_cells,
    runs_table,
    spreads,
)
from fl_lightning.reports.charts import Chart, Panel, draw, series
from fl_lightning.reports.page import Page
from fl_lightning.reports.panels import Line, bars, curves, table_map

REPORT, FIGURES, LATEX = "report.html", "figures", "results.tex"


def write_comparison(out: Path, experiment: Experiment, results: Sequence[RunResult]) -> None:
    """Write ``report.html``, ``figures/`` and ``results.tex``."""
    (out / LATEX).write_text(
        latex(results, experiment.report, goals(experiment)) + "\n", encoding="utf-8"
    )
    groups = by_variant(results)
    seeds = len({result.seed for result in results})
    page = Page(out.name, f"{len(groups)} variants, {seeds} seeds, {len(results)} runs · {out}")
    page.heading("Results")
    page.text("Mean ± standard deviation over seeds; bytes are totals over rounds and clients.")
    page.table(*head_and_rows(results_cells(results)))
    if len(experiment.axes) == 2:
        for metric in experiment.report:
            page.text(metric)
            corner = " \\ ".join(experiment.axes)
            cells = matrix_cells(results, metric, experiment.axes)
            page.table(*head_and_rows(cells, corner))
    page.heading("Figures")
    page.text(caption(results, experiment))
    page.charts([*comparison_charts(results, experiment)], out / FIGURES)
    page.heading("Runs")
    runs = runs_table(results).set_index("variant").map(_cell)
    page.table(*head_and_rows(runs), fold=f"All {len(results)} runs")
    for variant in experiment.all_variants:
        if variant.name in groups:
            text = "".join(yaml.safe_dump(_plain(layer)) for layer in variant.difference)
            page.verbatim(text, f"{variant.name}: difference to the common configuration")
    page.write(out / REPORT)


def goals(experiment: Experiment) -> dict[str, str]:
    """Return which reported metrics are good where they are high, and which where low.

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


def _plain(layer: object) -> object:
    """Return a layer as plain mappings, which YAML writes without tags."""
    if isinstance(layer, dict):
        return {str(key): _plain(value) for key, value in layer.items()}
    if isinstance(layer, (list, tuple)):
        return [_plain(value) for value in layer]
    return layer if isinstance(layer, (str, int, float, bool, type(None))) else str(layer)


def write_picture(path: Path, results: Sequence[RunResult], experiment: Experiment) -> None:
    """Write a PNG of all charts together."""
    figure, _ = draw([*comparison_charts(results, experiment)])
    figure.savefig(path, dpi=130, facecolor="white")


def comparison_charts(results: Sequence[RunResult], experiment: Experiment) -> Iterator[Chart]:
    """Yield learning curves of the monitored metric, then final values and curves of those reported."""
    metrics = (experiment.monitor, *experiment.report)
    logged = [m for m in metrics if min(len(r.curves.get(m, ())) for r in results) > 0]
    logged = [m for m in logged if max(len(r.curves[m]) for r in results) > 1]
    shown = list(dict.fromkeys(logged))[: 1 if len(experiment.axes) == 2 else None]
    for metric in shown:
        panel = _curves(metric, results, experiment.over)
        yield Chart(f"{_file(metric)}_curves", metric, panel, names_are_long=True)
    for metric in experiment.report:
        is_matrix = len(experiment.axes) == 2
        last = _matrix(metric, results, experiment) if is_matrix else _bars(metric, results)
        yield Chart(_file(metric), f"{metric}, at the end", last, names_are_long=True)


def caption(results: Sequence[RunResult], experiment: Experiment) -> str:
    """Caption that explains bands, whiskers and lines."""
    seeds = len({result.seed for result in results})
    if experiment.over is not None:
        return "Bars are means over seeds. A line a seed: each has its own times."
    band = (
        f" Bands and whiskers are one standard deviation over {seeds} seeds." if seeds > 1 else ""
    )
    return f"Means over seeds.{band}"


def _file(metric: str) -> str:
    return "".join(c if c.isalnum() else "_" for c in metric)


def _curves(metric: str, results: Sequence[RunResult], over: str | None) -> Panel:
    lines: list[Line] = []
    for number, (name, group) in enumerate(by_variant(results).items()):
        colour = series(number)
        if group[0].clock is not None:
            for place, result in enumerate(group):
                times, values = np.array(result.curve_over_clock(metric)).reshape(-1, 2).T.tolist()
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
    means = runs_table(results).pivot_table(index=down, columns=across, values=metric)
    values = means.reindex(index=rows, columns=columns).to_numpy(float)
    return table_map(values, x=across, y=down, columns=columns, rows=rows, numbers=True)
