"""Files of the command ``fl-lightning search``.

report.html           best architecture, Pareto front with constraints and architectures, configuration
evaluated.csv         every scored architecture with its costs, in the order of the search
front.png, front.svg  scores over one cost, with the Pareto front
best.yaml             configuration that trains the best architecture (`Findings.export`)
"""

from __future__ import annotations

import csv
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from fl_lightning.core.errors import ConfigurationError
from fl_lightning.core.seeds import torch_generator
from fl_lightning.nas.search.problem import Evaluated, SearchResult, shown
from fl_lightning.nas.spaces.space import Architecture, SearchSpace
from fl_lightning.reports.charts import Panel
from fl_lightning.reports.page import Page
from fl_lightning.reports.panels import points

_AXES = {"flops": "multiply-adds", "params": "parameters", "latency_ms": "latency (ms)"}


@dataclass(frozen=True)
class Findings:
    """Result of an architecture search, with the names of score and cost for its Pareto front.

    Attributes:
        result: result of the search.
        measure: name of the cost on the Pareto front's axis.
        score: name of the score.
    """

    result: SearchResult
    measure: str
    score: str

    @property
    def best(self) -> Evaluated:
        """Architecture with the highest score; the cheapest if several are equal."""
        return [self.result.best, *self.result.front(self.measure)][-1]

    def write_evaluated(self, path: Path) -> None:
        """Write all scored architectures, with scores and costs, to a CSV file; create its folder if missing."""
        evaluated = self.result.evaluated
        measures = list(evaluated[0].costs)
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("w", newline="", encoding="utf-8") as file:
            rows = csv.writer(file)
            rows.writerow(["architecture", "score", *measures])
            for one in evaluated:
                rows.writerow([one.architecture, one.score, *(one.costs[m] for m in measures)])

    def write_page(self, folder: Path, configuration: str) -> None:
        """Write the search's report to ``report.html``, and its Pareto front to ``front.png`` and ``front.svg``.

        Args:
            folder: folder of the search.
            configuration: text of the configuration that trains the best architecture.
        """
        best, score, measure = self.best, self.score, self.measure
        count, space = len(self.result.evaluated), best.architecture.space
        page = Page(f"Search of {space.name}", f"{count} networks scored · {folder}")
        tiles = [] if score in best.costs else [(f"best {score}", _score(best.score))]
        page.tiles([*tiles, *_costs(best)])
        bounds = ", ".join(map(str, self.result.problem.constraints)) or "none"
        page.facts({"best architecture": str(best.architecture), "constraints": bounds})
        page.charts({"Front": self.front()}, folder)
        page.heading(f"Pareto front of {score} and {measure}")
        head, rows = self.front_rows()
        names = [str(one.architecture) for one in self.result.front(measure)]
        page.table(["architecture", *head], [[n, *row] for n, row in zip(names, rows, strict=True)])
        page.verbatim(configuration, "Configuration that trains the best architecture")
        page.write(folder / "report.html")

    def front(self) -> Panel:
        """Return a chart panel: all scored networks, the Pareto front, and constraints on the cost.

        Networks with score -∞ are left out. Tooltips have the architectures.
        """
        measure = self.measure
        useful = [one for one in self.result.evaluated if one.score > -math.inf]
        kept, constraints = self.result.front(measure), self.result.problem.constraints
        return points(
            [one.costs[measure] for one in useful],
            [one.score for one in useful],
            [
                f"{_score(one.score)}, {shown(one.costs[measure])} {measure}: {one.architecture}"
                for one in useful
            ],
            labels=(_AXES.get(measure, measure), self.score),
            steps=("Pareto front", [(one.costs[measure], one.score) for one in kept]),
            bounds={str(one): one.bound for one in constraints if one.measure == measure},
            scale="large",
        )

    def front_rows(self) -> tuple[list[str], list[list[str]]]:
        """Return the header and rows of a table of the Pareto front, cheapest architecture first."""
        costs = self.result.evaluated[0].costs
        measures = [name for name in costs if name != "activations"]
        shows_score = self.score not in measures  # else it is one of the costs
        rows = [
            [*[_score(one.score)] * shows_score, *(shown(one.costs[name]) for name in measures)]
            for one in self.result.front(self.measure)
        ]
        return [*[self.score] * shows_score, *measures], rows

    def export(self, path: Path, configuration: Mapping[str, Any], notes: Sequence[str]) -> str:
        """Write a YAML configuration that trains the best architecture, and return its text.

        Args:
            path: path of the YAML file.
            configuration: configuration that trains the architecture, see `retraining`.
            notes: comments for the file, to which score and costs are added.

        Raises:
            ConfigurationError: if the file cannot be written.
        """
        costs = [f"{name}: {value}" for name, value in _costs(self.best)]
        lines = (*notes, f"score: {self.best.score:.6g}", *costs)
        text = "".join(f"# {line}\n" for line in lines) + yaml.safe_dump(
            configuration, sort_keys=False, allow_unicode=True, default_flow_style=None, width=100
        )
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
        except OSError as error:
            raise ConfigurationError(
                f"export: {path} cannot be written: {error.strerror}"
            ) from None
        return text


def write_sweep(
    path: Path, space: SearchSpace, configure: Callable[[Architecture], dict[str, Any]], seed: int
) -> None:
    """Write a ``fl-lightning sweep`` file whose trials train architectures of a space from scratch.

    Every decision is an option of the sweep. Hyperband (successive halving) stops trials early.

    Args:
        path: path of the YAML file, whose folder is made if it is missing.
        space: space of the networks.
        configure: returns the configuration that trains an architecture, see `retraining`.
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


def _costs(one: Evaluated) -> list[tuple[str, str]]:
    return [(name, shown(value)) for name, value in one.costs.items()]


def _score(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 1e5 else f"{value:.4g}"
