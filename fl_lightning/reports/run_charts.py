"""Charts of a run's report, drawn from ``rounds.jsonl`` and the tables in the run's folder."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

import numpy as np

from fl_lightning.federation import logged_once
from fl_lightning.reports.charts import Panel, draw, series
from fl_lightning.reports.history import IDS, Curve, History
from fl_lightning.reports.panels import Line, curves, distribution, fan, table_map

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from pandas import DataFrame

_MOST_CHARTS = 4  # of a section
_MOST_ROWS = 200  # of a map: more are thinner than a pixel or two
_SHOWN_PATHS = 12  # most clients that have a line each
_EVALUATED = {"validation": "clients_validation.csv", "test": "clients_test.csv"}
PARTITION = "partition.csv"
LOCAL_MODELS = "local_models.csv"


# Heading, caption, and panels by title; a panel is None if the caption has its few different values.
Section: TypeAlias = tuple[str, str, dict[str, Panel | None]]


def run_sections(folder: Path, history: History) -> Iterator[tuple[str, str, Mapping[str, Panel]]]:
    """Yield the sections of a run's report: heading, caption and charts, the most important first.

    A section has at most 4 charts; one without charts is left out.
    """
    for title, caption, panels in (
        _validation(history),
        _training(history),
        _clients(folder),
        _local_models(folder),
        _distribution(history),
        _participants(history),
        _partition(read_table(folder / PARTITION)),
        _bytes(history, logged_once(folder)),
        _family(history, "privacy/", "Privacy", "Privacy spent so far, after each round."),
        _family(history, "mask/", "Masks", "Entries that train, after each round with a new mask."),
        _seconds(history),
    ):
        if known := _drawn(panels):
            yield title, caption, dict([*known.items()][:_MOST_CHARTS])


def _drawn(panels: Mapping[str, Panel | None]) -> dict[str, Panel]:
    return {title: panel for title, panel in panels.items() if panel is not None}


def read_table(path: Path) -> DataFrame:
    """Read a CSV file into a table, which is empty if the file does not exist."""
    import pandas  # half a second to import

    return pandas.read_csv(path) if path.exists() else pandas.DataFrame()


def evaluated_clients(folder: Path) -> dict[str, DataFrame]:
    """Return tables of per-client metrics after the fit, by stage: ``validation`` and ``test``, if evaluated."""
    tables = {stage: read_table(folder / name) for stage, name in _EVALUATED.items()}
    return {stage: table for stage, table in tables.items() if len(table)}


def _validation(history: History) -> Section:
    names = _best_first([n for n in history.names if _is_of(n, "val") and not n.endswith("_std")])
    caption = "The global model on the validation set, after each round."
    return "Validation", caption, {name: curves([_line(history.curve(name))]) for name in names}


def _training(history: History) -> Section:
    names = [n for n in history.names if f"{n}_std" in history.names]
    caption = (
        "The clients of each round on their own examples, while they train: mean over examples; the "
        "band is one standard deviation over clients."
    )
    if not names:
        names = [n for n in history.names if _is_of(n, "train")]
        caption = "Over the examples of each epoch, while it trains."
    panels: dict[str, Panel | None] = {}
    for name in names:
        curve, std = history.curve(name), history.curve(f"{name}_std")
        band = [std.get(number, 0.0) for number in curve] if std else None
        panels[name] = curves([_line(curve, std=band)])
    return "Training", caption, panels


def _clients(folder: Path) -> Section:
    panels: dict[str, Panel | None] = {}
    for stage, table in evaluated_clients(folder).items():
        owners = [f"client {client}" for client in table["client"]]
        names = [n for n in table.columns if n not in ("client", "num_examples")]
        for name in _best_first([n for n in names if not n.startswith("personal/")])[:2]:
            kinds = {"global": name, "personal": f"personal/{name}"}
            groups = {
                kind: dict(zip(owners, table[column].tolist(), strict=True))
                for kind, column in kinds.items()
                if column in names
            }
            # a module may log the same name in validation and test
            panels[f"{name} ({stage})" if name in panels else name] = distribution(groups, x=name)
    caption = "The last global model on the examples that each client holds out."
    return "Clients at the end", caption, panels


def _local_models(folder: Path) -> Section:
    table = read_table(folder / LOCAL_MODELS)
    panels: dict[str, Panel | None] = {}
    for name in _best_first([n for n in table.columns if n not in ("round", "client")])[:2]:
        known = table[["round", "client", name]].dropna()
        whole = known[known["client"] == "global"]
        local = known[known["client"] != "global"]
        lines = [
            Line(
                *(own["round"].tolist(), own[name].tolist()),
                label="" if number else "local models",
                colour=series(7),
            )
            for number, client in enumerate(local["client"].value_counts().index[:_SHOWN_PATHS])
            for own in [local[local["client"] == client]]
        ]
        lines.append(Line(whole["round"].tolist(), whole[name].tolist(), "global model"))
        panels[name] = curves(lines)
    caption = "The clients' models after local training, and the new global model, on the common test set."
    return "Local models and the global one", caption, panels


def _distribution(history: History) -> Section:
    panels: dict[str, Panel | None] = {}
    ids = history.of_clients(IDS)
    for name in history.client_names[:2]:
        rounds = history.of_clients(name)
        finite = {
            number: kept
            for number, values in rounds.items()
            if (kept := [value for value in values if math.isfinite(value)])
        }
        if not finite:
            continue
        quantiles = [np.percentile(v, [0, 10, 50, 90, 100]) for v in finite.values()]
        panels[name] = fan([*finite], np.transpose(quantiles))
        every = {
            f"client {int(client)}, round {number}": value
            for number, values in rounds.items()
            for client, value in zip(ids[number], values, strict=True)
        }
        panels[f"{name}, all rounds"] = distribution({name: every}, x=name)
    caption = "The clients of each round while they train: over rounds, and of all rounds together."
    return "Clients over rounds", caption, panels


def _participants(history: History) -> Section:
    sizes = history.curve("round/cohort_size")
    known = (("round/skipped", "skipped"), ("round/lost", "lost"))
    others = [(name, label) for name, label in known if any(history.curve(name).values())]
    lines = [_line(sizes, "sampled" if others else "")]
    for number, (name, label) in enumerate(others):
        lines.append(_line(history.curve(name), label, colour=series(number + 1)))
    panels: dict[str, Panel | None] = {}
    if sizes and (others or len(set(sizes.values())) > 1):
        panels["clients in each round"] = curves(lines, from_zero=True)
    took_part = Counter(int(c) for v in history.of_clients(IDS).values() for c in v)
    caption = "Number of sampled clients in each round." if panels else ""
    if took_part:
        counts = {f"client {client}": float(n) for client, n in took_part.items()}
        panels["rounds in which a client took part"] = distribution(
            {"clients": counts}, x="rounds", whole=True
        )
        caption += f" {_in_words(counts.values(), 'took part in {} rounds')}."
    return "Participants", caption.strip(), panels


def _in_words(counts: Collection[float], what: str, which: str = "") -> str:
    """Return words for a count per client, such as ``5 clients took part in 1 to 3 rounds``."""
    of = " to ".join(dict.fromkeys(f"{end(counts):g}" for end in (min, max)))
    return (
        f"{len(counts):,} clients{which} {what.format(of).removesuffix('s' if of == '1' else '')}"
    )


def partition_figure(table: DataFrame) -> Figure:
    """Draw how data is partitioned over clients: examples by client and class, and examples per client.

    Args:
        table: table of a `PartitionSummary`, or the file ``partition.csv`` of a run.
    """
    _, caption, panels = _partition(table)
    if drawn := _drawn(panels):
        return draw(drawn, caption)[0]
    sizes, clients = table[["num_examples"]].to_numpy(float), [str(c) for c in table["client"]]
    panel = table_map(sizes, x="", y="client", columns=["all"], rows=clients, legend="examples")
    return draw({"": panel}, caption)[0]


def _partition(table: DataFrame) -> Section:
    if table.empty:
        return "Partition", "", {}
    clients = table["client"].to_numpy()
    shown = np.unique(np.linspace(0, len(clients) - 1, min(len(clients), _MOST_ROWS)).astype(int))
    classes = [name for name in table.columns if name.startswith("class_")]
    panels: dict[str, Panel | None] = {}
    if classes:
        panels["examples of each class"] = table_map(
            table[classes].to_numpy(float)[shown],
            x="class",
            y="client",
            columns=[name.removeprefix("class_") for name in classes],
            rows=[str(client) for client in clients[shown]],
            legend="examples",
        )
    sizes = {f"client {c}": float(n) for c, n in zip(clients, table["num_examples"], strict=True)}
    panels["examples per client"] = distribution({"clients": sizes}, x="examples", whole=True)
    are_all = clients[-1] + 1 == len(clients)
    spaced = "" if are_all else ", evenly spaced by number,"
    caption = f"{_in_words(sizes.values(), 'have {} examples', spaced)}."
    if len(shown) < len(clients):
        caption += f" The map shows {len(shown)} of {len(clients):,} clients, evenly spaced."
    return "Partition", caption, panels


def _bytes(history: History, once: Mapping[str, float]) -> Section:
    from pandas import DataFrame

    up, down = (
        DataFrame(history.bytes_by_purpose(way, once)).sort_index() for way in ("up", "down")
    )
    if up.empty:
        return "Bytes", "", {}
    sent = {"from clients": up.sum(axis=1), "to clients": down.sum(axis=1)}
    if len(up.columns) > 1:
        sent |= {f"from clients: {purpose}": up[purpose].dropna() for purpose in up}
    unit, size = byte_unit(max(every.sum() for every in sent.values()))
    so_far = {label: every.cumsum() / size for label, every in sent.items()}
    total = [
        Line(c.index.tolist(), c.tolist(), label, colour=series(n))
        for n, (label, c) in enumerate(so_far.items())
    ]
    panels: dict[str, Panel | None] = {
        "bytes so far, all clients": curves(total, y=unit, from_zero=True)
    }
    if metrics := _best_first([n for n in history.names if _is_of(n, "val")]):
        known = so_far["from clients"].to_dict()
        pairs = [(known[n], v) for n, v in history.curve(metrics[0]).items() if n in known]
        line = Line([x for x, _ in pairs], [y for _, y in pairs], colour=series(2))
        panels[f"{metrics[0]} over bytes from clients"] = curves([line], x=unit)
    return "Bytes", "All clients together; whole messages, with their headers.", panels


def _family(history: History, prefix: str, title: str, caption: str) -> Section:
    """Return a report section with a curve for each metric whose name has a prefix; constant ones are left out."""
    found = {n: history.curve(n) for n in history.names if n.startswith(prefix)}
    moving: dict[str, Panel | None] = {
        name: curves([_line(c)]) for name, c in found.items() if len(set(c.values())) > 1
    }
    return title, caption, moving


def _seconds(history: History) -> Section:
    panels: dict[str, Panel | None] = {
        name: curves([_line(curve)], from_zero=True)
        for metric, name in (
            ("round/seconds", "seconds per round"),
            ("round/virtual_seconds", "virtual seconds per round"),
        )
        if (curve := history.curve(metric))
    }
    return "Time", "Local training and the server's step, without validation.", panels


def _line(
    curve: Curve, label: str = "", *, std: Sequence[float] | None = None, colour: str = series(0)
) -> Line:
    return Line([*curve], [*curve.values()], label, std, colour)


def _is_of(name: str, stage: str) -> bool:
    return name.startswith((f"{stage}/", f"{stage}_"))


def _best_first(names: Sequence[str]) -> list[str]:
    """Sort metric names: accuracies first, then losses, then other metrics."""
    rank = {"acc": 0, "loss": 1}
    return sorted(names, key=lambda name: next((r for w, r in rank.items() if w in name), 2))


def byte_unit(num_bytes: float) -> tuple[str, float]:
    """Return the unit in which to show a number of bytes, such as MB, and how many bytes it has."""
    units = (("GB", 1e9), ("MB", 1e6), ("kB", 1e3))
    return next(((unit, size) for unit, size in units if num_bytes >= size), ("bytes", 1.0))


def in_bytes(num_bytes: float) -> str:
    """Format a number of bytes as text with four digits and a unit, such as ``1.234 MB``."""
    unit, size = byte_unit(num_bytes)
    return f"{num_bytes / size:.4g} {unit}"
