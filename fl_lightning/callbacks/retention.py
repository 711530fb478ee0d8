"""Retention: metrics of a fine-tuned model on the task that it was pretrained on."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from typing import Any

import numpy as np
from lightning.pytorch import Callback, LightningDataModule, LightningModule, Trainer
from lightning.pytorch.utilities.data import extract_batch_size
from torch.utils.data import DataLoader

from fl_lightning.core.errors import ConfigurationError
from fl_lightning.federation import ClientExamples, StepOf, evaluate_clients, limited


class Retention(Callback):
    """Measures forgetting: logs the module's metrics on an earlier task, as ``retention/val/…`` or ``/test/…``.

    Each validation or test of the run is followed by an evaluation on the validation or test set of the
    earlier task. Other metrics of the run do not change.

    Args:
        data: data module of the earlier task, e.g. of the pretraining. ``limit_val_batches`` and
            ``limit_test_batches`` also limit its batches.

    Raises:
        ConfigurationError: during evaluation, if the data module does not return one `DataLoader`.

    Example:
        >>> from fl_lightning.data import Digits
        >>> earlier = Retention(Digits(classes=[0, 1, 2, 3, 4]))
    """

    def __init__(self, data: LightningDataModule) -> None:
        super().__init__()
        self.data = data

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Prepare the earlier task's data; only one process downloads files."""
        if trainer.is_global_zero:
            self.data.prepare_data()
        trainer.strategy.barrier()
        self.data.setup(stage)

    def on_validation_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Evaluate the model on the earlier task's validation set, and log the metrics."""
        self._evaluate(trainer, "validation", self.data.val_dataloader(), trainer.limit_val_batches)

    def on_test_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Evaluate the model on the earlier task's test set, and log the metrics."""
        self._evaluate(trainer, "test", self.data.test_dataloader(), trainer.limit_test_batches)

    def _evaluate(self, trainer: Trainer, stage: StepOf, loader: Any, limit: float) -> None:
        if not isinstance(loader, DataLoader):
            raise ConfigurationError(
                f"Retention: {type(self.data).__name__} must return one DataLoader for {stage}, got "
                f"{type(loader).__name__}"
            )

        def batches(client: int) -> Iterator[tuple[Any, int]]:
            some = islice(loader, limited(len(loader), limit))
            return ((batch, extract_batch_size(batch)) for batch in some)

        everything = ClientExamples(np.ones(1, np.int64), batches)
        new: Any = trainer.datamodule  # type: ignore[attr-defined]
        found = evaluate_clients(trainer, new, stage, examples=everything, is_shared=False)
        for name, value in found.get(0, {}).items():
            trainer.lightning_module.log(f"retention/{name}", value, batch_size=1, sync_dist=True)
