"""From columns of a table to features: numbers as they are, a category as one feature a value."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from fl_lightning.core.errors import ConfigurationError

if TYPE_CHECKING:
    from pandas import DataFrame, Series

MOST_CATEGORIES = 1000  # of one column: names and free text are no categories
MISSING = "missing"


@dataclass(frozen=True)
class Features:
    """Which features the columns become.

    Attributes:
        categories: by column, its values in their order; None for numbers.
        missing: what stands for a missing number; None refuses it.
    """

    categories: dict[str, npt.NDArray[Any] | None]
    missing: float | None

    @classmethod
    def of(cls, table: DataFrame, columns: list[str], missing: float | None) -> Self:
        """Learn the categories of the training rows.

        Raises:
            ConfigurationError: for columns that are neither numbers nor categories.
        """
        if missing is not None and not math.isfinite(missing):
            raise ConfigurationError(f"Table: missing must be a finite number, got {missing}")
        return cls({name: _categories(table[name], name) for name in columns}, missing)

    @property
    def names(self) -> tuple[str, ...]:
        """One name a feature: the column's, or column=value."""
        return tuple(
            name
            for column, values in self.categories.items()
            for name in ([column] if values is None else [f"{column}={value}" for value in values])
        )

    def encode(self, table: DataFrame, where: str) -> Tensor:
        """Return the features, float32 of shape (N, F).

        Raises:
            ConfigurationError: for missing numbers, and for other things where numbers were.
        """
        parts = [
            self._numbers(table[column], column, where)[:, None]
            if values is None
            else _names(table[column])[:, None] == values[None]
            for column, values in self.categories.items()
        ]
        return torch.from_numpy(np.concatenate([part.astype(np.float32) for part in parts], axis=1))

    def _numbers(self, column: Series[Any], name: str, where: str) -> npt.NDArray[np.float64]:
        if not _is_number(column):
            raise ConfigurationError(
                f"Table: column {name!r} holds numbers in the training rows, and in {where} "
                f"{column.dtype}"
            )
        numbers: npt.NDArray[np.float64] = column.to_numpy(np.float64, copy=True, na_value=np.nan)
        unknown = ~np.isfinite(numbers)
        if unknown.any() and self.missing is None:
            raise ConfigurationError(
                f"Table: column {name!r} of {where} has no finite number in {unknown.sum()} of "
                f"{len(numbers)} rows: set missing to the number that stands for it, or leave the "
                "column out with ignore"
            )
        numbers[unknown] = self.missing
        return numbers


def _categories(column: Series[Any], name: str) -> npt.NDArray[Any] | None:
    if _is_number(column):
        return None
    if column.dtype.kind in "mM":
        raise ConfigurationError(
            f"Table: column {name!r} holds times: make numbers of them, or leave it out with ignore"
        )
    values = np.unique(_names(column))
    if len(values) > MOST_CATEGORIES:
        raise ConfigurationError(
            f"Table: column {name!r} has {len(values)} different values, more than "
            f"{MOST_CATEGORIES} features: leave it out with ignore"
        )
    return values


def _is_number(column: Series[Any]) -> bool:
    from pandas.api import types

    return types.is_numeric_dtype(column) and not types.is_bool_dtype(column)


def _names(column: Series[Any]) -> npt.NDArray[Any]:
    """Return a column's values as strings."""
    is_missing = column.isna().to_numpy()
    names = [
        MISSING if gone else str(value) for gone, value in zip(is_missing, column, strict=True)
    ]
    return np.asarray(names, dtype=np.str_)
