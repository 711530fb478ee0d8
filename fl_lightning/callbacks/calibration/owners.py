"""Whose examples a calibration reads: each client's of a federation, or all of them at once.

A central run is a federation with one client: everything that scores, sums and fits is written
once, over owners of examples. They are read in the order of their indices, without augmentation
where the data set knows how.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from lightning.pytorch import Trainer
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset

from fl_lightning.core.errors import ConfigurationError
from fl_lightning.data.federated import FederatedDataModule
from fl_lightning.data.training_set import evaluation_reader, loader_option
from fl_lightning.federation.federation import Federation
from fl_lightning.federation.loop import training_loader


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


def federation_of(trainer: Trainer) -> Federation | None:
    """Return the federation among a Trainer's callbacks; None in a central run."""
    callbacks = trainer.callbacks  # type: ignore[attr-defined]
    return next((c for c in callbacks if isinstance(c, Federation)), None)


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
        size, read = int(loader_option(loader, "batch_size") or 32), evaluation_reader(loader)
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
