"""Encoding of a column of targets: class numbers, or real numbers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, Self, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from fl_lightning.core.errors import ConfigurationError

TargetKind: TypeAlias = Literal["class", "number"]
MOST_WHOLE_CLASSES = 100  # more distinct integers may be quantities


@dataclass(frozen=True)
class Targets:
    """The kind of a column of targets: classes or real numbers.

    Attributes:
        name: name of the column, for errors.
        classes: values of the classes in order, shape (C,); None for real numbers.

    Example:
        >>> kind = Targets.of(np.array(["no", "yes", "no"]), None, "paid")
        >>> kind.encode(np.array(["yes", "no"]), "test"), kind.class_names
        (tensor([1, 0]), ('no', 'yes'))
        >>> Targets.of(np.array([0.5, 2.0]), None, "price").encode(np.array([1.5]), "test")
        tensor([1.5000])
    """

    name: str
    classes: npt.NDArray[Any] | None

    @classmethod
    def of(cls, values: npt.NDArray[Any], kind: TargetKind | None, name: str) -> Self:
        """Determine the kind from the training values.

        Args:
            values: shape (N,).
            kind: kind set by the user; if None, real numbers are numbers, and strings and up to 100
                distinct integers are classes.
            name: name of the column.

        Raises:
            ConfigurationError: if the kind is ambiguous, or a value is missing.
        """
        _check_present(values, name)
        is_real = values.dtype.kind == "f"
        if kind == "number" or (kind is None and is_real):
            if values.dtype.kind not in "biuf":
                raise ConfigurationError(
                    f"{name}: target_type is number, and there are strings such as {values[0]!r}"
                )
            return cls(name, None)
        classes = np.unique(values)
        if kind is None and values.dtype.kind in "iu" and len(classes) > MOST_WHOLE_CLASSES:
            raise ConfigurationError(
                f"{name}: {len(classes)} different whole numbers may be classes or quantities: set "
                "target_type to class or to number"
            )
        return cls(name, classes)

    @property
    def class_names(self) -> tuple[str, ...]:
        """Names of the classes by number; empty for real numbers."""
        return () if self.classes is None else tuple(map(str, self.classes.tolist()))

    def encode(self, values: npt.NDArray[Any], where: str) -> Tensor:
        """Return targets of shape (N,): class numbers in int64, or numbers in float32.

        Raises:
            ConfigurationError: for a class that the training examples do not have.
        """
        _check_present(values, f"{self.name} in {where}")
        if self.classes is None:
            return torch.from_numpy(values.astype(np.float32))
        known = np.isin(values, self.classes)
        if not known.all():
            raise ConfigurationError(
                f"{self.name}: {where} holds the class {values[~known].tolist()[0]!r}, which no training "
                "example has"
            )
        return torch.from_numpy(np.searchsorted(self.classes, values).astype(np.int64))


def column_of(values: Any) -> npt.NDArray[Any]:
    """Convert a column to an array of numbers or strings, or of objects if values are missing.

    Example:
        >>> column_of(["b", "a"]), column_of([1, 2])
        (array(['b', 'a'], dtype='<U1'), array([1, 2]))
    """
    if isinstance(values, list) and any(map(_is_missing, values)):
        return np.array(values, dtype=object)
    array = np.asarray(values)
    if array.dtype == object and not any(map(_is_missing, array.ravel())):
        array = np.asarray(array.tolist())
    return array


def _is_missing(value: Any) -> bool:
    """True if a value is None, not a finite number, or pandas' missing value."""
    if isinstance(value, (float, np.floating)):
        return not np.isfinite(value)
    return value is None or type(value).__name__ in ("NAType", "NaTType")


def _check_present(values: npt.NDArray[Any], name: str) -> None:
    if values.dtype.kind == "f":
        num_missing = int((~np.isfinite(values)).sum())
    else:
        num_missing = sum(map(_is_missing, values.ravel())) if values.dtype == object else 0
    if num_missing:
        raise ConfigurationError(
            f"{name}: {num_missing} of {len(values)} examples have no finite target: leave them out of "
            "the data"
        )
