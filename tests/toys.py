"""Small modules and data that the tests train."""

from __future__ import annotations

import os
from pathlib import Path
from queue import SimpleQueue
from typing import NamedTuple

import numpy as np
import torch
from lightning.pytorch import (
    Callback,
    LightningDataModule,
    LightningModule,
    Trainer,
    seed_everything,
)
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from fl_lightning import Federation
from fl_lightning.data import Cohort
from fl_lightning.data.federated import FederatedDataModule
from fl_lightning.data.partitions.partition import DirichletSizes

ACCELERATOR = os.environ.get("TOYS_ACCELERATOR", "cpu")  # gpu: see .ci/gpu


# words of a command by which a fit is one round and shows nothing
SHORT_FIT = (
    *("--trainer.max_epochs=1", "--trainer.devices=1", f"--trainer.accelerator={ACCELERATOR}"),
    *("--trainer.enable_progress_bar=false", "--trainer.enable_model_summary=false"),
    *("--report=false", "--test_after_fit=false", "--trainer.num_sanity_val_steps=0"),
)


class Notes:
    """What a test notes during training: no client's state, which would be reset for every client."""

    def __init__(self):
        self._queue = SimpleQueue()

    def add(self, value):
        self._queue.put(value)

    def __len__(self):
        return self._queue.qsize()

    def read(self):
        """Return all that was noted, once."""
        return [self._queue.get() for _ in range(len(self))]


class ToyModule(LightningModule):
    """A two-layer network with dropout and batch norm off by default."""

    def __init__(self, lr=0.1, momentum=0.9, dropout=0.0, batch_norm=False, scheduler=True):
        super().__init__()
        norm = nn.BatchNorm1d(8) if batch_norm else nn.Identity()
        self.net = nn.Sequential(
            nn.Linear(4, 8), norm, nn.ReLU(), nn.Dropout(dropout), nn.Linear(8, 3)
        )
        self.lr, self.momentum, self.scheduler = lr, momentum, scheduler

    def training_step(self, batch, batch_idx):
        x, y = batch
        loss = F.cross_entropy(self.net(x), y)
        self.log("train/accuracy", (self.net(x).argmax(1) == y).float().mean())
        return loss

    def validation_step(self, batch, batch_idx):
        x, y = batch
        logits = self.net(x)
        self.log("val/loss", F.cross_entropy(logits, y), batch_size=len(y))
        self.log("val/accuracy", (logits.argmax(1) == y).float().mean(), batch_size=len(y))

    def test_step(self, batch, batch_idx):
        x, y = batch
        self.log("test/loss", F.cross_entropy(self.net(x), y), batch_size=len(y))

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=self.lr, momentum=self.momentum)
        if not self.scheduler:
            return optimizer
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.9)]


def toy(kind=ToyModule, **options):
    """Return a module whose first weights are always the same; nothing else is seeded."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return kind(**options)


class ToyData(LightningDataModule):
    """Gaussian blobs, always the same ones."""

    def __init__(self, num_examples=60, batch_size=8, dtype=torch.float32, drop_last=False):
        super().__init__()
        self.num_examples, self.batch_size, self.dtype = num_examples, batch_size, dtype
        self.drop_last = drop_last

    def setup(self, stage):
        generator = torch.Generator().manual_seed(3)
        centres = torch.randn(3, 4, generator=generator)
        y = torch.arange(self.num_examples) % 3
        x = centres[y] + 0.7 * torch.randn(self.num_examples, 4, generator=generator)
        self.train = TensorDataset(x.to(self.dtype), y)
        self.val = TensorDataset((x + 0.1).to(self.dtype), y)

    def train_dataloader(self):
        return DataLoader(
            self.train, batch_size=self.batch_size, shuffle=True, drop_last=self.drop_last
        )

    def val_dataloader(self):
        return DataLoader(self.val, batch_size=64)  # one: a batch costs as much as a client's round

    def test_dataloader(self):
        return DataLoader(self.val, batch_size=32)


class LoaderData(LightningDataModule):
    """A data module whose training loader is given."""

    def __init__(self, loader):
        super().__init__()
        self.loader = loader

    def train_dataloader(self):
        return self.loader


class Ordered(Cohort):
    """All clients, those with the highest ids first where ``order`` is -1."""

    def __init__(self, order=1):
        self.order = order

    def expected_size(self, num_clients):
        return num_clients

    def sample(self, round_index, population, seed):
        return np.arange(population.num_clients)[:: self.order]


class Given:
    """A partition that is given."""

    uses_labels = False

    def __init__(self, shards):
        self.shards = shards

    def assign(self, labels, num_clients, seed):
        return [np.array(shard) for shard in self.shards]


def reversed_labels(dataset):
    """Return one value per example, the last number first."""
    return list(range(len(dataset) - 1, -1, -1))


def toy_data(
    num_clients=6,
    *,
    partition=None,
    seed=0,
    client_val_fraction=0.0,
    client_test_fraction=0.0,
    **options,
):
    partition = partition or DirichletSizes(alpha=2.0, min_examples=2)
    return FederatedDataModule(
        ToyData(**options),
        num_clients=num_clients,
        partition=partition,
        client_val_fraction=client_val_fraction,
        client_test_fraction=client_test_fraction,
        seed=seed,
    )


def toy_trainer(*callbacks, max_epochs=3, **options):
    """Return a Trainer that does not validate, a sixth of a toy's fit; several devices share the clients out."""
    defaults = {
        "accelerator": ACCELERATOR,
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "num_sanity_val_steps": 0,
        "limit_val_batches": 0,
        "strategy": "federated" if options.get("devices", 1) > 1 else "auto",
    }
    return Trainer(callbacks=list(callbacks), max_epochs=max_epochs, **{**defaults, **options})


def validating_trainer(*callbacks, **options):
    """Return a Trainer that validates after every round."""
    return toy_trainer(*callbacks, **{"limit_val_batches": 1.0} | options)


class Fitted(NamedTuple):
    """What a fit leaves."""

    module: LightningModule
    trainer: Trainer
    federation: Federation


def federated(
    module=ToyModule, *callbacks, ahead=(), data=None, ckpt_path=None, trainer=None, **block
):
    """Fit a module, or what makes one after seeding, in a federation of the options of the block.

    Callbacks follow the federation but for those ahead of it.
    """
    seed_everything(0, verbose=False)
    module = module if isinstance(module, nn.Module) else module()
    federation = Federation(**{"seed": 4, **block})
    made = toy_trainer(*ahead, federation, *callbacks, **(trainer or {}))
    made.fit(module, datamodule=data or toy_data(), ckpt_path=ckpt_path)
    return Fitted(module, made, federation)


def weights(module):
    """Return all parameters and buffers as one vector, exactly."""
    return torch.cat([t.detach().double().flatten() for t in module.state_dict().values()])


class SaveEverywhere(Callback):
    """Saves after a round's training, after validation and at the end of every round."""

    def __init__(self, folder):
        self.folder = folder

    def save(self, trainer, moment):
        trainer.save_checkpoint(self.folder / f"{trainer.current_epoch}-{moment}.ckpt")

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        self.save(trainer, "trained")

    def on_validation_end(self, trainer, module):
        self.save(trainer, "validation")

    def on_train_epoch_end(self, trainer, module):
        self.save(trainer, "end")


class SaveOnException(Callback):
    """What Lightning's callbacks do that save when a run fails or is interrupted."""

    def __init__(self, path):
        self.path = path

    def on_exception(self, trainer, module, exception):
        trainer.save_checkpoint(self.path)


class NeedsFile(Callback):
    """Fails at the start of a round, the second one by default, unless a file is there."""

    def __init__(self, path: str, round_: int = 1):
        self.path, self.round = path, round_

    def on_train_epoch_start(self, trainer, module):
        if trainer.current_epoch == self.round and not Path(self.path).exists():
            raise RuntimeError(f"{self.path} is missing")


def toy_options(**trainer):
    """Return the YAML options of a run of the toys over four clients, with further ones of the Trainer."""
    source = {"source": {"class_path": "toys.ToyData"}, "num_clients": 4}
    return {
        "model": {"class_path": "toys.ToyModule"},
        "data": {"class_path": "fl_lightning.FederatedDataModule", "init_args": source},
        "federation": {"local_steps": 2, "engine": "sequential"},
        "trainer": {"accelerator": "cpu", "enable_model_summary": False, **trainer},
    }
