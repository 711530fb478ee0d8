"""Charts of a run's report: each is made of the rounds and tables in the run's folder, or left out."""

from __future__ import annotations

import csv
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from fl_lightning.federation import logged_once
from fl_lightning.reports.charts import (
    Chart,
    Line,
    Panel,
    curves,
    fan,
    histogram,
    series,
    table_map,
)
from fl_lightning.reports.history import IDS, Curve, History

_MOST_PANELS = 4
_MOST_ROWS = 200  # of a map: more are thinner than a pixel or two
_SHOWN_PATHS = 12  # clients with a line of their own


def run_charts(folder: Path, history: History) -> Iterator[Chart]:
    """Yield the charts of a run, the most important first."""
    for name in (_validation, _training):
        yield from name(history)
    yield from _clients(folder)
    yield from _local_models(folder)
    yield from _distribution(history)
    yield from _participants(history)
    yield from _partition(folder)
    yield from _bytes(history, logged_once(folder))
    for prefix, title, caption in (
        ("privacy/", "Privacy", "What has been spent so far, after each round."),
        ("mask/", "Masks", "How many of the entries train, after each round that changed it."),
    ):
        yield from _family(history, prefix, title, caption)
    yield from _seconds(history)


def _validation(history: History) -> Iterator[Chart]:
    names = _best_first([n for n in history.names if _is_of(n, "val") and not n.endswith("_std")])
    panels = [curves(name, [_line(history.curve(name))]) for name in names[:_MOST_PANELS]]
    if panels:
        caption = "The global model on the validation set, after each round."
        yield Chart("validation", "Validation", caption, panels)


def _training(history: History) -> Iterator[Chart]:
    names = [n for n in history.names if f"{n}_std" in history.names]
    caption = (
        "The clients of each round on their own examples, while they train: mean over examples; the "
        "band is one standard deviation over clients."
    )
    if not names:
        names = [n for n in history.names if _is_of(n, "train")]
        caption = "Over the examples of each epoch, while it trains."
    panels = []
    for name in names[:_MOST_PANELS]:
        curve, std = history.curve(name), history.curve(f"{name}_std")
        band = [std.get(number, 0.0) for number in curve] if std else None
        panels.append(curves(name, [_line(curve, std=band)]))
    if panels:
        yield Chart("training", "Training", caption, panels)


def _clients(folder: Path) -> Iterator[Chart]:
    found = evaluated_clients(folder)
    panels: list[Panel] = []
    for table in found.values():
        names = [n for n in table.columns if n not in ("client", "num_examples")]
        own = [n for n in names if f"personal/{n}" in names]
        for name in _best_first([n for n in names if not n.startswith("personal/")])[:2]:
            groups = {"global" if name in own else name: table.columns[name]}
            if name in own:
                groups["personal"] = table.columns[f"personal/{name}"]
            panels.append(histogram(name, groups, x=name))
    if panels:
        caption = (
            "The last global model on the examples that each client holds out; clients are counted."
        )
        yield Chart("clients", "Clients at the end", caption, panels[:_MOST_PANELS])


def _local_models(folder: Path) -> Iterator[Chart]:
    table = Table.read(folder / LOCAL_MODELS).columns
    metrics = [n for n in table if n not in ("round", "client")]
    if not metrics:
        return
    rounds, clients = np.array(table["round"]), np.array(table["client"])
    is_global = np.isnan(clients)  # which has a word there
    shown = [c for c, _ in Counter(clients[~is_global].tolist()).most_common(_SHOWN_PATHS)]
    panels = []
    for name in _best_first(metrics)[:2]:
        values, lines = np.array(table[name]), []
        for number, client in enumerate(sorted(shown)):
            at = clients == client
            label = "local models" if number == 0 else ""
            local = rounds[at].tolist(), values[at].tolist()
            lines.append(Line(*local, label, colour=series(7)))
        whole = rounds[is_global].tolist(), values[is_global].tolist()
        lines.append(Line(*whole, "global model", colour=series(0)))
        panels.append(curves(name, lines))
    caption = (
        "Every client's model after its local training, and the global model that came of them, on the "
        "common test set."
    )
    yield Chart("local_models", "Local models and the global one", caption, panels)


def _distribution(history: History) -> Iterator[Chart]:
    panels: list[Panel] = []
    for name in history.client_names[:2]:
        finite = {
            number: kept
            for number, values in history.of_clients(name).items()
            if len(kept := [v for v in values if np.isfinite(v)])
        }
        if not finite:
            continue
        at = {"min": 0, "low": 10, "median": 50, "high": 90, "max": 100}
        percentiles = np.array([np.percentile(v, [*at.values()]) for v in finite.values()])
        quantiles = {key: percentiles[:, column].tolist() for column, key in enumerate(at)}
        panels.append(fan(name, [*finite], quantiles))
        last = max(finite)
        panels.append(histogram(f"{name} in round {last}", {name: finite[last]}, x=name))
    if panels:
        caption = "The clients of each round while they train: over rounds, and in the last one."
        yield Chart("client_metrics", "Clients over rounds", caption, panels)


def _participants(history: History) -> Iterator[Chart]:
    sizes = history.curve("round/cohort_size")
    if not sizes:
        return
    lines = [_line(sizes, "asked" if _others(history) else "")]
    for number, (name, label) in enumerate(_others(history)):
        lines.append(_line(history.curve(name), label, colour=series(number + 1)))
    panels = [curves("clients in each round", lines, from_zero=True)]
    caption = "How many clients were asked in each round"
    took_part = Counter(int(c) for v in history.of_clients(IDS).values() for c in v)
    if took_part:
        counts = {"clients": [*took_part.values()]}
        panels.append(
            histogram("rounds in which a client took part", counts, x="rounds", whole=True)
        )
        caption += f", and how often each of the {len(took_part)} that ever took part did"
    yield Chart("participants", "Participants", f"{caption}.", panels)


def _others(history: History) -> list[tuple[str, str]]:
    """Return the counts of clients whose update did not come, of those that ever happened."""
    known = (("round/skipped", "skipped"), ("round/lost", "lost"))
    return [(name, label) for name, label in known if any(history.curve(name).values())]


def _partition(folder: Path) -> Iterator[Chart]:
    table = Table.read(folder / PARTITION).columns
    if not table:
        return
    clients = np.array(table["client"], int)
    shown = np.unique(np.linspace(0, len(clients) - 1, min(len(clients), _MOST_ROWS)).astype(int))
    classes = [name for name in table if name.startswith("class_")]
    panels = []
    if classes:
        counts = np.array([table[name] for name in classes]).T[shown]
        labels = [name.removeprefix("class_") for name in classes]
        rows = [str(client) for client in clients[shown]]
        title, legend = "examples of each class", "examples"
        panels.append(
            table_map(
                title, counts, x="class", y="client", columns=labels, rows=rows, legend=legend
            )
        )
    sizes = {"clients": table["num_examples"]}
    panels.append(histogram("examples per client", sizes, x="examples", whole=True))
    of = (
        f"{len(shown)} of {len(clients)} clients, evenly spaced"
        if len(shown) < len(clients)
        else ""
    )
    caption = f"Who owns what. {f'The map shows {of}.' if of else ''}".strip()
    yield Chart("partition", "Partition", caption, panels, is_tall=len(shown) > 12)


def _bytes(history: History, once: Mapping[str, float]) -> Iterator[Chart]:
    purposes = history.bytes_by_purpose("up", once)
    up, down = (_sum(c.values()) for c in (purposes, history.bytes_by_purpose("down", once)))
    if not up:
        return
    unit, size = byte_unit(max(sum(up.values()), sum(down.values())))
    shown = {"from clients": up, "to clients": down}
    if len(purposes) > 1:
        shown |= {f"from clients: {purpose}": curve for purpose, curve in purposes.items()}
    total = [
        Line([*c], (np.cumsum([*c.values()]) / size).tolist(), label, colour=series(n))
        for n, (label, c) in enumerate(shown.items())
    ]
    panels = [curves("so far, all clients", total, y=unit, from_zero=True)]
    metrics = _best_first([n for n in history.names if _is_of(n, "val")])
    if metrics:
        curve, so_far = history.curve(metrics[0]), dict(zip(up, total[0].y, strict=True))
        pairs = [(so_far[n], value) for n, value in curve.items() if n in so_far]
        line = Line([x for x, _ in pairs], [y for _, y in pairs], colour=series(2))
        panels.append(curves(f"{metrics[0]} over bytes from clients", [line], x=unit))
    caption = "Of all clients; updates with their headers, as they are sent."
    yield Chart("bytes", "Bytes", caption, panels)


def _sum(curves_: Iterable[Curve]) -> Curve:
    total: Counter[int] = Counter()
    for curve in curves_:
        total.update(curve)
    return dict(sorted(total.items()))


def _family(history: History, prefix: str, title: str, caption: str) -> Iterator[Chart]:
    """Yield a chart of the metrics with a prefix that change; one-off numbers are in the table."""
    found = {n: history.curve(n) for n in history.names if n.startswith(prefix)}
    moving = {n: c for n, c in found.items() if len(set(c.values())) > 1}
    if moving:
        panels = [curves(name, [_line(curve)]) for name, curve in moving.items()]
        yield Chart(prefix.strip("/"), title, caption, panels[:_MOST_PANELS])


def _seconds(history: History) -> Iterator[Chart]:
    seconds = history.curve("round/seconds")
    if not seconds:
        return
    panels = [curves("seconds per round", [_line(seconds)], from_zero=True)]
    virtual = history.curve("round/virtual_seconds")
    if virtual:
        panels.append(curves("virtual seconds per round", [_line(virtual)], from_zero=True))
    else:
        so_far = dict(zip(seconds, np.cumsum([*seconds.values()]).tolist(), strict=True))
        panels.append(curves("seconds so far", [_line(so_far)], from_zero=True))
    caption = "Local training and the server's step, without validation."
    yield Chart("seconds", "Time", caption, panels)


def _line(
    curve: Curve, label: str = "", *, std: Sequence[float] | None = None, colour: str = series(0)
) -> Line:
    return Line([*curve], [*curve.values()], label, std, colour)


def _is_of(name: str, stage: str) -> bool:
    return name.startswith((f"{stage}/", f"{stage}_"))


def _best_first(names: Sequence[str]) -> list[str]:
    """Return accuracies first, losses next, then the others."""
    rank = {"acc": 0, "loss": 1}
    return sorted(names, key=lambda name: next((r for w, r in rank.items() if w in name), 2))


def byte_unit(num_bytes: float) -> tuple[str, float]:
    """Return the unit for a number of bytes, and its size."""
    units = (("GB", 1e9), ("MB", 1e6), ("kB", 1e3))
    return next(((unit, size) for unit, size in units if num_bytes >= size), ("bytes", 1.0))


_EVALUATED = {"validation": "clients_validation.csv", "test": "clients_test.csv"}
PARTITION = "partition.csv"
LOCAL_MODELS = "local_models.csv"


@dataclass(frozen=True)
class Table:
    """Numbers in named columns.

    Attributes:
        columns: name to values, all of one length; nan where there is none.
    """

    columns: Mapping[str, Sequence[float]]

    @classmethod
    def read(cls, path: Path) -> Table:
        """Return a file's numbers; without columns if there is no such file."""
        if not path.exists():
            return cls({})
        with path.open(newline="", encoding="utf-8") as file:
            rows = [*csv.DictReader(file)]
        names = rows[0].keys() if rows else ()
        return cls({name: [_number(row[name]) for row in rows] for name in names})

    def __len__(self) -> int:
        return len(next(iter(self.columns.values()), ()))


def evaluated_clients(folder: Path) -> dict[str, Table]:
    """Return every client's metrics at the end, by stage; only of stages that there are."""
    tables = {stage: Table.read(folder / name) for stage, name in _EVALUATED.items()}
    return {stage: table for stage, table in tables.items() if len(table)}


def _number(text: str | None) -> float:
    try:
        return float(text or "nan")
    except ValueError:
        return math.nan
