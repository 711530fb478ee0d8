"""The report of a comparison: one page over all variants and seeds, figures, a table for LaTeX."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from fl_lightning.experiments.experiment import Experiment
from fl_lightning.experiments.figure import caption, comparison_charts
from fl_lightning.experiments.results import (
    RunResult,
    by_variant,
    head_and_rows,
    latex,
    matrix_cells,
    results_cells,
    runs_table,
)
from fl_lightning.reports.page import Page

REPORT, FIGURES, LATEX = "report.html", "figures", "results.tex"


def write_comparison(out: Path, experiment: Experiment, results: Sequence[RunResult]) -> None:
    """Write ``report.html``, ``figures/`` and ``results.tex``.

    Args:
        out: folder of the comparison.
        experiment: what was compared.
        results: of all finished runs.
    """
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
