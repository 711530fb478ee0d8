"""The figure: a panel a metric. Curves over rounds with a band, bars of final values, or a matrix.

Over another metric than rounds, e.g. virtual time, the lines of seeds are not averaged: each has
its own times. Lines and bars are means over seeds, bands and whiskers one standard deviation.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from fl_lightning.experiments.results import RunResult, by_variant, spreads

Axes = Mapping[str, Sequence[str]]


def draw(
    path: Path,
    results: Sequence[RunResult],
    metrics: Sequence[str],
    axes: Axes,
    over: str | None = None,
) -> None:
    """Write a PNG: of two axes final values as matrices, else curves, and bars where there is none.

    Args:
        path: of the file.
        results: of all runs.
        metrics: a panel each.
        axes: of a grid.
        over: the metric over which curves are drawn; rounds if None.
    """
    from matplotlib.figure import Figure  # a second to import

    figure = Figure(figsize=(5.2 * len(metrics), 3.8), layout="constrained")
    panels = figure.subplots(1, len(metrics), squeeze=False)[0]
    for panel, name in zip(panels, metrics, strict=True):
        if len(axes) == 2:
            _draw_matrix(panel, name, results, axes)
        elif any(len(result.curves[name]) > 1 for result in results):
            _draw_curves(panel, name, results)
            if over is not None:
                panel.set(xlabel=over)
        else:
            _draw_bars(panel, name, results)
    figure.savefig(path, dpi=130)


def _draw_curves(panel: Any, metric: str, results: Sequence[RunResult]) -> None:
    for number, (name, group) in enumerate(by_variant(results).items()):
        if group[0].clock is not None:
            lines = [np.array(r.curve_over_clock(metric)).reshape(-1, 2).T for r in group]
            for place, (times, values) in enumerate(lines):
                label = "_" if place else name  # the legend leaves out what begins with _
                panel.plot(times, values, label=label, color=f"C{number}")
            continue
        every = [result.curves[metric] for result in group]
        rounds = sorted(set.intersection(*(set(curve) for curve in every)))
        values = np.array([[curve[one] for one in rounds] for curve in every])
        mean = values.mean(axis=0)
        panel.plot(rounds, mean, label=name)
        if len(group) > 1:
            std = values.std(axis=0, ddof=1)
            panel.fill_between(rounds, mean - std, mean + std, alpha=0.2)
    panel.set(xlabel="round", title=metric)
    if results[0].clock is None:
        panel.xaxis.get_major_locator().set_params(integer=True)
    panel.grid(alpha=0.3)
    panel.legend(frameon=False, fontsize="small")


def _draw_bars(panel: Any, metric: str, results: Sequence[RunResult]) -> None:
    rows = {name: spreads(group)[metric] for name, group in by_variant(results).items()}
    colors = [f"C{number}" for number in range(len(rows))]  # those of the curves
    whiskers = np.nan_to_num([row.std for row in rows.values()])
    panel.barh(list(rows), [row.mean for row in rows.values()], xerr=whiskers, color=colors)
    panel.invert_yaxis()
    panel.set(title=f"{metric}, at the end")
    panel.grid(alpha=0.3, axis="x")


def _draw_matrix(panel: Any, metric: str, results: Sequence[RunResult], axes: Axes) -> None:
    (down, rows), (across, columns) = axes.items()
    values = np.full((len(rows), len(columns)), np.nan)
    for group in by_variant(results).values():
        place = group[0].variant.coordinates
        row, column = rows.index(place[down]), columns.index(place[across])
        values[row, column] = spreads(group)[metric].mean
    panel.imshow(values, aspect="auto")
    for (row, column), value in np.ndenumerate(values):
        panel.text(column, row, f"{value:.2f}", ha="center", va="center", color="white")
    panel.set_xticks(range(len(columns)), columns, rotation=45, ha="right")
    panel.set_yticks(range(len(rows)), rows)
    panel.set(title=f"{metric}, at the end", xlabel=across, ylabel=down)
