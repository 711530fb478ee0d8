"""Where a round's numbers go: loggers, progress bar, and what callbacks may monitor."""

from __future__ import annotations

from collections.abc import Collection, Mapping

import torch
from lightning.pytorch import Trainer


def log_round(
    trainer: Trainer, values: Mapping[str, float], *, in_progress_bar: Collection[str] = ()
) -> None:
    """Log numbers of the round that has just ended, as `LightningModule.log` does at its end.

    All processes know the same numbers, so that nothing is left to reduce: what ``log`` does for
    that would take a quarter of a small round.

    Args:
        trainer: at the end of an epoch.
        values: by name.
        in_progress_bar: names of those that are shown beside the progress bar.
    """
    tensors = {name: torch.tensor(value) for name, value in values.items()}
    trainer.callback_metrics.update(tensors)
    trainer.logged_metrics.update(tensors)
    trainer.progress_bar_metrics.update({name: values[name] for name in in_progress_bar})
    for logger in trainer.loggers:
        logger.log_metrics({**values, "epoch": trainer.current_epoch}, step=trainer.global_step - 1)
        logger.save()
