"""Predictions of ``predict`` as a file: a CSV table, or a PyTorch file for other shapes."""

from __future__ import annotations

import csv
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from lightning.fabric.utilities import move_data_to_device
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor
from typing_extensions import override

from fl_lightning.federation import own_run_folder


class Predictions(Callback):
    """Writes the predictions of the command ``predict`` into a file in the run's folder.

    If the predictions of all batches are tensors with one or two axes, e.g. classes or probabilities,
    ``predictions.csv`` has one row per example, in the loader's order, with the number of the loader, the
    number of the example in the loader, and the prediction. Otherwise ``predictions.pt`` has a list of
    batches per loader, for ``torch.load``. Each process writes its own file. An existing file is not
    overwritten: the next one is ``predictions_1.csv``.

    Attributes:
        path: path of the file; None before it is written.
    """

    path: Path | None = None

    def __init__(self) -> None:
        super().__init__()
        self._loaders: dict[int, list[Any]] = {}

    @override
    def on_predict_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Forget the predictions of an earlier call of ``predict``."""
        self._loaders, self.path = {}, None

    @override
    def on_predict_batch_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        """Keep the module's predictions for a batch in memory, if it returned any."""
        if outputs is None:
            return
        self._loaders.setdefault(dataloader_idx, []).append(move_data_to_device(outputs, "cpu"))

    @override
    def on_predict_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Write all predictions into the file, if there are any."""
        if not self._loaders or trainer.fast_dev_run:  # type: ignore[attr-defined]
            return
        process = f"_process_{trainer.global_rank}" if trainer.world_size > 1 else ""
        stem = Path(own_run_folder(trainer), f"predictions{process}")
        stem.parent.mkdir(parents=True, exist_ok=True)
        # one list per loader, empty if nothing was predicted for it
        loaders = [self._loaders.get(number, []) for number in range(max(self._loaders) + 1)]
        every = [batch for batches in loaders for batch in batches]
        is_flat = all(isinstance(batch, Tensor) and batch.ndim in (1, 2) for batch in every)
        if is_flat and len({batch.shape[1:] for batch in every}) == 1:
            path = _free(stem, ".csv")
            with path.open("w", newline="", encoding="utf-8") as file:
                csv.writer(file).writerows(_table(loaders, every[0]))
        else:
            path = _free(stem, ".pt")
            torch.save(loaders, path)
        self.path = path


def _table(loaders: Sequence[Sequence[Tensor]], first: Tensor) -> Iterator[list[Any]]:
    count = first.shape[1:].numel()
    names = [f"prediction_{n}" for n in range(count)] if count > 1 else ["prediction"]
    yield ["loader", "row", *names]
    for loader, batches in enumerate(loaders):
        rows = [row for batch in batches for row in batch.reshape(len(batch), -1).tolist()]
        yield from ([loader, n, *row] for n, row in enumerate(rows))


def _free(stem: Path, suffix: str) -> Path:
    path, number = stem.with_name(f"{stem.name}{suffix}"), 0
    while path.exists():
        number += 1
        path = stem.with_name(f"{stem.name}_{number}{suffix}")
    return path
