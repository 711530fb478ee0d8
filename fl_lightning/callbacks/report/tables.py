"""Tables that other callbacks leave in a run's folder, read again for its report."""

from __future__ import annotations

import csv
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

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
