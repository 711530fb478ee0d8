"""Rounds against bare PyTorch and against other frameworks: ``python -m benchmarks``.

Of each workload: seconds per round (median); their ratio to a bare loop that trained in turn with
each of them, in the same process, and to that loop's fastest variant; seconds from the start of a
process to its first round, and peak memory, each in a fresh process; and how far the federation's
aggregates were from the bare loop's. One thread a process. In another precision than 32-true the
fastest loop in that one trains in turn as well. Rivals run in environments of their own; seconds of
different rows compare only on a machine that does nothing else.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from dataclasses import replace
from statistics import median
from typing import Any

from benchmarks import rivals
from benchmarks.options import Options, add_options
from benchmarks.process import Column, MeasurementError, run
from benchmarks.report import HEADER, Row, ratio
from benchmarks.turns import FULL
from benchmarks.workloads import WORKLOADS


def rows(name: str, options: Options, rival_names: list[str]) -> Iterator[Row]:
    """Yield the rows of one workload, each when it is measured."""
    turns = None
    try:
        turns = run([sys.executable, "-m", "benchmarks.turns", name, *options.as_arguments()])
        yield from _own_rows(name, options, turns)
    except MeasurementError as error:
        yield Row("ours", failure=str(error))
    for rival in rival_names:
        try:
            column = rivals.run(rival, name, options)
        except MeasurementError as error:
            yield Row(rival, failure=str(error))
        else:
            of_bare = ratio(column["seconds"], column["bare"])
            of_best = of_bare * ratio(turns["bare"], turns["bare_best"]) if turns else None
            yield _row(rival, column["seconds"], (of_bare, of_best), column)


def _own_rows(name: str, options: Options, turns: dict[str, Any]) -> Iterator[Row]:
    bare, best, ours = turns["bare"], turns["bare_best"], turns["ours"]
    words = [name, *replace(options, rounds=1).as_arguments()]

    def row(label: str, seconds: list[float], column: str, *arguments: str) -> Row:
        line = run([sys.executable, "-m", "benchmarks.alone", column, *words, *arguments])
        return _row(label, seconds, (ratio(seconds, bare), ratio(seconds, best)), line)

    if full := turns["bare_full"]:
        arguments = "--precision", FULL, "--variant", turns["best_full"]
        yield row(f"bare in {FULL} ({turns['best_full']})", full, "bare", *arguments)
    yield row("bare", bare, "bare")
    if turns["best"] != "sgd":
        yield row(f"bare (best: {turns['best']})", best, "bare", "--variant", turns["best"])
    processes = f", {options.devices} processes" if options.devices > 1 else ""
    label = f"ours ({turns['engine']}{processes})"
    yield replace(row(label, ours, "ours"), difference=turns["difference"])


def _row(
    label: str, seconds: list[float], ratios: tuple[float, float | None], alone: Column
) -> Row:
    return Row(label, median(seconds), *ratios, alone["start_up"], alone["peak_mb"])


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--workloads", default=",".join(WORKLOADS), help="comma-separated: %(default)s"
    )
    parser.add_argument(
        "--rivals", default="", help=f"comma-separated, of {', '.join(rivals.RIVALS)}"
    )
    add_options(parser)
    arguments = parser.parse_args()
    names = [name for name in arguments.workloads.split(",") if name]
    rival_names = [name for name in arguments.rivals.split(",") if name]
    for given, known in ((names, WORKLOADS), (rival_names, rivals.RIVALS)):
        if unknown := [name for name in given if name not in known]:
            parser.error(f"unknown: {', '.join(unknown)}; there are {', '.join(known)}")
    options = Options.of_arguments(arguments)
    print(HEADER)
    for name in names:
        print(f"{name}: {WORKLOADS[name].title}")
        for row in rows(name, options, rival_names):
            print(row, flush=True)


if __name__ == "__main__":
    main()
