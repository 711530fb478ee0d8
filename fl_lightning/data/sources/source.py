"""Base of all data sources: data modules with a training, a validation and a test set.

A source can train a model centrally, and a federation divides its training set among clients. Reading a
batch example by example costs more than the local step itself for small models. So a set returns a whole
batch for a list of indices, and loaders request whole batches (`batch_size=None` and a `BatchSampler`),
without worker processes.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from lightning.pytorch import LightningDataModule
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, Sampler, SequentialSampler

from fl_lightning.core.errors import ConfigurationError
from fl_lightning.core.seeds import derive_seed, run_seed, torch_generator
from fl_lightning.data.partitions.partition import stratified_split


@dataclass(frozen=True)
class Loaded:
    """Training, validation and test set that a source has read; a missing set is held out from the training set.

    Attributes:
        train: training examples, with ``select(indices)`` and perhaps ``targets``, shape (N, …).
        val: validation examples.
        test: test examples.
        class_names: names of the classes by number; empty if targets are no classes.
    """

    train: Any
    val: Any = None
    test: Any = None
    class_names: tuple[str, ...] = ()


class Source(LightningDataModule, ABC):
    """Base of all data sources; subclasses define `load`. `Digits` is an example.

    Args:
        batch_size: examples per batch; the last batch of a pass may be smaller.
        val_fraction: fraction of the training examples held out for validation, in [0, 1), if there is
            no validation set; the same share of every class if targets are classes.
        test_fraction: fraction of the training examples held out for the test, in the same way.
        fraction: fraction of the training examples that is used, in (0, 1]; the same share of every class
            if targets are classes. Validation and test examples do not depend on it.
        seed: seed of the held-out examples and the order of central training; the run's seed if None.

    Attributes:
        train_set: training examples, after `setup`.
        val_set: validation examples, after `setup`.
        test_set: test examples, after `setup`.
        class_names: names of the classes by number, after `setup`; empty if targets are no classes.
        num_classes: number of classes, after `setup`.

    Raises:
        ConfigurationError: naming every setting out of range.
    """

    train_set: Any
    val_set: Any
    test_set: Any
    class_names: tuple[str, ...]
    num_classes: int

    def __init__(
        self,
        *,
        batch_size: int = 32,
        val_fraction: float = 0.1,
        test_fraction: float = 0.2,
        fraction: float = 1.0,
        seed: int | None = None,
    ) -> None:
        found = [*self.issues()]
        if batch_size < 1:
            found.append(f"batch_size must be at least 1 example, got {batch_size}")
        for option, share in (("val_fraction", val_fraction), ("test_fraction", test_fraction)):
            if not 0 <= share < 1:
                found.append(f"{option} must be in [0, 1), got {share}: 0 holds out none")
        if not 0 < fraction <= 1:
            found.append(
                f"fraction must be in (0, 1], got {fraction}: 1 uses all training examples"
            )
        if found:
            raise ConfigurationError(f"{type(self).__name__}: {'; '.join(found)}")
        super().__init__()
        self.batch_size, self.seed = batch_size, seed
        self.val_fraction, self.test_fraction = val_fraction, test_fraction
        self.fraction = fraction

    def issues(self) -> Iterator[str]:
        """Yield an error message for each invalid option of a subclass."""
        yield from ()

    @abstractmethod
    def load(self) -> Loaded:
        """Read the data sets of this source; called once, by `setup`."""

    def setup(self, stage: str | None = None) -> None:
        """Load the examples, and split them into training, validation and test set; later calls do nothing."""
        if hasattr(self, "train_set"):
            return
        loaded = self.load()
        train, val, test = loaded.train, loaded.val, loaded.test
        if test is None:
            train, test = self._held_out(train, self.test_fraction, "test split")
        if val is None:
            train, val = self._held_out(train, self.val_fraction, "val split")
        if self.fraction < 1:
            train, _ = self._held_out(train, 1 - self.fraction, "left out")
        if not len(train):
            raise ConfigurationError(
                f"{type(self).__name__}: there are no training examples: hold out fewer, or use more data"
            )
        self.class_names, self.num_classes = loaded.class_names, len(loaded.class_names)
        self.val_set, self.test_set = (self.finished(each, trains=False) for each in (val, test))
        self.train_set = self.finished(train, trains=True)

    def finished(self, examples: Any, *, trains: bool) -> Any:
        """Return the final form of a training, validation or test set after the split; by default the set itself.

        Args:
            examples: the set.
            trains: whether it is the training set.
        """
        return examples

    def _held_out(self, examples: Any, fraction: float, purpose: str) -> tuple[Any, Any]:
        targets = getattr(examples, "targets", None)
        if targets is None or targets.ndim > 1 or targets.is_floating_point():
            targets = torch.zeros(len(examples), dtype=torch.long)  # no classes: one stratum
        seed = derive_seed(run_seed(self.seed), purpose)
        kept, held_out = stratified_split(targets, fraction, seed=seed)
        return examples.select(kept), examples.select(held_out)

    def train_dataloader(self) -> DataLoader[Any]:
        """Return batches of the training examples, in a new order each pass."""
        generator = torch_generator(run_seed(self.seed), "centralized")
        return self._batches(self.train_set, RandomSampler(self.train_set, generator=generator))

    def val_dataloader(self) -> DataLoader[Any] | list[Any]:
        """Return batches of the validation examples in order, or no loader if there are none."""
        return self._in_order(self.val_set)

    def test_dataloader(self) -> DataLoader[Any] | list[Any]:
        """Return batches of the test examples in order, or no loader if there are none."""
        return self._in_order(self.test_set)

    predict_dataloader = test_dataloader

    def _in_order(self, examples: Any) -> DataLoader[Any] | list[Any]:
        return self._batches(examples, SequentialSampler(examples)) if len(examples) else []

    def _batches(self, examples: Any, order: Sampler[int]) -> DataLoader[Any]:
        batches: Any = BatchSampler(order, self.batch_size, drop_last=False)
        return DataLoader(examples, batch_size=None, sampler=batches)
