"""Files that the command ``fl-lightning search`` writes.

report.html           best architecture, Pareto front with constraints and names, configuration
evaluated.csv         every scored architecture with its costs, in the order of the search
front.png, front.svg  scores over one cost, with the Pareto front
best.yaml             configuration that trains the best architecture (`export`)
"""

from __future__ import annotations

import csv
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from fl_lightning.core.errors import ConfigurationError
from fl_lightning.core.seeds import torch_generator
from fl_lightning.nas.search.problem import Constraint, Evaluated, SearchResult, shown
from fl_lightning.nas.spaces.space import Architecture, SearchSpace
from fl_lightning.reports.charts import Chart, Panel, Tooltip, series
from fl_lightning.reports.page import Page

_AXES = {"flops": "multiply-adds", "params": "parameters", "latency_ms": "latency (ms)"}
_UNITS = ((1e9, " G"), (1e6, " M"), (1e3, " k"))


def write_evaluated(path: Path, result: SearchResult) -> None:
    """Write all scored architectures of a search as a CSV file; makes the folder."""
    measures = list(result.evaluated[0].costs)
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="", encoding="utf-8") as file:
        rows = csv.writer(file)
        rows.writerow(["architecture", "score", *measures])
        for one in result.evaluated:
            rows.writerow([one.architecture, one.score, *(one.costs[m] for m in measures)])


def write_page(
    folder: Path,
    result: SearchResult,
    best: Evaluated,
    *,
    measure: str,
    score: str,
    constraints: Sequence[Constraint],
    configuration: str,
) -> None:
    """Write ``report.html``, ``front.png`` and ``front.svg``.

    Args:
        folder: folder of the search.
        result: result of the search.
        best: architecture that the search exports.
        measure: name of the cost of the Pareto front.
        score: name of the score.
        constraints: constraints of the search.
        configuration: text of the configuration that trains the best architecture.
    """
    space = best.architecture.space
    page = Page(f"Search of {space.name}", f"{len(result.evaluated)} networks scored · {folder}")
    page.tiles([(f"best {score}", _score(best.score)), *_costs(best)])
    bounds = ", ".join(map(str, constraints)) or "none"
    page.facts({"best architecture": str(best.architecture), "constraints": bounds})
    front = front_panel(result, measure=measure, score=score, constraints=constraints)
    page.charts([Chart("front", f"{score} over {measure}", front, names_are_long=True)], folder)
    page.heading(f"Pareto front of {score} and {measure}")
    head, rows = front_rows(result, measure, score)
    names = [str(one.architecture) for one in result.front(measure)]
    page.table(["architecture", *head], [[n, *row] for n, row in zip(names, rows, strict=True)])
    page.verbatim(configuration, "Configuration that trains the best architecture")
    page.write(folder / "report.html")


def front_panel(
    result: SearchResult, *, measure: str, score: str, constraints: Sequence[Constraint]
) -> Panel:
    """Return a panel of all scored networks, the Pareto front, and the bounds on the cost.

    Networks with score -∞ are left out. Tooltips name the networks.

    Args:
        result: result of the search.
        measure: name of the cost on the horizontal axis.
        score: label of the score axis.
        constraints: constraints of the search; those on another cost are not drawn.
    """
    useful = [one for one in result.evaluated if one.score > -math.inf]

    def panel(axes: Any) -> list[Tooltip]:
        places = [(one.costs[measure], one.score) for one in useful]
        front = [(one.costs[measure], one.score) for one in result.front(measure)]
        line = {"color": series(0), "markersize": 5, "drawstyle": "steps-post"}
        axes.scatter([x for x, _ in places], [y for _, y in places], s=14, color=series(7))
        axes.plot([x for x, _ in front], [y for _, y in front], "o-", label="Pareto front", **line)
        for bound in constraints:
            if bound.measure == measure:
                axes.axvline(bound.bound, color=series(1), linestyle="--", label=str(bound))
        axes.set(xlabel=_AXES.get(measure, measure), ylabel=score)
        axes.xaxis.set_major_formatter(lambda value, _: _short(value))
        axes.legend(loc="lower right")
        pairs = zip(places, useful, strict=True)
        return [
            Tooltip(x, y, f"{_score(y)}, {shown(x)} {measure}: {one.architecture}")
            for (x, y), one in pairs
        ]

    return panel


def _short(value: float) -> str:
    """Return the short form of a number on an axis, e.g. "250 k" or "1.5 M"."""
    for unit, name in _UNITS:
        if abs(value) >= unit:
            return f"{value / unit:g}{name}"
    return f"{value:g}"


def export(
    path: Path, found: Evaluated, configuration: Mapping[str, Any], notes: Sequence[str]
) -> str:
    """Write the configuration that trains an architecture, with score and costs as comments.

    Args:
        path: path of the YAML file.
        found: the architecture with its score and costs.
        configuration: configuration that trains the architecture, see `retraining`.
        notes: further comments.

    Returns:
        The text of the file.

    Raises:
        ConfigurationError: if the file cannot be written.
    """
    costs = [f"{name}: {value}" for name, value in _costs(found)]
    comments = [f"# {line}\n" for line in (*notes, f"score: {found.score:.6g}", *costs)]
    text = yaml.safe_dump(
        configuration, sort_keys=False, allow_unicode=True, default_flow_style=None, width=100
    )
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("".join(comments) + text, encoding="utf-8")
    except OSError as error:
        raise ConfigurationError(f"export: {path} cannot be written: {error.strerror}") from None
    return "".join(comments) + text


def write_sweep(
    path: Path, space: SearchSpace, configure: Callable[[Architecture], dict[str, Any]], seed: int
) -> None:
    """Write a file for ``fl-lightning sweep`` whose trials train networks of a space from scratch.

    Every decision is an option of the sweep. Hyperband (successive halving) stops trials early.

    Args:
        path: path of the YAML file, whose folder is made if it is missing.
        space: space of the networks.
        configure: function for the configuration that trains an architecture, see `retraining`.
        seed: seed of the random architecture of the first trial.
    """
    architecture = space.sample(torch_generator(seed, "first trial"))
    configuration = configure(architecture)
    network = configuration["model"]["init_args"]["network"]["init_args"]
    network["architecture"] = list(architecture.options)
    options = {
        f"model.network.architecture.{number}": list(decision.options)
        for number, decision in enumerate(space.decisions)
    }
    content = {"pruner": "hyperband", "base": configuration, "space": options}
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(yaml.safe_dump(content, sort_keys=False, allow_unicode=True))


def front_rows(result: SearchResult, measure: str, score: str) -> tuple[list[str], list[list[str]]]:
    """Return the header and the rows of a table of the Pareto front, cheapest first."""
    measures = [name for name in result.evaluated[0].costs if name != "activations"]
    rows = [
        [_score(one.score), *(shown(one.costs[name]) for name in measures)]
        for one in result.front(measure)
    ]
    return ["score" if score in measures else score, *measures], rows


def _costs(one: Evaluated) -> list[tuple[str, str]]:
    return [(name, shown(value)) for name, value in one.costs.items()]


def _score(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 1e5 else f"{value:.4g}"
