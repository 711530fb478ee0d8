"""Whose examples a calibration reads: each client's of a federation, or all of them at once.

A central run is a federation with one client: everything that scores, sums and fits is written
once, over owners of examples. They are read in the order of their indices, without augmentation
where the data set knows how. Each process visits its share of the owners; an error in one is raised in all.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from lightning.pytorch import Trainer
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset

from fl_lightning.core.errors import ConfigurationError
from fl_lightning.core.seeds import Integers
from fl_lightning.data.federated import FederatedDataModule
from fl_lightning.data.training_set import example_reader, loader_option
from fl_lightning.federation import Ranks, shares, training_loader
from fl_lightning.reports.progress import RoundProgressBar, federation_of


@dataclass(frozen=True)
class ExampleOwners:
    """Training examples by owner.

    Attributes:
        num_examples: of each owner, shape (owners,).
        indices: an owner's examples.
        read: from indices, shape (B,), to a batch, as it is ahead of `Visit.prepared`.
        batch_size: examples per batch.
    """

    num_examples: npt.NDArray[np.int64]
    indices: Callable[[int], Tensor]
    read: Callable[[Tensor], Any]
    batch_size: int

    def batches(self, indices: Tensor) -> Iterator[Any]:
        """Yield these examples."""
        return (self.read(part) for part in indices.split(self.batch_size) if len(part))


def clients_as_owners(data: FederatedDataModule) -> ExampleOwners:
    """Return the clients of a federation as owners of their examples."""
    clients = data.clients
    return ExampleOwners(
        clients.num_examples,
        clients.__getitem__,
        lambda indices: data.evaluation_batch(indices),  # not asked for where clients are elsewhere
        data.batch_size,
    )


def example_owners(trainer: Trainer) -> ExampleOwners:
    """Return the owners of the examples that a fit trains on.

    Raises:
        ConfigurationError: in a central run whose training data are not one `DataLoader` over a
            map-style data set.
    """
    data = trainer.datamodule  # type: ignore[attr-defined]
    if federation_of(trainer) is not None:
        return clients_as_owners(data)
    if isinstance(data, FederatedDataModule):
        size, read, everything = data.batch_size, data.evaluation_batch, data.train_indices
    else:
        loader = _checked(training_loader(trainer))
        size, read = int(loader_option(loader, "batch_size") or 32), example_reader(loader)
        everything = torch.arange(len(loader.dataset))  # type: ignore[arg-type]
    return ExampleOwners(np.array([len(everything)]), lambda _: everything, read, size)


def scoring_context(trainer: Trainer) -> AbstractContextManager[None]:
    """Return the context of forward passes: the Trainer's precision.

    Half precision with scaled gradients (16-mixed) is computed in single precision instead: squares
    of gradients are not scaled, and the least of them, which a mask is about, would be lost.
    """
    if trainer.precision == "16-mixed":
        return nullcontext()
    return trainer.precision_plugin.forward_context()


def _checked(loader: Any) -> DataLoader[Any]:
    if not isinstance(loader, DataLoader) or isinstance(loader.dataset, IterableDataset):
        raise ConfigurationError(
            "MaskCalibration reads one training DataLoader over a map-style data set (with "
            f"__len__ and __getitem__), got {type(loader).__name__}: calibrate by hand with "
            "fl_lightning.sparsity.calibrate, save_mask, and give mask_file"
        )
    return loader


def own_share(trainer: Trainer, owners: Integers, work: Integers) -> Integers:
    """Return the sorted positions of the clients that this process handles."""
    ranks = Ranks(trainer)
    if ranks.size == 1:
        return np.arange(len(owners))
    return shares(work, ranks.size)[ranks.rank]


def visit_together(trainer: Trainer, visit: Callable[[], None]) -> None:
    """Do this process's part; to be called by all of them.

    Raises:
        Exception: what went wrong here; in the other processes a `ConfigurationError` that says it.
    """
    failure: Exception | None = None
    try:
        visit()
    except Exception as error:  # noqa: BLE001 - a process that ended here would leave others waiting
        failure = error
    told = Ranks(trainer).gather(
        None if failure is None else f"{type(failure).__name__}: {failure}"
    )
    if failure is not None:
        raise failure
    if elsewhere := [words for words in told if words is not None]:
        raise ConfigurationError(f"another process failed: {elsewhere[0]}")


@contextmanager
def progress_bar(trainer: Trainer, what: str, total: int) -> Iterator[Callable[[], None]]:
    """Show a bar inside this block, and give the function that moves it by one.

    It is part of a `RoundProgressBar`; a Trainer with another bar, or none, shows nothing.
    """
    own = trainer.progress_bar_callback
    if isinstance(own, RoundProgressBar):
        with own.counting(what, total) as tick:
            yield tick
    else:
        yield lambda: None
