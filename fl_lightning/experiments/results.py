"""Results of a run, and of the runs of a variant together.

mean = sum x / n,   std = sqrt(sum (x - mean)² / (n - 1))    over seeds; no std of one run
"""

from __future__ import annotations

import csv
import difflib
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from fl_lightning.core.errors import ConfigurationError
from fl_lightning.experiments.curves import curves
from fl_lightning.experiments.experiment import Experiment, Variant
from fl_lightning.experiments.plan import PlannedRun
from fl_lightning.experiments.training import seconds_of
from fl_lightning.reports.history import Curve

BEST = " (best round)"
# What clients sent and got in sum: in rounds, and once, ahead of them or between them.
BYTES = {
    "bytes up": "round/total_bytes_up",
    "calibration bytes up": "calibration/total_bytes_up",
    "head bytes up": "head/total_bytes_up",
    "bytes down": "round/total_bytes_down",
}


@dataclass(frozen=True)
class RunResult:
    """One finished run.

    Attributes:
        variant: what it is a run of.
        seed: of the run.
        curves: of the reported and the monitored metrics, round to value.
        columns: reported numbers by name: final values, those of the best round, costs.
        clock: round to the value over which curves are drawn; None for rounds themselves.
    """

    variant: Variant
    seed: int
    curves: Mapping[str, Curve]
    columns: Mapping[str, float]
    clock: Curve | None = None

    def curve_over_clock(self, metric: str) -> list[tuple[float, float]]:
        """Return one metric's curve as points (time, value), in order of rounds.

        Example:
            >>> curves = {"val/loss": {1: 0.9, 2: 0.5, 3: 0.4}}
            >>> RunResult(Variant("a", ()), 0, curves, {}, {1: 10.0, 2: 25.0}).curve_over_clock("val/loss")
            [(10.0, 0.9), (25.0, 0.5)]
        """
        curve, clock = self.curves[metric], self.clock
        rounds = sorted(curve if clock is None else curve.keys() & clock.keys())
        return [(float(r) if clock is None else clock[r], curve[r]) for r in rounds]


class Spread(NamedTuple):
    """Mean and standard deviation of n numbers; the latter is nan for one.

    Example:
        >>> Spread.of([1.0, 3.0])
        Spread(mean=2.0, std=1.4142135623730951, n=2)
    """

    mean: float
    std: float
    n: int

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        """Return those of at least one number."""
        std = statistics.stdev(values) if len(values) > 1 else float("nan")
        return cls(statistics.fmean(values), std, len(values))


def read_result(run: PlannedRun, experiment: Experiment) -> RunResult:
    """Return what a finished run logged.

    Raises:
        ConfigurationError: if it did not log a metric that is to be reported.
    """
    logged = curves(run.folder)
    num_rounds = max(logged.pop("epoch"), default=0)
    over = [experiment.over] if experiment.over is not None else []
    _require([*experiment.report, *over], logged)
    reported = {name: logged[name] for name in experiment.report}
    columns = {name: _last(curve) for name, curve in reported.items()}
    if monitored := logged.get(experiment.monitor):
        choose = max if experiment.mode == "max" else min
        best = choose(monitored, key=lambda number: monitored[number])  # the earliest of equal ones
        columns |= {f"{n}{BEST}": c[best] for n, c in reported.items() if best in c and len(c) > 1}
        columns["best round"] = best
    columns |= {name: sum(logged[of].values()) for name, of in BYTES.items() if of in logged}
    columns["seconds"] = seconds_of(run)
    if virtual := logged.get("round/total_virtual_seconds"):
        columns["virtual seconds"] = _last(virtual)
    clock = None if experiment.over is None else logged[experiment.over]
    in_rounds = {
        name: {n: value for n, value in curve.items() if n <= num_rounds}
        for name, curve in {**reported, experiment.monitor: monitored or {}}.items()
        if curve
    }
    return RunResult(run.variant, run.seed, in_rounds, columns, clock)


def by_variant(results: Sequence[RunResult]) -> dict[str, list[RunResult]]:
    """Return results by the names of their variants, in the order in which these first occur."""
    groups: dict[str, list[RunResult]] = {}
    for result in results:
        groups.setdefault(result.variant.name, []).append(result)
    return groups


def spreads(results: Sequence[RunResult]) -> dict[str, Spread]:
    """Return mean and spread over one variant's runs of every column that all of them have."""
    shared = [name for name in results[0].columns if all(name in r.columns for r in results)]
    return {name: Spread.of([r.columns[name] for r in results]) for name in shared}


def write_csv(path: Path, results: Sequence[RunResult]) -> None:
    """Write one row a run, with as many digits as there are."""
    columns = list(dict.fromkeys(name for r in results for name in r.columns))
    rows = [(r, [r.columns.get(name, "") for name in columns]) for r in results]
    _write(path, columns, rows)


def write_curves(path: Path, results: Sequence[RunResult]) -> None:
    """Write one row a round of every run: the reported metrics, empty where one was not logged."""
    metrics = list(dict.fromkeys(name for r in results for name in r.curves))
    rows = [
        (r, [number, *(r.curves.get(name, {}).get(number, "") for name in metrics)])
        for r in results
        for number in sorted(set().union(*r.curves.values()))
    ]
    _write(path, ["round", *metrics], rows)


def _write(path: Path, columns: Sequence[str], rows: Sequence[tuple[RunResult, list[Any]]]) -> None:
    """Write numbers in columns, each row after the run that it is of."""
    axes = list(dict.fromkeys(axis for r, _ in rows for axis in r.variant.coordinates))
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["variant", *axes, "seed", *columns])
        for r, numbers in rows:
            place = [r.variant.coordinates.get(axis, "") for axis in axes]
            writer.writerow([r.variant.name, *place, r.seed, *numbers])


def _last(curve: Curve) -> float:
    return curve[max(curve)]


def _require(names: Sequence[str], logged: Mapping[str, Curve]) -> None:
    for name in names:
        if name not in logged:
            close = difflib.get_close_matches(name, logged, n=3) or sorted(logged)
            raise ConfigurationError(
                f"report: the runs have not logged {name!r}. There is {', '.join(close)}. Change "
                "report and say compare again: what is finished is not run again."
            )
