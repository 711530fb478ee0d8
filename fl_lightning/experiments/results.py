"""Results of runs: logged metrics, and tables of their mean and standard deviation over seeds.

mean = sum x / n,   std = sqrt(sum (x - mean)² / (n - 1))    over seeds; no std for a single run
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fl_lightning.core.errors import ConfigurationError, close_to
from fl_lightning.experiments.experiment import BEST, BYTES, Experiment, PlannedRun, Variant
from fl_lightning.experiments.runs import seconds_of
from fl_lightning.federation import logged_once
from fl_lightning.reports.history import Curve, History

if TYPE_CHECKING:
    from pandas import DataFrame, Series


@dataclass(frozen=True)
class RunResult:
    """Curves, final metrics and costs of a finished run.

    Attributes:
        variant: variant of the run.
        seed: seed of the run.
        curves: round to value, for the reported and the monitored metrics.
        columns: values of the table's columns: metrics at the end and in the best round, and costs.
        clock: round to value of the metric on the horizontal axis; None if the axis is rounds.
    """

    variant: Variant
    seed: int
    curves: Mapping[str, Curve]
    columns: Mapping[str, float]
    clock: Curve | None = None

    @property
    def place(self) -> dict[str, Any]:
        """First cells of the run's table row: its variant, its value on each axis of the grid, its seed."""
        return {"variant": self.variant.name, **self.variant.coordinates, "seed": self.seed}


def curves(run: Path) -> dict[str, Curve]:
    """Read a run's metrics from its folder, and return each metric's values by round.

    Rounds are counted from 1; a central run has epochs instead. A metric that is logged once, such as the
    test's, has one value, one round after the last. The curve ``epoch`` has a value for every round.
    """
    history = History.read(run)
    rounds = {line.number: line.number - 1.0 for line in history.rounds}
    afterwards = max(rounds, default=0) + 1
    once = {name: {afterwards: value} for name, value in logged_once(run).items()}
    return {**once, **{name: history.curve(name) for name in history.names}, "epoch": rounds}


def read_result(run: PlannedRun, experiment: Experiment) -> RunResult:
    """Read a finished run's curves from its folder, and compute its values for the table of results.

    Raises:
        ConfigurationError: if the run has not logged a reported metric.
    """
    logged = curves(run.folder)
    num_rounds = max(logged.pop("epoch"), default=0)
    over = [experiment.over] if experiment.over is not None else []
    for name in (*experiment.report, *over):
        if name not in logged:
            raise ConfigurationError(
                f"report: the runs have not logged {name!r}. {close_to(name, sorted(logged))} Change report "
                "and run compare again: finished runs are not repeated."
            )
    reported = {name: logged[name] for name in experiment.report}
    columns = {name: _last(curve) for name, curve in reported.items()}
    monitored = logged.get(experiment.monitor, {})
    if finite := {n: value for n, value in monitored.items() if math.isfinite(value)}:
        choose = max if experiment.mode == "max" else min
        best = choose(finite, key=lambda number: finite[number])  # the earliest of equal ones
        columns |= {f"{n}{BEST}": c[best] for n, c in reported.items() if best in c and len(c) > 1}
        columns["best round"] = best
    columns |= {name: sum(logged[of].values()) for name, of in BYTES.items() if of in logged}
    columns["seconds"] = seconds_of(run)
    if virtual := logged.get("round/total_virtual_seconds"):
        columns["virtual seconds"] = _last(virtual)
    clock = None if experiment.over is None else logged[experiment.over]
    in_rounds = {
        name: {n: value for n, value in curve.items() if n <= num_rounds}
        for name, curve in {**reported, experiment.monitor: monitored}.items()
        if curve
    }
    return RunResult(run.variant, run.seed, in_rounds, columns, clock)


def by_variant(results: Sequence[RunResult]) -> dict[str, list[RunResult]]:
    """Group the results of runs by the name of their variant, in the order of each variant's first result."""
    groups: dict[str, list[RunResult]] = {}
    for result in results:
        groups.setdefault(result.variant.name, []).append(result)
    return groups


def runs_table(results: Sequence[RunResult]) -> DataFrame:
    """Return a table with one row per run, with unrounded metrics and costs."""
    import pandas  # half a second to import

    return pandas.DataFrame([{**r.place, **r.columns} for r in results])


def curves_table(results: Sequence[RunResult]) -> DataFrame:
    """Return a table with one row per run and round; cells of metrics that were not logged are empty."""
    import pandas

    rows = [
        {**r.place, "round": n, **{name: c[n] for name, c in r.curves.items() if n in c}}
        for r in results
        for n in sorted(set().union(*r.curves.values()))
    ]
    return pandas.DataFrame(rows)


def spreads(results: Sequence[RunResult]) -> tuple[DataFrame, DataFrame, Series]:
    """Return each variant's means and standard deviations over its seeds, and its number of runs.

    A value is nan if a run of the variant lacks it; so is the standard deviation of a single run.
    """
    columns = list(dict.fromkeys(name for r in results for name in r.columns))
    groups = runs_table(results).groupby("variant", sort=False)
    runs = groups.size()
    is_known = groups[columns].count().eq(runs, axis=0)
    return groups[columns].mean().where(is_known), groups[columns].std().where(is_known), runs


def results_cells(results: Sequence[RunResult]) -> DataFrame:
    """Return the table of results as text: mean ± standard deviation over seeds, with one row per variant.

    The last column is the number of runs. Bytes are totals over rounds and clients, seconds are per run.
    """
    mean, std, runs = spreads(results)
    cells = mean.astype(object)
    for column in mean.columns:
        pairs = zip(mean[column], std[column], strict=True)
        cells[column] = [_cell(column, *pair) for pair in pairs]
    cells["runs"] = runs.astype(str)
    return cells


def over_axes(
    results: Sequence[RunResult], values: Series, axes: Mapping[str, Sequence[str]]
) -> DataFrame:
    """Arrange one value per variant in a matrix: rows are the grid's first axis, columns its second; missing values are nan."""
    import pandas

    (down, rows), (across, columns) = axes.items()
    variants = runs_table(results).drop_duplicates("variant").set_index("variant")
    cells = values.reindex(variants.index)
    cells.index = pandas.MultiIndex.from_frame(variants[[down, across]])
    return cells.unstack().reindex(index=rows, columns=columns)


def head_and_rows(cells: DataFrame, corner: str = "variant") -> tuple[list[str], list[list[str]]]:
    """Return a DataFrame's header and rows as lists; every row begins with its name in the index."""
    rows = [[str(name), *row] for name, row in zip(cells.index, cells.to_numpy(), strict=True)]
    return [corner, *map(str, cells.columns)], rows


def latex(results: Sequence[RunResult], metrics: Sequence[str], goals: Mapping[str, str]) -> str:
    r"""Return a LaTeX table of the reported metrics, for the package booktabs.

    Args:
        results: results of all runs.
        metrics: the columns, each with mean ± standard deviation over seeds.
        goals: metric to ``max`` or ``min``, of columns whose best mean is bold.

    Example:
        >>> runs = [RunResult(Variant("top_k", ()), 0, {}, {"test/loss": 0.5})]
        >>> print(latex(runs, ["test/loss"], {}))
        % needs \usepackage{booktabs}
        \begin{tabular}{lr}
        \toprule
         & test/loss \\
        \midrule
        top\_k & $0.500$ \\
        \bottomrule
        \end{tabular}
    """
    mean, std, _ = spreads(results)
    cells = mean[list(metrics)].astype(object).rename_axis(None)
    for metric in metrics:
        best = {"max": mean[metric].max(), "min": mean[metric].min()}.get(goals.get(metric, ""))
        pairs = zip(mean[metric], std[metric], strict=True)
        cells[metric] = [
            _latex_cell(*pair, is_best=pair[0] == best and len(mean) > 1) for pair in pairs
        ]
    escaped = cells.style.format_index(escape="latex").format_index(escape="latex", axis=1)
    form = f"l{'r' * len(metrics)}"
    text = str(escaped.to_latex(hrules=True, column_format=form)).rstrip()
    return f"% needs \\usepackage{{booktabs}}\n{text}"


def _latex_cell(mean: float, std: float, *, is_best: bool) -> str:
    if math.isnan(mean):
        return "--"
    digits = 3 if abs(mean) < 100 else 0
    shown = f"{mean:.{digits}f}"
    shown = rf"\mathbf{{{shown}}}" if is_best else shown
    return f"${shown}$" if math.isnan(std) else rf"${shown} \pm {std:.{digits}f}$"


def _cell(column: str, mean: float, std: float) -> str:
    """Format a table cell, mean ± standard deviation, in the unit of its column.

    Example:
        >>> _cell("test/accuracy", 0.51234, 0.01), _cell("bytes up", 2e6, 0)
        ('0.512 ± 0.010', '2 MB')
    """
    if math.isnan(mean):
        return "-"
    if column in BYTES:
        unit, size = ("MB", 1e6) if mean >= 1e6 else ("kB", 1e3)
        return f"{mean / size:,.4g} {unit}" if mean < 1e9 else f"{mean / size:,.0f} {unit}"
    if column in ("seconds", "best round"):
        return f"{mean:.0f}"
    digits = 3 if abs(mean) < 100 else 0
    return f"{mean:.{digits}f}" + ("" if math.isnan(std) else f" ± {std:.{digits}f}")


def _last(curve: Curve) -> float:
    return curve[max(curve)]
