"""A table of metrics that a resumed run goes on with.

`lightning.pytorch.loggers.CSVLogger` deletes ``metrics.csv`` of a folder in which it begins.
"""

from __future__ import annotations

import csv
import os
import warnings
from pathlib import Path

from lightning.pytorch import Trainer
from lightning.pytorch.loggers import CSVLogger

_KEPT = ".metrics.csv.kept"


def keep_rows(trainer: Trainer, step: int) -> None:
    """Have CSV files go on after the rows of steps before one, those of the run that is taken up.

    To be called by the first process alone.
    """
    for logger in trainer.loggers:
        if isinstance(logger, CSVLogger):
            _keep(logger, step)


def _keep(logger: CSVLogger, step: int) -> None:
    path, kept = Path(logger.log_dir, "metrics.csv"), Path(logger.log_dir, _KEPT)
    if path.exists() and not kept.exists():  # else it was killed just here
        os.replace(path, kept)
    with warnings.catch_warnings():  # of what would be deleted
        warnings.filterwarnings("ignore", "Experiment logs directory .* exists and is not empty")
        writer = logger.experiment
    if not kept.exists():
        return
    with kept.open(newline="") as file:
        reader = csv.DictReader(file)
        rows = [
            row for row in reader if (row.get("step") or "").isdecimal() and int(row["step"]) < step
        ]
        writer.metrics_keys = list(reader.fieldnames or [])
    unfinished = path.with_name(".metrics.csv.unfinished")
    with unfinished.open("w", newline="") as file:
        table = csv.DictWriter(file, writer.metrics_keys)
        table.writeheader()
        table.writerows(rows)
    os.replace(unfinished, path)
    kept.unlink()
