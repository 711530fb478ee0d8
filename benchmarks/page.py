"""The tables of docs/benchmarks.md, from the results in benchmarks/results.

A page holds each table between two comments, ``<!-- name -->`` and ``<!-- end of name -->``. What stands
between them is a function of the results; the text around them is written by hand.
"""

from __future__ import annotations

import json
import platform
import re
import subprocess
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.process import ROOT

RESULTS = Path(__file__).parent / "results"
ROUNDS = RESULTS / "rounds.json"
Results = dict[str, Any]

_HEADER = (
    "| workload | plain loop | fastest loop | 2,000 rounds | of fastest | start "
    "| 100 rounds | of fastest, starts included |"
)


def environment() -> dict[str, str]:
    """Return where and when something is measured: commit, torch, CPU, date."""
    import torch

    def git(*words: str) -> str:
        command = ["git", *words]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
        return done.stdout.strip()

    changed = git("status", "--porcelain", "--", "fl_lightning", "benchmarks/*.py")
    return {
        "commit": git("rev-parse", "--short=8", "HEAD") + ("+" if changed else ""),
        "torch": torch.__version__.partition("+")[0],
        "CPU": f"{_processor()}, {torch.backends.cpu.get_cpu_capability()}",
        "date": datetime.now(UTC).date().isoformat(),
    }


def _processor() -> str:
    info = Path("/proc/cpuinfo")
    found = re.search(r"model name\s*:\s*(.+)", info.read_text()) if info.exists() else None
    return found.group(1).strip() if found else platform.processor()


def ratio(seconds: list[float], others: list[float]) -> float:
    """Return the median over rounds of one's time to the other's, which took turns.

    Example:
        >>> ratio([2.0, 4.0, 9.0], [1.0, 2.0, 3.0])
        2.0
    """
    return median(a / b for a, b in zip(seconds, others, strict=True))


def with_tables(page: str, results: Path = RESULTS) -> str:
    """Return a page with its tables written anew.

    Raises:
        ValueError: if a table of the page has no results.
    """

    def table(match: re.Match[str]) -> str:
        name, path = match[1], results / f"{match[1]}.json"
        if not path.exists():
            raise ValueError(f"there are no results for the table {name} of the page: {path}")
        found = json.loads(path.read_text())
        lines = rounds_table(found) if name == ROUNDS.stem else printed(found)
        return "\n".join([f"<!-- {name} -->", "", *lines, "", f"<!-- end of {name} -->"])

    return re.sub(r"<!-- (\w+) -->\n.*?<!-- end of \1 -->", table, page, flags=re.DOTALL)


def printed(found: Results) -> Iterator[str]:
    """Yield the lines of a table that a command has printed."""
    yield from ("```bash", f"uv run python -m {found['command']}", "```", "", "```text")
    yield from found["output"].rstrip().splitlines()
    yield from ("```", "", _measured(found["environment"]))


def rounds_table(found: Results) -> Iterator[str]:
    """Yield the lines of the table of rounds, and of the rivals' table below it."""
    yield from (_HEADER, "|---|" + "---|" * (_HEADER.count("|") - 2))
    for name, result in found.items():
        yield row(name, result)
    rivals = sorted({rival for result in found.values() for rival in result["rivals"]})
    if rivals:
        yield from (
            "",
            f"| seconds of a round, of the plain loop's | ours | {' | '.join(rivals)} |",
        )
        yield "|---|---|" + "---|" * len(rivals)
        for name, result in found.items():
            if result["rivals"]:
                run = _runs(result)[-1]
                cells = [f"{ratio(run['ours'], run['plain']):.2f}"]
                cells += [of_plain(result["rivals"].get(rival)) for rival in rivals]
                yield f"| {name} | {' | '.join(cells)} |"
    by_name = {name: f"{_difference(result):.0e}" for name, result in found.items()}
    differences = ", ".join(f"{name} {difference}" for name, difference in by_name.items())
    yield from ("", f"Differences: {differences}.", "")
    groups: dict[str, list[str]] = {}
    for name, result in found.items():
        groups.setdefault(_measured(result["environment"]), []).append(name)
    for where, names in groups.items():
        yield where if len(groups) == 1 else f"{', '.join(names)}: {where}"


def row(name: str, result: Results) -> str:
    """Return one workload's row of the table."""
    short, long = _runs(result)
    plain = median(long["plain"])
    best = next(iter(result["variants"]["seconds"]))
    starts = {n: column["start_up"] for n, column in result["starts"].items()}
    of_fastest = _total(starts["ours, 100"], ratio(short["ours"], short["plain"]) * plain)
    of_fastest /= min(
        _total(starts[variant], seconds * plain)
        for variant, seconds in _shares(result).items()
        if variant in starts
    )
    cells = [
        f"**{name}**: {result['title']}",
        f"{plain:.3g} s",
        f"{best}: {ratio(long['best'], long['plain']):.2f}",
        f"{long['engine']}: {ratio(long['ours'], long['plain']):.2f}",
        f"**{ratio(long['ours'], long['best']):.2f}**",
        f"{starts['ours, 2000']:.0f} s",
        f"{short['engine']}: {ratio(short['ours'], short['plain']):.2f}",
        f"**{of_fastest:.2f}**",
    ]
    return f"| {' | '.join(cells)} |"


def _runs(result: Results) -> tuple[Results, Results]:
    return result["runs"]["100"], result["runs"]["2000"]


def _difference(result: Results) -> float:
    return max(float(run["difference"]) for run in _runs(result))


def _total(start: float, seconds: float) -> float:
    return start + 100 * seconds


def _shares(result: Results) -> dict[str, float]:
    """Return each loop's seconds, of the plain loop's; of the fastest as measured in turn."""
    seconds = result["variants"]["seconds"]
    shares = {variant: took / seconds["sgd"] for variant, took in seconds.items()}
    long = _runs(result)[1]
    return shares | {next(iter(seconds)): ratio(long["best"], long["plain"])}


def of_plain(column: Results | None) -> str:
    """Return a rival's seconds of a round, of the plain loop's, or the reason why there are none."""
    if column is None:
        return "-"
    if "failure" in column:
        return f"n/a: {column['failure']}"
    return f"{ratio(column['seconds'], column['bare']):.3g}"


def _measured(environment: dict[str, str]) -> str:
    where = dict(environment)
    begin = f"Measured {where.pop('date')} at `{where.pop('commit')}`"
    if "torch" in where:
        begin += f", torch {where.pop('torch')}"
    return ", ".join([begin, *where.values()]) + "."
