"""The folder of a run: where its configuration, its checkpoints, its tables and its logs are.

Every logger of Lightning has a save_dir, a name and a version. The folder is made of them as
`lightning.pytorch.callbacks.ModelCheckpoint` does it for its checkpoints, so that no two runs share it.
``trainer.log_dir`` does so for TensorBoard and CSV files alone: all runs of W&B would have one.
"""

from __future__ import annotations

from pathlib import Path

from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger

CHECKPOINTS = "checkpoints"


def run_folder(trainer: Trainer) -> str:
    """Return a run's folder, which processes agree on: all must ask."""
    return str(trainer.strategy.broadcast(own_run_folder(trainer)))


def own_run_folder(trainer: Trainer) -> str:
    """Return a run's folder as this process has it, which may know less than the first one.

    Example:
        >>> own_run_folder(Trainer(logger=CSVLogger("runs", "a", version=3), accelerator="cpu"))
        'runs/a/version_3'
    """
    if not trainer.loggers:
        return trainer.default_root_dir
    logger = trainer.loggers[0]
    if isinstance(logger, (TensorBoardLogger, CSVLogger)):
        return logger.log_dir
    version = logger.version if isinstance(logger.version, str) else f"version_{logger.version}"
    return str(Path(logger.save_dir or trainer.default_root_dir, str(logger.name), version))


def checkpoint_folders(trainer: Trainer) -> list[Path]:
    """Return where a Trainer's checkpoints of a fit are or will be; none if it saves none."""
    usual = str(Path(own_run_folder(trainer), CHECKPOINTS))
    savers = [c for c in trainer.checkpoint_callbacks if isinstance(c, ModelCheckpoint)]
    return list(dict.fromkeys(Path(saver.dirpath or usual) for saver in savers))
