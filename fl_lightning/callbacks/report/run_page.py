"""The page of one run, made of what is in its folder and of nothing else."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from fl_lightning.callbacks.report.history import History
from fl_lightning.callbacks.report.run_charts import byte_unit, evaluated_clients, run_charts
from fl_lightning.core.errors import ConfigurationError
from fl_lightning.core.report.charts import write_chart
from fl_lightning.core.report.page import Page
from fl_lightning.federation import is_of_test, logged_once

REPORT, FIGURES = "report.html", "figures"
_CONFIG = "config.yaml"


def write_report(folder: str | Path) -> Path:
    """Write ``report.html`` and ``figures/`` into a run's folder; return the page's path.

    It can be called at any time, also for a run that was stopped or is still training.

    Args:
        folder: of a run, with its ``rounds.jsonl``.

    Raises:
        ConfigurationError: if the folder has no rounds.
    """
    folder = Path(folder)
    history = History.read(folder)
    if not history.rounds:
        raise ConfigurationError(
            f"{folder} holds no rounds (rounds.jsonl): give the folder of a run that had a RunReport"
        )
    once = logged_once(folder)
    last = history.rounds[-1].number
    unit = "rounds" if history.curve("round/cohort_size") else "epochs"
    page = Page(_title(folder), f"{last} {unit} · {folder}")
    page.tiles(_facts(history, once))
    page.heading("Curves and clients")
    for chart in run_charts(folder, history):
        page.drawing(write_chart(chart, folder / FIGURES), chart.title, chart.caption)
    page.heading("Numbers")
    _numbers(page, folder, history, once)
    if (folder / _CONFIG).exists():
        page.verbatim((folder / _CONFIG).read_text(encoding="utf-8"), "Configuration")
    page.write(folder / REPORT)
    return folder / REPORT


def _title(folder: Path) -> str:
    return folder.parent.name if folder.name.startswith("version_") else folder.name


def _facts(history: History, once: Mapping[str, float]) -> list[tuple[str, str]]:
    last = history.rounds[-1]
    tests = {name: value for name, value in once.items() if is_of_test(name)}
    facts = [(name, f"{value:.4g}") for name, value in tests.items()][:3]
    shown = [name for name in history.names if name.startswith(("val/", "val_"))]
    for name in shown[:2]:
        number, value = [*history.curve(name).items()][-1]
        of = "" if number == last.number else f", after {number}"
        facts.append((f"{name}, last{of}", f"{value:.4g}"))
    facts.append(("rounds" if "round/cohort_size" in history.names else "epochs", str(last.number)))
    if asked := history.curve("round/cohort_size"):
        facts.append(("clients per round", f"{statistics.fmean(asked.values()):.4g}"))
    facts += _bytes(history, once)
    if seconds := history.curve("round/seconds"):
        facts.append(("seconds of rounds", f"{sum(seconds.values()):.4g}"))
    for name, words in (("", "ε"), ("_unamplified", "ε without amplification by sampling")):
        if epsilon := history.curve(f"privacy/epsilon{name}"):
            facts.append((words, f"{[*epsilon.values()][-1]:.4g}"))
    return facts


def _bytes(history: History, once: Mapping[str, float]) -> Iterator[tuple[str, str]]:
    for way, words in (("up", "from clients"), ("down", "to clients")):
        of = {p: sum(c.values()) for p, c in history.bytes_by_purpose(way, once).items()}
        if of:
            yield f"bytes {words}", _size(sum(of.values()))
        if len(of) > 1:
            yield from ((f"bytes {words}: {purpose}", _size(n)) for purpose, n in of.items())


def _numbers(page: Page, folder: Path, history: History, once: Mapping[str, float]) -> None:
    ends = {name: curve for name in history.names if (curve := history.curve(name))}
    if once:
        rows = [[name, f"{value:.6g}"] for name, value in once.items()]
        page.table(["logged once", "value"], rows)
    for stage, table in evaluated_clients(folder).items():
        rows = [
            [name, *_spread(values)]
            for name, values in table.columns.items()
            if name not in ("client", "num_examples")
        ]
        head = [f"clients, {stage}", "mean", "std", "min", "median", "max"]
        page.table(head, rows, fold=f"Over {len(table)} clients ({stage})")
    rows = [
        [name, f"{[*c.values()][-1]:.6g}", f"{min(c.values()):.6g}", f"{max(c.values()):.6g}"]
        for name, c in ends.items()
    ]
    page.table(["logged", "last", "least", "most"], rows, fold="Everything that was logged")


def _spread(values: Sequence[float]) -> list[str]:
    known = [value for value in values if math.isfinite(value)]
    if not known:
        return ["-"] * 5
    numbers = (
        statistics.fmean(known),
        statistics.pstdev(known),
        min(known),
        statistics.median(known),
        max(known),
    )
    return [f"{number:.4g}" for number in numbers]


def _size(num_bytes: float) -> str:
    unit, size = byte_unit(num_bytes)
    return f"{num_bytes / size:.4g} {unit}"
