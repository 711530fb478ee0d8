"""What the framework adds to a local step: ``python -m benchmarks.overhead``.

The same model, data, batches and number of optimizer steps, trained by a bare PyTorch loop and by a
federation inside the Trainer, in turns in one process on one thread. Times are process CPU time,
the least of all turns: what disturbs a measurement only ever adds to it.
"""

from __future__ import annotations

import argparse
import logging
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass

import torch
from lightning.pytorch import Callback, LightningDataModule, LightningModule, Trainer
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812 - as everyone writes it
from torch.utils.data import DataLoader, TensorDataset

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
    turns: int

    @property
    def num_steps(self) -> int:
        """Local steps of all clients and rounds."""
        return self.rounds * self.cohort * (self.examples_per_client // self.batch_size)


def logistic_regression() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(784, 10))


def vit_tiny() -> nn.Module:
    import timm

    network: nn.Module = timm.create_model(
        "vit_tiny_patch16_224",
        img_size=32,
        patch_size=4,
        embed_dim=192,
        depth=6,
        num_heads=3,
        num_classes=100,
    )
    return network


WORKLOADS = [
    Workload("logistic regression", logistic_regression, (1, 28, 28), 10, 20, 500, 10, 10, 1, 60),
    Workload("ViT, dim 192, depth 6", vit_tiny, (3, 32, 32), 100, 4, 256, 32, 2, 1, 5),
]


def bare_loop(network: nn.Module, data: TensorDataset, work: Workload) -> float:
    """Train by the leanest plain loop and return CPU seconds."""
    optimizer = torch.optim.SGD(network.parameters(), lr=1e-3, momentum=0.9)
    x, y = data.tensors
    params = [p.detach() for p in network.parameters()]
    start = [p.clone() for p in params]
    size = work.examples_per_client
    began = time.process_time()
    for _ in range(work.rounds):
        mean = [torch.zeros_like(p) for p in params]
        for client in range(work.cohort):
            torch._foreach_copy_(params, start)
            optimizer.state.clear()
            shard = torch.randperm(size) + client * size
            for batch in shard.split(work.batch_size):
                optimizer.zero_grad()
                F.cross_entropy(network(x[batch]), y[batch]).backward()
                optimizer.step()
            torch._foreach_add_(mean, params, alpha=1 / work.cohort)
        torch._foreach_copy_(start, mean)
    return time.process_time() - began


class Clock(Callback):
    """CPU time from the first round's start to the last one's end."""

    began = ended = 0.0

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Start once."""
        self.began = self.began or time.process_time()

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Note the time."""
        self.ended = time.process_time()


def federated(network: nn.Module, data: TensorDataset, work: Workload) -> float:
    """Train by a federation inside the Trainer and return CPU seconds."""
    clock = Clock()
    source = InMemory(data, work.batch_size)
    clients = FederatedDataModule(source, num_clients=work.num_clients, partition=IID())
    trainer = Trainer(
        max_epochs=work.rounds,
        accelerator="cpu",
        callbacks=[Federation(cohort=UniformCohort(size=work.cohort)), clock],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Classifier(network), datamodule=clients)
    return clock.ended - clock.began


def measure(work: Workload, turns: int) -> tuple[float, float]:
    """Return (bare, federated) microseconds a step, the least of all turns."""
    count = work.num_clients * work.examples_per_client
    data = TensorDataset(torch.randn(count, *work.shape), torch.randint(work.num_classes, (count,)))
    network = work.network()
    bare_loop(network, data, work)  # warm up
    pairs = [(bare_loop(network, data, work), federated(network, data, work)) for _ in range(turns)]
    bare, ours = (min(times) / work.num_steps * 1e6 for times in zip(*pairs, strict=True))
    return bare, ours


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--turns", type=int, help="measurements of each; else as many as suit it")
    turns = parser.parse_args().turns
    warnings.filterwarnings("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    torch.set_num_threads(1)
    torch.manual_seed(0)
    print(f"{'per local step':24}{'bare loop':>12}{'federation':>12}{'added':>10}{'ratio':>8}")
    for work in WORKLOADS:
        bare, ours = measure(work, turns or work.turns)
        print(f"{work.name:24}{bare:9.0f} µs{ours:9.0f} µs{ours - bare:7.0f} µs{ours / bare:8.3f}")


if __name__ == "__main__":
    main()
