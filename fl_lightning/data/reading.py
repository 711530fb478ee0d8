"""Training examples as an evaluation sees them: by index, and without augmentation where known."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.utils.data import ConcatDataset, DataLoader, Dataset, Subset

from fl_lightning.data.shards import batch_reader


def loader_option(loader: DataLoader[Any], name: str) -> Any:
    """Return an option of a loader, e.g. ``batch_size``; None if it does not tell.

    Example:
        >>> loader_option(DataLoader([1, 2, 3], batch_size=2), "batch_size")
        2
    """
    # a loader with a batch sampler, or one that is asked for whole batches, keeps it there
    places = (loader, loader.batch_sampler, loader.sampler)
    return next((value for place in places if (value := getattr(place, name, None))), None)


def training_reader(loader: DataLoader[Any]) -> Callable[[Tensor], Any]:
    """Return the function from indices, shape (B,), to the batch that a loader makes of them.

    Example:
        >>> import torch
        >>> training_reader(DataLoader(["a", "b", "c"], collate_fn="".join))(torch.tensor([2, 0]))
        'ca'
    """
    return _reader(loader, loader.dataset)


def evaluation_reader(loader: DataLoader[Any]) -> Callable[[Tensor], Any]:
    """Return the function from indices, shape (B,), to a batch without augmentation, if known.

    A data set knows if it has a method ``evaluation`` that returns itself without.

    Example:
        >>> import torch
        >>> evaluation_reader(DataLoader([4.0, 5.0, 6.0]))(torch.tensor([2, 0]))
        tensor([6., 4.], dtype=torch.float64)
    """
    return _reader(loader, without_augmentation(loader.dataset))


def _reader(loader: DataLoader[Any], dataset: Dataset[Any]) -> Callable[[Tensor], Any]:
    # a loader without a batch sampler asks for what its sampler draws, here whole lists of indices
    return batch_reader(dataset, loader.collate_fn, at_once=loader.batch_sampler is None)


def without_augmentation(dataset: Dataset[Any]) -> Dataset[Any]:
    """Return a data set whose examples are not augmented, if it knows."""
    if type(dataset) is Subset:
        return Subset(without_augmentation(dataset.dataset), dataset.indices)
    if type(dataset) is ConcatDataset:
        return ConcatDataset([without_augmentation(part) for part in dataset.datasets])
    evaluation = getattr(dataset, "evaluation", None)
    return evaluation() if callable(evaluation) else dataset
