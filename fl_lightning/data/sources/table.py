"""Data source of tables (pandas, CSV, Parquet), with one feature per column of numbers or category."""

from __future__ import annotations

import gzip
import math
import zlib
from pathlib import Path
from typing import TYPE_CHECKING, Any, final

import numpy as np
import torch
from typing_extensions import override

from fl_lightning.core.errors import ConfigurationError
from fl_lightning.data.columns import column_of
from fl_lightning.data.sources.rows import TargetKind, Targets, TensorRows
from fl_lightning.data.sources.source import Loaded, Source

if TYPE_CHECKING:
    from pandas import DataFrame, Series

MOST_CATEGORIES = 1000  # per column: names and free text are no categories


@final
class Table(Source):
    """Reads a table into memory; a batch is features (B, F) in float32 and targets (B,).

    Numbers are features without scaling; scale them with `FederatedNormalize`. A column of strings,
    categories or truth values is one-hot encoded; for a value that no training row has, all its features
    are 0.
    Every column of the table, used or not, can be used for a natural partition:
    ``NaturalPartition("hospital")``.

    Args:
        data: a ``pandas.DataFrame``, or a file: .csv, .tsv or .parquet. Also .gz, for text.
        target: the column to predict.
        features: columns of the features; None for all others but those in ``ignore``.
        ignore: columns that are no features, e.g. numbers of patients.
        val: validation rows, likewise a frame or a file; None holds out some of ``data``.
        test: test rows, likewise.
        target_type: whether the target is a ``class`` or a ``number``; if None, real numbers are
            numbers, and strings and up to 100 distinct integers are classes.
        missing: number that replaces missing numbers; None rejects tables with missing numbers. A missing
            category becomes the category ``missing``.
        options: those of `Source`.

    Attributes:
        feature_names: names of the features, after `setup`.
        num_features: number of features, after `setup`.

    Raises:
        ConfigurationError: if a setting is out of range; at `setup` if a file or column is missing, or
            values are missing.
    """

    feature_names: tuple[str, ...]
    num_features: int

    def __init__(
        self,
        data: Any,
        target: str,
        *,
        features: list[str] | None = None,
        ignore: list[str] | None = None,
        val: Any = None,
        test: Any = None,
        target_type: TargetKind | None = None,
        missing: float | None = None,
        **options: Any,
    ) -> None:
        super().__init__(**options)
        if missing is not None and not math.isfinite(missing):
            raise ConfigurationError(f"Table: missing must be a finite number, got {missing}")
        self._data, self._val, self._test = data, val, test
        self._target, self._target_type, self._missing = target, target_type, missing
        self._chosen, self._ignored = features, ignore or []

    @override
    def load(self) -> Loaded:
        given = {"data": self._data, "val": self._val, "test": self._test}
        tables = {where: _read(table) for where, table in given.items() if table is not None}
        train = tables["data"]
        names = self._feature_columns(train)
        for where, table in tables.items():
            _check_columns(table, [self._target, *names], where)
        features = {
            where: self._features(table, train[names], where) for where, table in tables.items()
        }
        columns = features["data"].columns
        kind = Targets.of(
            column_of(train[self._target]), self._target_type, f"Table: column {self._target!r}"
        )
        self.feature_names, self.num_features = tuple(columns), len(columns)
        rows = {}
        for where, table in tables.items():
            inputs = torch.from_numpy(features[where].to_numpy(np.float32, copy=True))
            targets = kind.encode(column_of(table[self._target]), where)
            others = {str(name): table[name] for name in table.columns}
            rows[where] = TensorRows([inputs, targets], others)
        return Loaded(rows["data"], rows.get("val"), rows.get("test"), kind.class_names)

    def _feature_columns(self, table: DataFrame) -> list[str]:
        _check_columns(table, [self._target, *self._ignored, *(self._chosen or [])], "data")
        if self._chosen is not None:
            names = self._chosen
        else:
            taken = {self._target, *self._ignored}
            names = [name for name in table.columns if name not in taken]
        if self._target in names or not names or len(set(names)) < len(names):
            raise ConfigurationError(
                "Table: features must be at least one column, all different and none of them the target "
                f"{self._target!r}, got {names}"
            )
        return names

    def _features(self, table: DataFrame, train: DataFrame, where: str) -> DataFrame:
        """Encode a table's columns as numeric features, with the columns and categories of the training table."""
        import pandas

        parts: list[Any] = []
        for name in train.columns:
            if _is_number(train[name]):
                parts.append(self._numbers(table[name], where))
            else:
                known, values = _categories(train[name]), _texts(table[name])
                known_values = values.where(values.isin(known)).astype(
                    pandas.CategoricalDtype(known)
                )
                parts.append(pandas.get_dummies(known_values, prefix=name, prefix_sep="="))
        return pandas.concat(parts, axis=1)

    def _numbers(self, column: Series[Any], where: str) -> Series[Any]:
        if not _is_number(column):
            raise ConfigurationError(
                f"Table: column {column.name!r} has numbers in data, but {column.dtype} in {where}: convert "
                "one of them"
            )
        numbers = column.astype("float64").replace([np.inf, -np.inf], np.nan)
        if (unknown := int(numbers.isna().sum())) and self._missing is None:
            raise ConfigurationError(
                f"Table: column {column.name!r} of {where} has no finite number in {unknown} of "
                f"{len(numbers)} rows: set missing to the number that replaces them, or leave the column out "
                "with ignore"
            )
        return numbers if self._missing is None else numbers.fillna(self._missing)


def _is_number(column: Series[Any]) -> bool:
    from pandas.api import types

    return types.is_numeric_dtype(column) and not types.is_bool_dtype(column)


def _texts(column: Series[Any]) -> Series[str]:
    """Return a column's values as strings, with ``missing`` for missing values."""
    # without astype, pandas' categories would keep their order, and categories that no row has
    return column.astype(object).map(str).where(column.notna(), "missing")


def _categories(column: Series[Any]) -> list[str]:
    """Return the different values of a training column as sorted strings."""
    if column.dtype.kind in "mM":
        raise ConfigurationError(
            f"Table: column {column.name!r} has times: convert them to numbers, or leave the column out with "
            "ignore"
        )
    values = sorted(_texts(column).unique())
    if len(values) > MOST_CATEGORIES:
        raise ConfigurationError(
            f"Table: column {column.name!r} has {len(values)} different values, too many for one feature "
            f"each (at most {MOST_CATEGORIES}): leave the column out with ignore"
        )
    return values


def _check_columns(table: DataFrame, names: list[str], where: str) -> None:
    absent = [name for name in names if name not in table.columns]
    if absent:
        there = ", ".join(map(repr, table.columns))
        raise ConfigurationError(
            f"Table: {where} has no column {', '.join(map(repr, absent))}: its columns are {there}"
        )


def _read(table: Any) -> DataFrame:
    """Return a given pandas DataFrame, or read one from a CSV, TSV or Parquet file."""
    import pandas  # half a second to import

    if isinstance(table, pandas.DataFrame):
        _check_once([*table.columns])
        return table
    if not isinstance(table, (str, Path)):
        raise ConfigurationError(
            f"Table: data must be a pandas.DataFrame or the path of a file, got {type(table).__name__}"
        )
    path = Path(table)
    kind = path.with_suffix("").suffix if path.suffix == ".gz" else path.suffix
    if not path.is_file():
        raise ConfigurationError(f"Table: there is no file {str(path)!r}")
    if kind not in (".csv", ".tsv", ".parquet"):
        raise ConfigurationError(
            f"Table: a file must be .csv, .tsv or .parquet, got {path.name!r}: read it with pandas, and give "
            "the DataFrame"
        )
    try:
        return pandas.read_parquet(path) if kind == ".parquet" else _read_text(path, kind)
    except ConfigurationError:
        raise
    except (ValueError, OSError, EOFError, MemoryError, zlib.error, ImportError) as error:
        raise ConfigurationError(f"Table: {str(path)!r} cannot be read: {error}") from error


def _read_text(path: Path, kind: str) -> DataFrame:
    import pandas

    if path.suffix == ".gz":
        _check_packed(path)
    separator = "," if kind == ".csv" else "\t"
    # pandas would call a second column of a name x.1
    head = pandas.read_csv(path, sep=separator, header=None, nrows=1, dtype=str)
    _check_once(head.iloc[0].dropna().tolist())
    return pandas.read_csv(path, sep=separator)


# a compressed file above 100 MB of content may unpack to this many times its size; text unpacks to about 10
_MOST_PACKED = 100


def _check_packed(path: Path) -> None:
    """Raise ValueError for a decompression bomb, a small file whose content would fill the memory."""
    most, size = max(_MOST_PACKED * path.stat().st_size, 100_000_000), 0
    with gzip.open(path) as file:
        while block := file.read(1 << 20):
            size += len(block)
            if size > most:
                raise ValueError(
                    f"its {path.stat().st_size} bytes unpack to more than {most}: unpack and inspect it"
                )


def _check_once(names: list[Any]) -> None:
    if twice := [name for name in dict.fromkeys(names) if names.count(name) > 1]:
        raise ConfigurationError(
            f"Table: columns must have different names, but {', '.join(map(repr, twice))} occurs twice: "
            "rename one of the columns, or leave it out"
        )
