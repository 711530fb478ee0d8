"""Rounds against bare PyTorch and against other frameworks: ``python -m benchmarks``.

Of each workload: seconds per round (median), their ratio to a bare loop that took turns with the
federation in one process, and to that loop's fastest variant; seconds from the start of a process
to its first round, and peak memory, each in a fresh process; and how far the federation's
aggregates were from the bare loop's. One thread a process. Rivals run in environments of their own
and not in turn with anything: on a machine that does other work, their ratio is rough.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from dataclasses import replace
from statistics import median
from typing import Any, cast

from benchmarks import rivals
from benchmarks.options import Options, add_options
from benchmarks.process import Column, MeasurementError, run
from benchmarks.report import HEADER, Row
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
            seconds = column["seconds"]
            bare, best = (turns["bare"], turns["bare_best"]) if turns else (seconds, seconds)
            yield Row.of(rival, [median(seconds)], bare, best, column)


def _own_rows(name: str, options: Options, turns: dict[str, Any]) -> Iterator[Row]:
    bare, best, ours = turns["bare"], turns["bare_best"], turns["ours"]
    words = [name, *replace(options, rounds=1).as_arguments()]

    def alone(column: str, *arguments: str) -> Column:
        line = run([sys.executable, "-m", "benchmarks.alone", column, *words, *arguments])
        return cast(Column, line)

    yield Row.of("bare", bare, bare, best, alone("bare"))
    if turns["best"] != "sgd":
        paid_once = alone("bare", "--variant", turns["best"])
        yield Row.of(f"bare (best: {turns['best']})", best, bare, best, paid_once)
    label = f"ours ({options.devices} processes)" if options.devices > 1 else "ours"
    yield Row.of(label, ours, bare, best, alone("ours"), turns["difference"])


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
