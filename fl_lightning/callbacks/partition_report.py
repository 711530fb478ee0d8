"""At the start: who owns what, as a picture in TensorBoard and a file beside the run."""

from __future__ import annotations

from pathlib import Path

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities import rank_zero_info

from fl_lightning.callbacks.console.tidy import detail
from fl_lightning.data.federated import FederatedDataModule
from fl_lightning.federation import log_figure, run_folder


class PartitionReport(Callback):
    """Logs the partition when a fit starts.

    Prints a line, and a few more into the log, draws clients × classes for loggers that take pictures as ``partition`` and saves
    ``partition.csv``, one row per client, in the logger's directory.
    """

    # what a private run must name
    unprotected = "the picture and table of the partition"

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Report once, before the first round."""
        data = trainer.datamodule  # type: ignore[attr-defined]
        if not isinstance(data, FederatedDataModule):
            return
        folder = run_folder(trainer)  # which processes agree on: all must ask
        if not trainer.is_global_zero:
            return
        summary = data.summary()
        rank_zero_info(f"data: {type(data.source).__name__}, {summary.as_line()}")
        rank_zero_info(summary.as_text(), **detail())
        if trainer.logger is None or trainer.fast_dev_run:  # type: ignore[attr-defined]
            return
        Path(folder).mkdir(parents=True, exist_ok=True)
        summary.save(Path(folder) / "partition.csv")
        log_figure(trainer, "partition", summary.figure, step=0)
