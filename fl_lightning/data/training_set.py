"""A source's training examples: what its loader says about them, as far as clients can do the same."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from lightning.pytorch.utilities import CombinedLoader
from torch import Tensor
from torch.utils.data import (
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
    default_collate,
)

from fl_lightning.core.errors import ConfigurationError
from fl_lightning.data.client_examples import ExampleTransform, changed_reader
from fl_lightning.data.reading import (
    evaluation_reader,
    loader_option,
    training_reader,
    without_augmentation,
)
from fl_lightning.data.samplers import Drawn, drawn_examples
from fl_lightning.data.shards import gathers, reads_by_index

# samplers of one example at a time
_SINGLE = SequentialSampler, RandomSampler, SubsetRandomSampler, WeightedRandomSampler


class TrainingSet:
    """The examples behind a training loader, by index.

    Args:
        loader: what a data module's ``train_dataloader`` returned.
        source: the data module's name, for errors.
        ignore_sampler: take all examples, once each, whatever the loader's sampler draws.

    Raises:
        ConfigurationError: if it is not one loader over a map-style data set, or draws in a way that
            clients cannot follow.

    Attributes:
        dataset: map-style, of N examples.
        drawn: which of them, and by which weights.

    Example:
        >>> examples = TrainingSet(DataLoader(range(10), batch_size=4), "Digits")
        >>> len(examples), examples.batch_size, examples.read(torch.tensor([7, 2]))
        (10, 4, tensor([7, 2]))
    """

    def __init__(self, loader: Any, source: str, *, ignore_sampler: bool = False) -> None:
        _check_loader(loader, f"{source}.train_dataloader()")
        self._loader: DataLoader[Any] = loader
        self.dataset: Dataset[Any] = loader.dataset
        self.drawn = Drawn() if ignore_sampler else drawn_examples(loader, source)

    def __len__(self) -> int:
        return len(self.dataset)  # type: ignore[arg-type]

    @cached_property
    def indices(self) -> Tensor:
        """The examples that are drawn, shape (M,)."""
        chosen = self.drawn.indices
        return torch.arange(len(self)) if chosen is None else chosen

    @property
    def batch_size(self) -> int | None:
        """Examples per batch; None if the loader does not tell."""
        size = loader_option(self._loader, "batch_size")
        return None if size is None else int(size)

    @property
    def drop_last(self) -> bool:
        """Whether a smaller last batch is left out."""
        return bool(loader_option(self._loader, "drop_last"))

    @property
    def read(self) -> Callable[[Tensor], Any]:
        """The function from indices, shape (B,), to the loader's batch of them."""
        return training_reader(self._loader)

    @property
    def read_for_evaluation(self) -> Callable[[Tensor], Any]:
        """The same without augmentation, if known."""
        return evaluation_reader(self._loader)

    def changed(
        self,
        transforms: Sequence[ExampleTransform],
        owners: Callable[[], npt.NDArray[np.int64]],
        seed: int,
        *,
        augmented: bool,
    ) -> Callable[[Tensor], Any]:
        """Return the function from indices, shape (B,), to a batch of examples changed one by one."""
        dataset = self.dataset if augmented else without_augmentation(self.dataset)
        return changed_reader(self._loader, dataset, transforms, owners, seed)

    @property
    def reads_by_index(self) -> bool:
        """Whether a batch is a plain selection of rows in memory, the same at every reading."""
        return reads_by_index(self.dataset, self._loader.collate_fn)

    @property
    def has_own_collate(self) -> bool:
        """Whether batches are made of examples by a function of the source's own."""
        collate = self._loader.collate_fn
        return collate is not default_collate and not gathers(self.dataset, collate)


def _check_loader(loader: Any, method: str) -> None:
    """Refuse what cannot be divided by index, or is not iterated as a DataLoader is."""
    if isinstance(loader, (Mapping, Sequence, CombinedLoader)) and not isinstance(loader, Dataset):
        raise ConfigurationError(
            f"{method} must return one DataLoader over a map-style data set, got several "
            f"({type(loader).__name__}): a client draws from one. Put their data sets into one, e.g. a "
            "ConcatDataset, or one whose items hold an example of each"
        )
    is_loader = isinstance(loader, DataLoader)
    if not is_loader or isinstance(loader.dataset, IterableDataset) or not _is_map(loader.dataset):
        found = type(loader.dataset if is_loader else loader).__name__
        raise ConfigurationError(
            f"{method} must return one DataLoader over a map-style data set (with __len__ and "
            f"__getitem__), got {found}: its examples are divided among the clients by index"
        )
    if loader.batch_sampler is None and isinstance(loader.sampler, _SINGLE):
        raise ConfigurationError(
            f"{method} has batch_size=None, so that each item of its data set is a batch, which cannot "
            "be divided among clients: return a DataLoader with a batch_size over single examples"
        )
    if type(loader).__iter__ is not DataLoader.__iter__:
        raise ConfigurationError(
            f"{method} returns a {type(loader).__name__}, whose own __iter__ clients do not go through: "
            "return a DataLoader, and do what it does in collate_fn or on_after_batch_transfer"
        )


def _is_map(dataset: Any) -> bool:
    return hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__")
