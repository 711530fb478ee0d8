"""Data sets in memory that return whole batches; and targets as classes or numbers.

A selection of rows copies nothing: all sets of a source share the stored rows, and select some of them.
"""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Self, TypeAlias, final

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.utils.data import Dataset
from typing_extensions import override

from fl_lightning.core.errors import ConfigurationError
from fl_lightning.data.columns import column_of, is_missing


def as_tensor(values: Any, name: str) -> Tensor:
    """Convert an array to a tensor; floating-point numbers become float32.

    Raises:
        ConfigurationError: if the values are no numbers, or there are no rows.
    """
    try:
        tensor = torch.as_tensor(values)
    except (TypeError, ValueError, RuntimeError) as error:
        raise ConfigurationError(
            f"{name} must be an array of numbers, got {type(values).__name__}: {error}"
        ) from error
    if not tensor.ndim or not len(tensor):
        raise ConfigurationError(
            f"{name} must have one row per example, and at least one row, got shape {tuple(tensor.shape)}"
        )
    return tensor.float() if tensor.is_floating_point() else tensor


class StoredRows(Dataset[Any], ABC):
    """Base of data sets in memory that return whole batches; `TensorRows` is an example.

    Args:
        num_rows: number of stored rows.
        columns: one value per stored row, by name, for partitions; or a function that returns them.
            Columns are not in batches.
    """

    def __init__(self, num_rows: int, columns: Mapping[str, Any] | None = None) -> None:
        self._places = torch.arange(num_rows)  # numbers of the stored rows that this set selects
        self._columns = dict(columns or {})

    @abstractmethod
    def read(self, places: Tensor) -> Any:
        """Return a batch of stored rows, a tuple or a dict of tensors.

        Args:
            places: numbers of the stored rows, int64 of shape (B,).
        """

    @property
    def is_deterministic(self) -> bool:
        """True if equal indices always give equal batches, i.e. without random augmentation."""
        return True

    def evaluation(self) -> Self:
        """Return this data set without augmentation, for evaluation."""
        return self

    def gather(self, indices: Tensor) -> Any:
        """Return a batch of the rows at ``indices``, shape (B,), each in [0, N)."""
        return self.read(self._places.index_select(0, indices))

    def select(self, indices: Tensor) -> Self:
        """Return a data set of some rows, in the given order, which shares memory with this one."""
        chosen = copy.copy(self)
        chosen._places = self._places[indices]
        return chosen

    def __len__(self) -> int:
        return len(self._places)

    @property
    def column_names(self) -> list[str]:
        """Names of the columns by which examples can be partitioned, except ``targets``, which is an attribute."""
        return [name for name in self._columns if name != "targets"]

    def __getitem__(self, index: int | str | Sequence[int] | Tensor) -> Any:
        """Return an example for a number, a batch for several, a column for a name."""
        if isinstance(index, str):
            values = self._columns[index]
            return column_of(values() if callable(values) else values)[self._places.numpy()]
        indices = torch.as_tensor(index, dtype=torch.long)
        if indices.ndim:
            return self.gather(indices)
        place = range(len(self))[int(indices)]  # IndexError past the end, -1 is the last
        batch = self.gather(torch.tensor([place]))
        if isinstance(batch, dict):
            return {name: part[0] for name, part in batch.items()}
        return tuple(part[0] for part in batch)


@final
class TensorRows(StoredRows):
    """Data set of several tensors with one row per example; a batch has some rows of each tensor.

    Args:
        parts: tensors with N rows, the targets last. Batches are dicts if the tensors have names, else
            tuples.
        columns: see `StoredRows`.
        pixels: whether the first tensor is bytes, which batches have as numbers in [0, 1].

    Raises:
        ConfigurationError: if tensors have different numbers of rows.

    Example:
        >>> rows = TensorRows([torch.eye(3), torch.arange(3)], {"who": ["al", "bo", "al"]})
        >>> rows.gather(torch.tensor([2]))
        (tensor([[0., 0., 1.]]), tensor([2]))
        >>> rows.column_names, rows["who"]
        (['who'], array(['al', 'bo', 'al'], dtype='<U2'))
        >>> rows.select(torch.tensor([1]))["who"]
        array(['bo'], dtype='<U2')
    """

    def __init__(
        self,
        parts: Mapping[str, Tensor] | Sequence[Tensor],
        columns: Mapping[str, Any] | None = None,
        *,
        pixels: bool = False,
    ) -> None:
        self._names = list(parts) if isinstance(parts, Mapping) else None
        self._parts = list(parts.values() if isinstance(parts, Mapping) else parts)
        lengths = {len(part) for part in self._parts}
        if len(lengths) != 1:
            raise ConfigurationError(
                f"inputs and targets must have one row per example, got {sorted(lengths)} rows"
            )
        super().__init__(lengths.pop(), columns)
        self._pixels = pixels

    @property
    def targets(self) -> Tensor:
        """Targets of the selected examples: rows of the last tensor."""
        return self._parts[-1][self._places]

    @override
    def read(self, places: Tensor) -> Any:
        parts = [part.index_select(0, places) for part in self._parts]
        if self._pixels:
            parts[0] = parts[0].float().div_(255)
        return tuple(parts) if self._names is None else dict(zip(self._names, parts, strict=True))


TargetKind: TypeAlias = Literal["class", "number"]
MOST_WHOLE_CLASSES = 100  # more distinct integers may be quantities


@dataclass(frozen=True)
class Targets:
    """How a column of targets is read: as classes, with a value for each class, or as real numbers.

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
        """Decide, by the training examples' target values, whether targets are classes or real numbers.

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
                    f"{name}: target_type is number, but there are strings such as {values[0]!r}: set "
                    "target_type to class"
                )
            return cls(name, None)
        classes = np.unique(values)
        if kind is None and values.dtype.kind in "iu" and len(classes) > MOST_WHOLE_CLASSES:
            raise ConfigurationError(
                f"{name}: its {len(classes)} different integers could be classes or quantities: set "
                "target_type to class or number"
            )
        return cls(name, classes)

    @property
    def class_names(self) -> tuple[str, ...]:
        """Names of the classes by class number; empty if targets are real numbers."""
        return () if self.classes is None else tuple(map(str, self.classes.tolist()))

    def encode(self, values: npt.NDArray[Any], where: str) -> Tensor:
        """Convert target values, shape (N,): classes to class numbers in int64, real numbers to float32.

        Raises:
            ConfigurationError: for a class that the training examples do not have.
        """
        _check_present(values, f"{self.name} in {where}")
        if self.classes is None:
            return torch.from_numpy(values.astype(np.float32))
        known = np.isin(values, self.classes)
        if not known.all():
            raise ConfigurationError(
                f"{self.name}: {where} has the class {values[~known].tolist()[0]!r}, which no training "
                "example has: leave its examples out, or add some to the training examples"
            )
        return torch.from_numpy(np.searchsorted(self.classes, values).astype(np.int64))


def _check_present(values: npt.NDArray[Any], name: str) -> None:
    num_missing = sum(map(is_missing, values.ravel())) if values.dtype.kind in "fO" else 0
    if num_missing:
        raise ConfigurationError(
            f"{name}: {num_missing} of {len(values)} examples have no finite target: leave these examples "
            "out of the data"
        )
