"""Files that a search without gradients writes into its folder.

evaluated.csv         every scored architecture with its costs, in the order of the search
front.png, front.svg  scores over one cost, with the Pareto front
best.yaml             configuration that trains the best architecture (`export`)
"""

from __future__ import annotations

import csv
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from fl_lightning.core.errors import ConfigurationError
from fl_lightning.nas.pictures import front_figure, save
from fl_lightning.nas.search.problem import Evaluated, SearchResult, shown

_AXES = {"flops": "multiply-adds", "params": "parameters", "latency_ms": "latency (ms)"}


def write_evaluated(path: Path, result: SearchResult) -> None:
    """Write all scored architectures of a search as a CSV file."""
    measures = list(result.evaluated[0].costs)
    with path.open("w", newline="", encoding="utf-8") as file:
        rows = csv.writer(file)
        rows.writerow(["architecture", "score", *measures])
        for one in result.evaluated:
            rows.writerow([one.architecture, one.score, *(one.costs[m] for m in measures)])


def draw_front(path: Path, result: SearchResult, *, measure: str, score: str) -> None:
    """Draw the Pareto front of a search; architectures with score -∞ are left out.

    Args:
        path: path of the picture, without an ending.
        result: result of the search.
        measure: name of the cost on the horizontal axis.
        score: label of the score axis.
    """
    useful = [one for one in result.evaluated if one.score > -math.inf]
    costs, scores = [one.costs[measure] for one in useful], [one.score for one in useful]
    save(front_figure(costs, scores, cost=_AXES.get(measure, measure), score=score), path)


def export(
    path: Path, found: Evaluated, configuration: Mapping[str, Any], notes: Sequence[str]
) -> None:
    """Write the configuration that trains an architecture, with score and costs as comments.

    Args:
        path: path of the YAML file.
        found: the architecture with its score and costs.
        configuration: configuration that trains the architecture, see `retraining`.
        notes: further comments.

    Raises:
        ConfigurationError: if the file cannot be written.
    """
    costs = [f"{name}: {shown(value)}" for name, value in found.costs.items()]
    comments = [f"# {line}\n" for line in (*notes, f"score: {found.score:.6g}", *costs)]
    text = yaml.safe_dump(
        configuration, sort_keys=False, allow_unicode=True, default_flow_style=None, width=100
    )
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("".join(comments) + text, encoding="utf-8")
    except OSError as error:
        raise ConfigurationError(f"export: {path} cannot be written: {error.strerror}") from None


def front_rows(result: SearchResult, measure: str, score: str) -> tuple[list[str], list[list[str]]]:
    """Return the header and the rows of a table of the Pareto front, cheapest first."""
    measures = [name for name in result.evaluated[0].costs if name != "activations"]
    rows = [
        [_score(one.score), *(shown(one.costs[name]) for name in measures)]
        for one in result.front(measure)
    ]
    return ["score" if score in measures else score, *measures], rows


def _score(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 1e5 else f"{value:.4g}"
