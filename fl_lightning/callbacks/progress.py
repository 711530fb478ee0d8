"""The progress bar counts rounds and clients."""

from __future__ import annotations

from typing import Any

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import TQDMProgressBar


class RoundProgressBar(TQDMProgressBar):
    """Lightning's bar with the word that fits: ``Round 3/30``, one tick per client."""

    def on_train_epoch_start(self, trainer: Trainer, *args: LightningModule | Any) -> None:
        """Say which round it is."""
        super().on_train_epoch_start(trainer, *args)
        last = f"/{trainer.max_epochs}" if (trainer.max_epochs or -1) > 0 else ""
        self.train_progress_bar.set_description(f"Round {trainer.current_epoch + 1}{last}")

    def get_metrics(self, trainer: Trainer, pl_module: LightningModule) -> dict[str, Any]:
        """Show the metrics without the logger's version number."""
        metrics = super().get_metrics(trainer, pl_module)
        metrics.pop("v_num", None)
        return dict(metrics)
