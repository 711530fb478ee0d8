"""Data modules over rows of tensors in memory, with columns for natural partitions.

Loaders request whole batches (`batch_size=None` and a `BatchSampler`), so that a batch is one selection
of rows instead of many collated examples.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, final

import numpy as np
import torch
from lightning.pytorch import LightningDataModule
from torch import Tensor
from torch.utils.data import BatchSampler, DataLoader, Dataset, RandomSampler, SequentialSampler

from fl_lightning.core.errors import ConfigurationError
from fl_lightning.core.seeds import derive_seed, run_seed, torch_generator
from fl_lightning.data.partitions.partition import stratified_split


@dataclass(frozen=True)
class LoadedRows:
    """The rows of a source; a set that is None is held out from the training rows.

    Attributes:
        train: training rows.
        val: validation rows.
        test: test rows.
        class_names: names of the classes by number; empty if targets are no classes.
    """

    train: MemoryRows
    val: MemoryRows | None = None
    test: MemoryRows | None = None
    class_names: tuple[str, ...] = ()


class RowSource(LightningDataModule, ABC):
    """Base of `Arrays`, `Table`, `HuggingFace` and `Completions`; subclasses define `load`.

    Args:
        batch_size: examples per batch; the last batch of a pass may be smaller.
        val_fraction: fraction of the training examples held out for validation, in [0, 1), if there is
            no validation set; of every class equally if targets are classes.
        test_fraction: the same for the test.
        seed: seed of the held-out examples and the order of central training; the run's seed if None.

    Attributes:
        train_set: training examples, after `setup`.
        val_set: validation examples, after `setup`.
        test_set: test examples, after `setup`.
        class_names: names of the classes by number; empty if targets are no classes.
        num_classes: number of classes.

    Raises:
        ConfigurationError: if a setting is out of its range.
    """

    train_set: MemoryRows
    val_set: MemoryRows
    test_set: MemoryRows
    class_names: tuple[str, ...]
    num_classes: int

    def __init__(
        self,
        *,
        batch_size: int = 32,
        val_fraction: float = 0.1,
        test_fraction: float = 0.2,
        seed: int | None = None,
    ) -> None:
        name, issues = type(self).__name__, []
        if batch_size < 1:
            issues.append(f"batch_size must be at least 1, got {batch_size}")
        for option, share in (("val_fraction", val_fraction), ("test_fraction", test_fraction)):
            if not 0 <= share < 1:
                issues.append(f"{option} must be in [0, 1), got {share}: 0 holds out none")
        if issues:
            raise ConfigurationError(f"{name}: " + "; ".join(issues))
        super().__init__()
        self.batch_size = batch_size
        self._val_fraction, self._test_fraction = val_fraction, test_fraction
        self._seed = seed

    @abstractmethod
    def load(self) -> LoadedRows:
        """Read the rows; called once, by `setup`."""

    def setup(self, stage: str | None = None) -> None:
        """Load and split the rows, the first time; later calls do nothing."""
        if hasattr(self, "train_set"):
            return
        loaded = self.load()
        train, val, test = loaded.train, loaded.val, loaded.test
        if test is None:
            train, test = self._held_out(train, self._test_fraction, "test split")
        if val is None:
            train, val = self._held_out(train, self._val_fraction, "val split")
        if not len(train):
            raise ConfigurationError(f"{type(self).__name__}: there are no training examples")
        self.class_names, self.num_classes = loaded.class_names, len(loaded.class_names)
        self.val_set, self.test_set, self.train_set = val, test, train

    def _held_out(
        self, rows: MemoryRows, fraction: float, purpose: str
    ) -> tuple[MemoryRows, MemoryRows]:
        targets: Tensor | None = getattr(rows, "targets", None)
        if targets is None or targets.ndim > 1 or targets.is_floating_point():
            targets = torch.zeros(len(rows), dtype=torch.long)  # no classes: one stratum
        seed = derive_seed(run_seed(self._seed), purpose)
        kept, held_out = stratified_split(targets, fraction, seed=seed)
        return rows.select(kept), rows.select(held_out)

    def train_dataloader(self) -> DataLoader[Any]:
        """Return batches of the training examples, in a new order each pass."""
        generator = torch_generator(run_seed(self._seed), "centralized")
        return self._batches(self.train_set, RandomSampler(self.train_set, generator=generator))

    def val_dataloader(self) -> DataLoader[Any] | list[Any]:
        """Return batches of the validation examples in order, or no loader if there are none."""
        return self._in_order(self.val_set) if len(self.val_set) else []

    def test_dataloader(self) -> DataLoader[Any] | list[Any]:
        """Return batches of the test examples in order, or no loader if there are none."""
        return self._in_order(self.test_set) if len(self.test_set) else []

    predict_dataloader = test_dataloader

    def _in_order(self, rows: MemoryRows) -> DataLoader[Any]:
        return self._batches(rows, SequentialSampler(rows))

    def _batches(self, rows: MemoryRows, order: Any) -> DataLoader[Any]:
        batches: Any = BatchSampler(order, self.batch_size, drop_last=False)
        return DataLoader(rows, batch_size=None, sampler=batches)


def as_tensor(values: Any, name: str) -> Tensor:
    """Convert an array to a tensor; floating-point numbers become float32.

    Raises:
        ConfigurationError: if values are no numbers.
    """
    try:
        tensor = torch.as_tensor(values)
    except (TypeError, ValueError, RuntimeError) as error:
        raise ConfigurationError(
            f"{name} must be an array of numbers, got {type(values).__name__}: {error}"
        ) from error
    return tensor.float() if tensor.is_floating_point() else tensor


class MemoryRows(Dataset[Any], ABC):
    """A data set in memory that returns whole batches, with columns for partitions.

    Args:
        columns: functions by name that return one value per row, for partitions; not in batches.
        places: rows of the columns that are the rows of this set, shape (N,); None for all.
    """

    is_deterministic: ClassVar = True

    def __init__(
        self,
        columns: Mapping[str, Callable[[], Any]] | None = None,
        places: Tensor | None = None,
    ) -> None:
        self._columns, self._places = dict(columns or {}), places

    @abstractmethod
    def __len__(self) -> int:
        """Number of rows."""

    @abstractmethod
    def gather(self, indices: Tensor) -> Any:
        """Return a batch of the rows at ``indices``, shape (B,), each in [0, N)."""

    @abstractmethod
    def select(self, indices: Tensor) -> MemoryRows:
        """Return these rows only, in this order."""

    @property
    def column_names(self) -> list[str]:
        """Names of the columns for partitions; ``targets`` is always the last part instead."""
        return [name for name in self._columns if name != "targets"]

    def __getitem__(self, index: int | str | Sequence[int] | Tensor) -> Any:
        """Return an example for a number, a batch for several, a column for a name."""
        if isinstance(index, str):
            values = np.asarray(self._columns[index]())
            return values if self._places is None else values[self._places.numpy()]
        indices = torch.as_tensor(index, dtype=torch.long)
        if indices.ndim:
            return self.gather(indices)
        place = range(len(self))[int(indices)]  # IndexError past the end, -1 is the last
        batch = self.gather(torch.tensor([place]))
        if isinstance(batch, dict):
            return {name: part[0] for name, part in batch.items()}
        return tuple(part[0] for part in batch)

    def _chosen(self, indices: Tensor) -> Tensor:
        return indices if self._places is None else self._places[indices]


@final
class TensorRows(MemoryRows):
    """A data set that returns whole batches: rows of each of its tensors.

    Args:
        parts: tensors of N rows each. Batches are dicts if they have names, else tuples.
        columns: functions by name that return one value per row, for partitions; not in batches.
        pixels: whether the first part has bytes, which are converted to numbers in [0, 1].
        places: rows of the columns, see `MemoryRows`.

    Raises:
        ConfigurationError: if parts have different lengths.

    Example:
        >>> rows = TensorRows([torch.eye(3), torch.arange(3)], {"who": lambda: np.array(["al", "bo", "al"])})
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
        columns: Mapping[str, Callable[[], Any]] | None = None,
        *,
        pixels: bool = False,
        places: Tensor | None = None,
    ) -> None:
        super().__init__(columns, places)
        self._names = list(parts) if isinstance(parts, Mapping) else None
        self._parts = list(parts.values() if isinstance(parts, Mapping) else parts)
        lengths = {len(part) for part in self._parts}
        if len(lengths) != 1:
            raise ConfigurationError(
                f"inputs and targets must have one row an example, got {sorted(lengths)} rows"
            )
        self._pixels = pixels

    @property
    def targets(self) -> Tensor:
        """The targets, which are the last part."""
        return self._parts[-1]

    def __len__(self) -> int:
        return len(self._parts[0])

    def gather(self, indices: Tensor) -> Any:
        """Return a batch of the rows at ``indices``, shape (B,), each in [0, N)."""
        parts = [part.index_select(0, indices) for part in self._parts]
        if self._pixels:
            parts[0] = parts[0].float().div_(255)
        return tuple(parts) if self._names is None else dict(zip(self._names, parts, strict=True))

    def select(self, indices: Tensor) -> TensorRows:
        """Return these rows only, in this order."""
        parts = [part.index_select(0, indices) for part in self._parts]
        named = parts if self._names is None else dict(zip(self._names, parts, strict=True))
        return TensorRows(named, self._columns, pixels=self._pixels, places=self._chosen(indices))
