"""Published results of NAS-Bench-201 for every cell, from a file of the user.

A CSV file with a header, a row a cell; other columns are ignored, the order is free:

    ArchitectureString              the cell, |op~0|+|op~0|op~1|+|op~0|op~1|op~2|
    CIFAR10TestAccuracy200Epochs    mean test accuracy in percent, after 200 epochs
    CIFAR100TestAccuracy200Epochs   of networks trained with different seeds
    ImageNetTestAccuracy200Epochs   on ImageNet-16-120

Nothing of the benchmark is part of this package. Source: Dong & Yang 2020, ICLR, section 2.3.
"""

from __future__ import annotations

import csv
import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Literal

import numpy as np

from fl_lightning.core.errors import ConfigurationError
from fl_lightning.nas.spaces.nas_bench_201 import NASBench201
from fl_lightning.nas.spaces.space import Architecture

DataSet = Literal["cifar10", "cifar100", "imagenet16_120"]
CELL_COLUMN = "ArchitectureString"
COLUMNS: dict[DataSet, str] = {
    "cifar10": "CIFAR10TestAccuracy200Epochs",
    "cifar100": "CIFAR100TestAccuracy200Epochs",
    "imagenet16_120": "ImageNetTestAccuracy200Epochs",
}


@dataclass(frozen=True, eq=False)
class NASBench201Table:
    """Test accuracies in percent of cells of NAS-Bench-201; `read` makes one.

    Attributes:
        path: of the file, for messages.
        rows: the row of each cell.
        accuracies: of each data set, (num_cells,).
    """

    path: Path
    rows: Mapping[Architecture, int]
    accuracies: Mapping[DataSet, np.ndarray]

    @classmethod
    def read(cls, path: str | Path) -> NASBench201Table:
        """Read a file of the format above; it need not hold all cells.

        Raises:
            ConfigurationError: if there is no such file, a column is missing, or a row is malformed:
                no cell, a cell for the second time, no percentage.
        """
        path = Path(path)
        try:
            with path.open(newline="", encoding="utf-8-sig") as file:
                return cls(path, *_read(path, csv.DictReader(file)))
        except (OSError, UnicodeDecodeError, csv.Error) as error:
            raise ConfigurationError(
                f"the table of NAS-Bench-201, {path}, cannot be read: {error}"
            ) from error

    def __len__(self) -> int:
        return len(self.rows)

    def lookup(self, cell: Architecture | str) -> dict[DataSet, float]:
        """Return a cell's test accuracy on each data set, in percent.

        Raises:
            ConfigurationError: if it is no cell, or not in the table.
        """
        row = self._row(cell)
        return {name: float(column[row]) for name, column in self.accuracies.items()}

    def spearman(
        self, scores: Mapping[Architecture, float], data_set: DataSet = "cifar10"
    ) -> float:
        """Return the rank correlation of a score with the accuracy; equal values share ranks.

        Args:
            scores: of at least two cells, higher where it expects better; not all alike.
            data_set: whose accuracy.

        Raises:
            ConfigurationError: if a cell is not in the table.
            ValueError: if there is no such correlation.
        """
        from scipy.stats import spearmanr

        given = np.array(list(scores.values()), dtype=float)
        truth = self.accuracies[data_set][[self._row(cell) for cell in scores]]
        if not np.isfinite(given).all():
            raise ValueError("a score is not finite: it has no rank")
        if min(len(np.unique(given)), len(np.unique(truth))) < 2:
            raise ValueError("a rank correlation needs two cells of different score and accuracy")
        return float(spearmanr(given, truth).statistic)

    @cached_property
    def _space(self) -> NASBench201:
        return NASBench201()

    def _row(self, cell: Architecture | str) -> int:
        if isinstance(cell, str):
            cell = self._space.parse(cell)
        if cell.space != self._space:
            raise ConfigurationError(
                f"{self.path} knows cells of {NASBench201.name}, got one of {cell.space.name}: {cell}"
            )
        if cell not in self.rows:
            raise ConfigurationError(
                f"{cell} is not among the {len(self):,} cells of {self.path}: give a table that "
                "holds all cells of the space (--table)"
            )
        return self.rows[cell]


def _read(
    path: Path, reader: csv.DictReader[str]
) -> tuple[dict[Architecture, int], dict[DataSet, np.ndarray]]:
    header = reader.fieldnames or ()
    missing = [name for name in (CELL_COLUMN, *COLUMNS.values()) if name not in header]
    if missing:
        raise ConfigurationError(
            f"{path} lacks the columns {', '.join(missing)}; its first line has: "
            f"{', '.join(header) or 'nothing'}"
        )
    space = NASBench201()
    rows: dict[Architecture, int] = {}
    accuracies: dict[DataSet, list[float]] = {name: [] for name in COLUMNS}
    for entry in reader:
        where = f"{path}, line {reader.line_num}"
        try:
            cell = space.parse(entry[CELL_COLUMN] or "")
        except ConfigurationError as error:
            raise ConfigurationError(f"{where}: {error}") from None
        if cell in rows:
            raise ConfigurationError(f"{where}: {cell} is there for the second time")
        rows[cell] = len(rows)
        for name, column in COLUMNS.items():
            accuracies[name].append(_percentage(entry[column], f"{where}: {column}"))
    if not rows:
        raise ConfigurationError(f"{path} has a header and no cells")
    return rows, {name: np.array(column) for name, column in accuracies.items()}


def _percentage(text: str | None, what: str) -> float:
    try:
        value = float(text or "")
    except ValueError:
        value = math.nan
    if not 0 <= value <= 100:
        raise ConfigurationError(f"{what} must be a number from 0 to 100, got {text!r}")
    return value
