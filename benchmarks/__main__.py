"""Rounds against bare PyTorch and other frameworks: ``python -m benchmarks --write docs/benchmarks.md``.

Of each workload, the variants of a bare loop are compared, and the federation takes turns with the plain
and the fastest one, in runs of 100 and of 2,000 rounds (`benchmarks.turns`). What is paid once, by
the federation and by the fastest loops, is measured in fresh processes with an empty folder of compiled
code (`benchmarks.alone`). One thread a process; seconds are those that it computes. Two workloads are
measured at a time.

Results are merged into benchmarks/results/rounds.json, with commit, torch, CPU and date. ``--write`` then
writes the tables of a page anew. ``--tables memory,codec`` runs other benchmarks and keeps what they print.
Rivals run in environments of their own; each takes turns with the plain loop. With ``--rivals``, a workload
that was measured before keeps its other results.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from threading import Lock
from typing import Any

from benchmarks import rivals
from benchmarks.bare import VARIANTS
from benchmarks.options import Options, add_options
from benchmarks.page import RESULTS, ROUNDS, environment, of_plain, row, with_tables
from benchmarks.process import Column, MeasurementError, output_of, run
from benchmarks.workloads import WORKLOADS

LENGTHS = 100, 2000
# Benchmarks that print a table: their commands.
TABLES = {
    "per_client": "benchmarks.per_client",
    "memory": "benchmarks.memory",
    "remembering": "benchmarks.memory --parameters 22000000",
    "sparse_step": "benchmarks.sparse_step",
    "calibration": "benchmarks.calibration",
    "codec": "benchmarks.codec",
    "secure": "benchmarks.secure --rivals flwr",
    "network": "benchmarks.network",
}
_COMPILED = "compiled", "batched"


def measure(name: str, options: Options, ends: float) -> dict[str, Any]:
    """Return the results of one workload, without rivals.

    Args:
        name: the workload's.
        options: of the processes.
        ends: time, by `time.monotonic`, at which they are ended.

    Raises:
        MeasurementError: if a process fails or is ended.
    """
    words = [sys.executable, "-m", "benchmarks.turns", name, *options.as_arguments()]
    lengths = [*map(str, LENGTHS)]
    turns = run([*words, "--lengths", *lengths], _until(ends))
    variants = [*turns["variants"]["seconds"]]
    loops = [variants[0]]  # and the fastest that is not compiled, which starts sooner
    loops += [v for v in variants if VARIANTS[v].update not in _COMPILED and v not in loops][:1]
    columns = {variant: ("bare", options, variant) for variant in loops}
    is_sequential = turns["runs"][lengths[-1]]["engine"] == "sequential"
    for length in LENGTHS[-1:] if is_sequential else LENGTHS:
        columns[f"ours, {length}"] = "ours", replace(options, length=length), "sgd"
    starts = {label: _alone(name, *column, ends) for label, column in columns.items()}
    starts.setdefault("ours, 100", starts["ours, 2000"])
    return {
        "title": WORKLOADS[name].title,
        "environment": environment(),
        **turns,
        "starts": starts,
        "rivals": {},
    }


def _until(ends: float) -> float:
    """Return the seconds left; where none are, a process is ended at once."""
    return max(0.1, ends - time.monotonic())


def _alone(name: str, column: str, options: Options, variant: str, ends: float) -> Column:
    words = [*replace(options, rounds=1).as_arguments(), "--variant", variant]
    with tempfile.TemporaryDirectory() as folder:
        cold = {"TORCHINDUCTOR_CACHE_DIR": folder, "TORCHINDUCTOR_COMPILE_THREADS": "1"}
        command = [sys.executable, "-m", "benchmarks.alone", column, name, *words]
        found: Column = run(command, _until(ends), cold)
        return found


def compare_rivals(name: str, options: Options, rival_names: Sequence[str]) -> dict[str, Any]:
    """Return the rivals' columns, or reasons why there is none."""
    columns: dict[str, Any] = {}
    for rival in rival_names:
        try:
            columns[rival] = rivals.run(rival, name, options)
        except MeasurementError as error:
            columns[rival] = {"failure": str(error)}
    return columns


class Measurement:
    """Measures workloads, two at a time, and saves each one's results when they are there.

    Args:
        options: of the processes.
        rival_names: rivals to compare with.
        page: the page to write anew; None for none.
        minutes: time after which all processes are ended.
    """

    def __init__(
        self, options: Options, rival_names: Sequence[str], page: Path | None, minutes: float
    ) -> None:
        self._options, self._rivals, self._page = options, rival_names, page
        self._ends = time.monotonic() + 60 * minutes
        self._saving = Lock()

    def run(self, names: Sequence[str]) -> None:
        """Measure workloads."""
        with ThreadPoolExecutor(2) as pool:
            list(pool.map(self._measure, names))

    def _measure(self, name: str) -> None:
        earlier = _saved().get(name)
        result = earlier
        if result is None or not self._rivals:
            try:
                result = measure(name, self._options, self._ends)
            except MeasurementError as error:
                print(f"{name}: not measured, {error}", flush=True)
                return
        result["rivals"] = earlier["rivals"] if earlier else {}
        result["rivals"] |= compare_rivals(name, self._options, self._rivals)
        with self._saving:
            results = _saved()
            results[name] = result
            save(ROUNDS, {known: results[known] for known in WORKLOADS if known in results})
            print(row(name, result), flush=True)
            for rival, column in result["rivals"].items():
                print(f"{rival}, of the plain loop: {of_plain(column)}", flush=True)
            if self._page is not None:
                self._page.write_text(with_tables(self._page.read_text()))


def _saved() -> dict[str, Any]:
    return json.loads(ROUNDS.read_text()) if ROUNDS.exists() else {}


def save(path: Path, results: object) -> None:
    """Write results as JSON, numbers with 4 digits."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(_rounded(results), indent=1, ensure_ascii=False) + "\n")


def _rounded(value: Any) -> Any:
    if isinstance(value, float):
        return float(f"{value:.4g}")
    if isinstance(value, dict):
        return {key: _rounded(item) for key, item in value.items()}
    return [*map(_rounded, value)] if isinstance(value, list) else value


def main() -> None:
    """Measure, save the results, and write the page."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--workloads", default=",".join(WORKLOADS), help="comma-separated: %(default)s"
    )
    parser.add_argument(
        "--rivals", default="", help=f"comma-separated, of {', '.join(rivals.RIVALS)}"
    )
    parser.add_argument("--tables", default="", help=f"comma-separated, of {', '.join(TABLES)}")
    parser.add_argument("--write", type=Path, help="the page whose tables are written anew")
    parser.add_argument(
        "--minutes", type=float, default=600.0, help="after which all processes are ended"
    )
    add_options(parser)
    arguments = parser.parse_args()
    names, rival_names, tables = (
        [name for name in given.split(",") if name]
        for given in (arguments.workloads, arguments.rivals, arguments.tables)
    )
    known = (names, WORKLOADS), (rival_names, rivals.RIVALS), (tables, TABLES)
    for given, existing in known:
        if unknown := [name for name in given if name not in existing]:
            parser.error(f"unknown: {', '.join(unknown)}; there are {', '.join(existing)}")
    options = Options.of_arguments(arguments)
    Measurement(options, rival_names, arguments.write, arguments.minutes).run(names)
    for name in tables:
        output = output_of([sys.executable, "-m", *TABLES[name].split()])
        found = {"command": TABLES[name], "environment": environment(), "output": output}
        save(RESULTS / f"{name}.json", found)
        print(output, flush=True)
    if arguments.write:
        arguments.write.write_text(with_tables(arguments.write.read_text()))


if __name__ == "__main__":
    main()
