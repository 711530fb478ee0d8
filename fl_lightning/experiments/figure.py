"""The charts of a comparison: curves with a band and bars of final values, or matrices.

Over another metric than rounds, e.g. virtual time, the lines of seeds are not averaged: each has
its own times. Lines and bars are means over seeds, bands and whiskers one standard deviation.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np

from fl_lightning.experiments.results import RunResult, by_variant, spreads
from fl_lightning.reports.charts import Chart, Line, Panel, bars, curves, series, table_map

Axes = Mapping[str, Sequence[str]]


def draw(
    path: Path,
    results: Sequence[RunResult],
    metrics: Sequence[str],
    axes: Axes,
    over: str | None = None,
) -> None:
    """Write a PNG of all metrics together.

    Args:
        path: of the file.
        results: of all runs.
        metrics: a panel each.
        axes: of a grid; with two of them final values are drawn as matrices.
        over: the metric over which curves are drawn; rounds if None.
    """
    panels = [next(_panels(name, results, axes, over)) for name in metrics]
    chart = Chart("results", "Results", "", panels, names_are_long=True)
    chart.figure().savefig(path, dpi=130, facecolor="white")


def comparison_charts(
    results: Sequence[RunResult], metrics: Sequence[str], axes: Axes, over: str | None = None
) -> Iterator[Chart]:
    """Yield a chart a metric; the arguments are those of `draw`."""
    seeds = len({result.seed for result in results})
    band = (
        "" if seeds < 2 else f" Bands and whiskers are one standard deviation over {seeds} seeds."
    )
    if over is not None:
        band = " A line a seed: each has its own times."
    for name in metrics:
        panels = [*_panels(name, results, axes, over)]
        is_matrix = len(axes) == 2
        caption = "Final values, means over seeds." if is_matrix else f"Means over seeds.{band}"
        file = "".join(c if c.isalnum() else "_" for c in name)
        yield Chart(file, name, caption, panels, names_are_long=True)


def _panels(
    metric: str, results: Sequence[RunResult], axes: Axes, over: str | None
) -> Iterator[Panel]:
    """Yield a metric's panels, the one that says most first."""
    if len(axes) == 2:
        yield _matrix(metric, results, axes)
        return
    if any(len(result.curves[metric]) > 1 for result in results):
        yield _curves(metric, results, over)
    yield _bars(metric, results)


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
    return curves(metric, lines, x=over or "round")


def _bars(metric: str, results: Sequence[RunResult]) -> Panel:
    rows = {name: spreads(group)[metric] for name, group in by_variant(results).items()}
    means, whiskers = ([getattr(row, of) for row in rows.values()] for of in ("mean", "std"))
    return bars(f"{metric}, at the end", [*rows], means, whiskers)


def _matrix(metric: str, results: Sequence[RunResult], axes: Axes) -> Panel:
    (down, rows), (across, columns) = axes.items()
    values = np.full((len(rows), len(columns)), np.nan)
    for group in by_variant(results).values():
        place = group[0].variant.coordinates
        row, column = rows.index(place[down]), columns.index(place[across])
        values[row, column] = spreads(group)[metric].mean
    title = f"{metric}, at the end"
    return table_map(title, values, x=across, y=down, columns=columns, rows=rows, numbers=True)
