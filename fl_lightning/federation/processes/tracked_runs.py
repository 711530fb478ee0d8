"""Runs of W&B, across the processes of a fit.

W&B writes what it holds back when Python exits. A forked process ends without that, so it ends its run
itself. The process that goes on afterwards, with a test, opens the same run again: both know its name
beforehand.
"""

from __future__ import annotations

import secrets

from lightning.pytorch import Trainer
from lightning.pytorch.loggers import WandbLogger


def name_runs(trainer: Trainer) -> None:
    """Give every run that has no name yet one, in the process that is to be forked."""
    for logger in _loggers(trainer):
        if logger._experiment is None and not logger._id:
            logger._id = logger._wandb_init["id"] = f"w{secrets.token_hex(4)}"


def end_runs(trainer: Trainer) -> None:
    """Have every run that is open in this process write all that it has."""
    for logger in _loggers(trainer):
        if logger._experiment is not None:
            logger._experiment.finish()


def _loggers(trainer: Trainer) -> list[WandbLogger]:
    return [logger for logger in trainer.loggers if isinstance(logger, WandbLogger)]
