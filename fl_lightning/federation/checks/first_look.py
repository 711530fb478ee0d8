"""Data that a model cannot take, found by a few examples before the first client trains."""

from __future__ import annotations

from typing import Any, Protocol, runtime_checkable

import torch
from lightning.pytorch import Trainer

from fl_lightning.core.seeds import preserve_global_generators
from fl_lightning.data.federated import FederatedDataModule

# examples that are looked at, evenly spaced over all clients'
_EXAMPLES = 64


@runtime_checkable
class ChecksBatches(Protocol):
    """A module that says whether a training batch fits it."""

    def check_batch(self, batch: Any) -> None:
        """Refuse a batch that it cannot train on.

        Raises:
            ConfigurationError: with what the model takes and what the data have.
        """


def check_data_fits(trainer: Trainer) -> None:
    """Have a module that knows how look at some of the data; nothing is drawn or changed.

    Raises:
        ConfigurationError: as the module says it.
    """
    module = trainer.lightning_module
    data: FederatedDataModule = trainer.datamodule  # type: ignore[attr-defined]
    if not isinstance(module, ChecksBatches):
        return
    indices = torch.from_numpy(data.clients.flat.indices)
    if not len(indices):
        return
    chosen = indices[:: max(1, len(indices) // _EXAMPLES)].long()
    with preserve_global_generators():
        module.check_batch(data.train_batch(chosen))
