"""A workload as a run of `fl_lightning`, the way its users write one."""

from __future__ import annotations

import inspect
import logging
import warnings
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
from lightning.pytorch import Callback, LightningDataModule, LightningModule, Trainer
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812 - as everyone writes it
from torch.utils.data import DataLoader, TensorDataset

from benchmarks.options import Options
from benchmarks.workloads import SEED, Workload
from fl_lightning import FederatedDataModule, Federation, UniformCohort


class InMemory(LightningDataModule):
    """Tensors as the training set."""

    def __init__(self, dataset: TensorDataset, batch_size: int) -> None:
        super().__init__()
        self.dataset, self.batch_size = dataset, batch_size

    def train_dataloader(self) -> DataLoader[tuple[Tensor, ...]]:
        """Return the whole set."""
        return DataLoader(self.dataset, batch_size=self.batch_size)


class StopAfter(Callback):
    """Ends a run early."""

    def __init__(self, num_rounds: int) -> None:
        self.num_rounds = num_rounds

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Stop after the last round that is wanted."""
        trainer.should_stop = trainer.current_epoch + 1 >= self.num_rounds


class Classifier(LightningModule):
    """Cross entropy and the workload's SGD, nothing logged."""

    def __init__(self, network: nn.Module, work: Workload) -> None:
        super().__init__()
        self.network, self.work = network, work

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        """Return the loss."""
        x, y = batch
        return F.cross_entropy(self.network(x), y)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return the clients' optimizer."""
        work = self.work
        return torch.optim.SGD(
            [p for p in self.parameters() if p.requires_grad],
            lr=work.lr,
            momentum=work.momentum,
            weight_decay=work.weight_decay,
        )


@dataclass(frozen=True)
class Shards:
    """The workload's own rule of whose examples are whose; shards may overlap."""

    work: Workload
    uses_labels: ClassVar[bool] = False

    def assign(self, labels: np.ndarray, num_clients: int, seed: int) -> list[np.ndarray]:
        """Return windows into one array of indices, so that a million clients cost little."""
        every = np.arange(len(labels))
        ends = self.work.starts + self.work.sizes
        return [every[a:b] for a, b in zip(self.work.starts, ends, strict=True)]


def federation(work: Workload, options: Options) -> Federation:
    """Return the federation; with the options that it has."""
    arguments: dict[str, Any] = {"local_steps": work.local_steps, "seed": SEED}
    known = inspect.signature(Federation).parameters
    if "engine" in known:
        arguments["engine"] = options.engine
    if "pad_batches" in known:
        arguments["pad_batches"] = bool(options.pad)
    return Federation(cohort=UniformCohort(size=work.cohort), **arguments)


def engine_of(trainer: Trainer) -> str:
    """Return how clients are trained in a fit that runs, as the engine itself knows it."""
    federation = next(c for c in trainer.callbacks if isinstance(c, Federation))  # type: ignore[attr-defined]
    assert federation.rounds is not None
    engine = federation.rounds.clients.engine
    if engine.slots is None:
        return ", ".join(["sequential", *engine.state_dict()["speedups"]])
    compiled = "compiled" if engine.slots.is_compiled else "not compiled"
    return f"{engine.slots.stacking.num_slots} slots, {compiled}"


def fit(
    work: Workload, data: tuple[Tensor, Tensor], options: Options, num_rounds: int, watch: Callback
) -> None:
    """Train the first rounds of a run of ``options.length``; the callback comes after the federation's."""
    warnings.filterwarnings("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    clients = FederatedDataModule(
        InMemory(TensorDataset(*data), work.batch_size),
        num_clients=work.num_clients,
        partition=Shards(work),
        seed=SEED,
    )
    several: dict[str, Any] = {"strategy": "federated"} if options.devices > 1 else {}
    trainer = Trainer(
        max_epochs=options.length,
        accelerator=options.accelerator,
        devices=options.devices,
        precision=options.precision,  # type: ignore[arg-type]
        callbacks=[federation(work, options), watch, StopAfter(num_rounds)],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **several,
    )
    trainer.fit(Classifier(work.initial_network(), work), datamodule=clients)
