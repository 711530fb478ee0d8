"""Tables: pandas, CSV and Parquet."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, final

from fl_lightning.core.errors import ConfigurationError
from fl_lightning.data.sources.features import Features
from fl_lightning.data.sources.row_source import LoadedRows, RowSource
from fl_lightning.data.sources.rows import Rows
from fl_lightning.data.sources.targets import TargetKind, Targets, column_of

if TYPE_CHECKING:
    from pandas import DataFrame


@final
class Table(RowSource):
    """Rows of a table: a batch is features (B, F) in float32 and targets (B,).

    Numbers are features as they are; scale them with `FederatedNormalize`. A column of strings, of
    categories or of truth values becomes one feature a value, 1 where the row has it; a value that no
    training row has is 0 everywhere. Every column of the table, used or not, may tell whose a row is:
    ``NaturalPartition("hospital")``.

    Args:
        data: a ``pandas.DataFrame``, or a file: .csv, .tsv or .parquet. Also .gz, for text.
        target: the column to be predicted.
        features: columns that predict it; None for all others but those in ``ignore``.
        ignore: columns that are no features, e.g. numbers of patients.
        val: validation rows, likewise a frame or a file; None holds some of ``data`` out.
        test: test rows, likewise.
        target_type: whether the target is a ``class`` or a ``number``; None lets the values decide:
            real numbers are numbers, strings and up to 100 different whole numbers are classes.
        missing: the number that stands for a missing one; None refuses tables with missing numbers. A
            missing category is a category.
        batch_size: rows a batch; the last batch of a pass may be smaller.
        val_fraction: part of the rows held out for validation, in [0, 1), where ``val`` is None.
        test_fraction: part of the rows held out for the test, in [0, 1), where ``test`` is None.
        seed: decides which rows are held out and the order of central training. None takes the run's
            seed.

    Attributes:
        feature_names: a name for each feature, after `setup`.
        num_features: how many there are, after `setup`.

    Raises:
        ConfigurationError: for a setting out of range, and at `setup` for a file or column that is not
            there, or values that are missing.
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
        batch_size: int = 32,
        val_fraction: float = 0.1,
        test_fraction: float = 0.2,
        seed: int | None = None,
    ) -> None:
        super().__init__(
            batch_size=batch_size, val_fraction=val_fraction, test_fraction=test_fraction, seed=seed
        )
        self._data, self._val, self._test = data, val, test
        self._target, self._target_type, self._missing = target, target_type, missing
        self._chosen, self._ignored = features, ignore or []

    def load(self) -> LoadedRows:
        """Read and encode the tables.

        Raises:
            ConfigurationError: for a file or column that is not there, or values that are missing.
        """
        given = {"data": self._data, "val": self._val, "test": self._test}
        tables = {name: _read(table) for name, table in given.items() if table is not None}
        train = tables["data"]
        names = self._feature_columns(train)
        for where, table in tables.items():
            _check_columns(table, [self._target, *names], where)
        features = Features.of(train, names, self._missing)
        kind = Targets.of(
            column_of(train[self._target]), self._target_type, f"Table: column {self._target!r}"
        )
        self.feature_names, self.num_features = features.names, len(features.names)

        def rows(where: str) -> Rows | None:
            if where not in tables:
                return None
            table = tables[where]
            columns = {str(name): partial(_column, table, name) for name in table.columns}
            targets = kind.encode(column_of(table[self._target]), where)
            return Rows([features.encode(table, where), targets], columns)

        training = rows("data")
        assert training is not None
        return LoadedRows(training, rows("val"), rows("test"), kind.class_names)

    def _feature_columns(self, table: DataFrame) -> list[str]:
        _check_columns(table, [self._target, *self._ignored, *(self._chosen or [])], "data")
        if self._chosen is not None:
            names = self._chosen
        else:
            taken = {self._target, *self._ignored}
            names = [name for name in table.columns if name not in taken]
        if self._target in names or not names:
            raise ConfigurationError(
                f"Table: features must be columns other than the target {self._target!r}, at least "
                f"one, got {names}"
            )
        return names


def _column(table: DataFrame, name: Any) -> Any:
    return column_of(table[name])


def _read(table: Any) -> DataFrame:
    """Return a frame that is given or that a file holds."""
    try:
        import pandas
    except ImportError as error:
        raise ConfigurationError("Table needs pandas: pip install 'fl-lightning[table]'") from error
    if isinstance(table, pandas.DataFrame):
        return table
    path = Path(table) if isinstance(table, (str, Path)) else None
    if path is None:
        raise ConfigurationError(
            f"Table: data must be a pandas.DataFrame or the path of a file, got {type(table).__name__}"
        )
    if not path.is_file():
        raise ConfigurationError(f"Table: there is no file {str(path)!r}")
    kind = path.with_suffix("").suffix if path.suffix == ".gz" else path.suffix
    try:
        if kind == ".parquet":
            return pandas.read_parquet(path)
        if kind in (".csv", ".tsv"):
            return pandas.read_csv(path, sep="," if kind == ".csv" else "\t")
    except (ValueError, OSError, ImportError) as error:
        raise ConfigurationError(f"Table: {str(path)!r} cannot be read: {error}") from error
    raise ConfigurationError(
        f"Table: a file must be .csv, .tsv or .parquet, got {path.name!r}: read it with pandas and give "
        "the frame"
    )


def _check_columns(table: DataFrame, names: list[str], where: str) -> None:
    absent = [name for name in names if name not in table.columns]
    if absent:
        there = ", ".join(map(repr, table.columns))
        raise ConfigurationError(
            f"Table: {where} has no column {', '.join(map(repr, absent))}: there are {there}"
        )
