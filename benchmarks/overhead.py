"""What the framework adds to a local step: ``python -m benchmarks.overhead``.

The same model, data, batches and number of optimizer steps, trained by a bare PyTorch loop and by a
federation inside the Trainer with its sequential engine, in one process on one thread. The two
alternate group by group, so that whatever slows the machine down for a while slows both: after some
clients of the federation the bare loop trains as many. Everything that the federation does from the start of its first round to
the end of its last is counted as its own, with Lightning's loops and the server's steps. Times are
process CPU time, a round against the bare clients inside it; the table shows medians over rounds.
"""

from __future__ import annotations

import argparse
import logging
import tempfile
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from lightning.pytorch import Callback, LightningDataModule, LightningModule, Trainer
from lightning.pytorch.loggers import TensorBoardLogger
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812 - as everyone writes it
from torch.utils.data import DataLoader, TensorDataset

from benchmarks.networks import small_vit
from fl_lightning import Federation, UniformCohort
from fl_lightning.data import IID, FederatedDataModule


class Classifier(LightningModule):
    """Cross entropy, plain SGD, nothing logged."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        """Return the loss."""
        x, y = batch
        return F.cross_entropy(self.network(x), y)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return SGD with momentum."""
        return torch.optim.SGD(self.parameters(), lr=1e-3, momentum=0.9)


class InMemory(LightningDataModule):
    """Random tensors."""

    def __init__(self, dataset: TensorDataset, batch_size: int) -> None:
        super().__init__()
        self.dataset, self.batch_size = dataset, batch_size

    def train_dataloader(self) -> DataLoader[tuple[Tensor, ...]]:
        """Return the whole set."""
        return DataLoader(self.dataset, batch_size=self.batch_size)


@dataclass(frozen=True)
class Workload:
    """A model, and how much of which data its clients train on."""

    name: str
    network: Callable[[], nn.Module]
    shape: tuple[int, ...]
    num_classes: int
    num_clients: int
    examples_per_client: int
    batch_size: int
    cohort: int
    rounds: int

    @property
    def steps_per_round(self) -> int:
        """Local steps of a round's clients together."""
        return self.cohort * (self.examples_per_client // self.batch_size)


def logistic_regression() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(784, 10))


WORKLOADS = [
    Workload("logistic regression", logistic_regression, (1, 28, 28), 10, 20, 500, 10, 10, 60),
    Workload("ViT, dim 192, depth 6", small_vit, (3, 32, 32), 100, 8, 64, 32, 2, 12),
]


class BareLoop:
    """The leanest plain loop: one model, one optimizer, copies in place, a running mean."""

    def __init__(self, network: nn.Module, data: TensorDataset, work: Workload) -> None:
        self.network, self.work = network, work
        self.optimizer = torch.optim.SGD(network.parameters(), lr=1e-3, momentum=0.9)
        self.x, self.y = data.tensors
        self.params = [p.detach() for p in network.parameters()]
        self.start = [p.clone() for p in self.params]
        self.mean = [torch.zeros_like(p) for p in self.params]

    def train_client(self, client: int) -> None:
        """Train one client from the global weights and fold it in."""
        torch._foreach_copy_(self.params, self.start)
        self.optimizer.state.clear()
        size = self.work.examples_per_client
        shard = torch.randperm(size) + client * size
        for batch in shard.split(self.work.batch_size):
            self.optimizer.zero_grad()
            F.cross_entropy(self.network(self.x[batch]), self.y[batch]).backward()
            self.optimizer.step()
        torch._foreach_add_(self.mean, self.params, alpha=1 / self.work.cohort)

    def close_round(self) -> None:
        """Make the mean the next round's start."""
        torch._foreach_copy_(self.start, self.mean)
        torch._foreach_zero_(self.mean)


class TakeTurns(Callback):
    """Trains a bare client after each of the federation's and keeps the two clocks apart."""

    def __init__(self, bare: BareLoop) -> None:
        self.bare = bare
        self.seconds: list[tuple[float, float]] = []  # of each round: bare, federated
        self._began = self._bare_so_far = 0.0

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Start the clock."""
        self._began, self._bare_so_far = time.process_time(), 0.0

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Train as many bare clients as the group had."""
        began = time.process_time()
        for client in batch:
            self.bare.train_client(client)
        if trainer.is_last_batch:
            self.bare.close_round()
        self._bare_so_far += time.process_time() - began

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Note the round's two times; what is left of the round counts for the next one."""
        now = time.process_time()
        self.seconds.append((self._bare_so_far, now - self._began - self._bare_so_far))
        self._began, self._bare_so_far = now, 0.0


def measure(work: Workload, rounds: int, folder: str) -> tuple[float, float, float]:
    """Return medians over rounds of (bare, added) microseconds a local step, and of the ratio."""
    count = work.num_clients * work.examples_per_client
    data = TensorDataset(torch.randn(count, *work.shape), torch.randint(work.num_classes, (count,)))
    turns = TakeTurns(BareLoop(work.network(), data, work))
    clients = FederatedDataModule(
        InMemory(data, work.batch_size), num_clients=work.num_clients, partition=IID()
    )
    trainer = Trainer(
        max_epochs=1 + rounds,  # the first one warms up
        accelerator="cpu",
        callbacks=[Federation(cohort=UniformCohort(size=work.cohort), engine="sequential"), turns],
        logger=TensorBoardLogger(folder),
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Classifier(work.network()), datamodule=clients)
    bare, ours = np.array(turns.seconds[1:]).T / work.steps_per_round * 1e6
    return float(np.median(bare)), float(np.median(ours - bare)), float(np.median(ours / bare))


def per_client_and_round(rounds: int, folder: str) -> tuple[float, float]:
    """Return milliseconds added by a client of one step, and by a round besides its clients.

    From rounds of 2 and of 50 such clients, whose costs lie on a line.
    """
    added = {}
    for cohort in (2, 50):
        work = Workload("", logistic_regression, (1, 28, 28), 10, 100, 10, 10, cohort, rounds)
        added[cohort] = measure(work, rounds, folder)[1] * cohort / 1000
    per_client = (added[50] - added[2]) / 48
    return per_client, added[2] - 2 * per_client


class EpochClock(Callback):
    """Notes when epochs end, and logs as much as a round does."""

    def __init__(self) -> None:
        self.ends: list[float] = []

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Log a metric through the module and ten numbers through the loggers."""
        pl_module.log("train/loss", 0.0)
        for logger in trainer.loggers:
            logger.log_metrics({f"round/{i}": 0.0 for i in range(10)}, step=trainer.global_step - 1)
        self.ends.append(time.process_time())


def plain_epoch(epochs: int, folder: str) -> float:
    """Return milliseconds of an epoch of one step without a federation: Lightning's own."""
    clock = EpochClock()
    data = TensorDataset(torch.randn(10, 1, 28, 28), torch.randint(10, (10,)))
    trainer = Trainer(
        max_epochs=2 + epochs,
        accelerator="cpu",
        callbacks=[clock],
        logger=TensorBoardLogger(folder),
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Classifier(logistic_regression()), datamodule=InMemory(data, 10))
    return float(np.median(np.diff(clock.ends[1:]))) * 1e3


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--turns", type=int, help="rounds to measure; else as many as suit each")
    turns = parser.parse_args().turns
    warnings.filterwarnings("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    torch.set_num_threads(1)
    torch.manual_seed(0)
    print(f"{'per local step':24}{'bare loop':>12}{'added':>12}{'ratio':>8}")
    with tempfile.TemporaryDirectory() as folder:
        for work in WORKLOADS:
            bare, added, ratio = measure(work, turns or work.rounds, folder)
            print(f"{work.name:24}{bare:9.0f} µs{added:9.0f} µs{ratio:8.3f}")
        client, whole = per_client_and_round(turns or 60, folder)
        epoch = plain_epoch(turns or 60, folder)
    print(f"clients of one step: {client:.2f} ms added per client, {whole:.1f} ms per round")
    print(f"an epoch of one step without a federation: {epoch:.1f} ms")


if __name__ == "__main__":
    main()
