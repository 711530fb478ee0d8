"""What the sequential engine adds to clients of few steps: ``python -m benchmarks.per_client``.

A federation inside the Trainer, and a bare loop over the same number of clients, batches and optimizer
steps of the same model, take turns round by round in one process on one thread. A round is all that
happens from the end of one to the end of the next, Lightning's loops and the server's step included.
Seconds are those that the process computes.
"""

from __future__ import annotations

import argparse
import logging
import time
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812 - as everyone writes it
from torch.utils.data import TensorDataset

from benchmarks.networks import logistic_regression
from benchmarks.ours import InMemory
from benchmarks.page import ratio
from fl_lightning import FederatedDataModule, Federation, UniformCohort

FEATURES, BATCH = 784, 10


def layers(width: int, depth: int) -> nn.Module:
    """Return dense layers of one width, with ReLU, and a classifier of ten classes."""
    hidden = [m for _ in range(depth - 1) for m in (nn.Linear(width, width), nn.ReLU())]
    return nn.Sequential(nn.Linear(FEATURES, width), nn.ReLU(), *hidden, nn.Linear(width, 10))


MODELS: dict[str, tuple[Callable[[], nn.Module], int]] = {  # with the clients of a round
    "tiny, 7,850 parameters": (partial(logistic_regression, FEATURES, 10), 50),
    "60 layers, 0.3 million": (partial(layers, 64, 60), 20),
    "11 million parameters": (partial(layers, 2000, 3), 6),
}


class Classifier(LightningModule):
    """Cross entropy and SGD with momentum, nothing logged."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        """Return the loss."""
        x, y = batch
        return F.cross_entropy(self.network(x), y)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return the clients' optimizer."""
        return torch.optim.SGD(self.parameters(), lr=1e-3, momentum=0.9)


class Turns(Callback):
    """Runs a round of the bare loop after each round of the federation, and keeps both times."""

    def __init__(self, network: nn.Module, data: TensorDataset, clients: int, steps: int) -> None:
        self.network, self.clients, self.steps = network, clients, steps
        self.x, self.y = data.tensors
        self.optimizer = torch.optim.SGD(network.parameters(), lr=1e-3, momentum=0.9)
        self.params = [p.detach() for p in network.parameters()]
        self.start = [p.clone() for p in self.params]
        self.ours: list[float] = []
        self.bare: list[float] = []
        self._began = 0.0

    def bare_round(self) -> None:
        """Train clients from the same weights, and make their mean the next start."""
        mean = [torch.zeros_like(p) for p in self.params]
        for client in range(self.clients):
            torch._foreach_copy_(self.params, self.start)
            self.optimizer.state.clear()
            size = self.steps * BATCH
            for batch in (torch.randperm(size) + client * size).split(BATCH):
                self.optimizer.zero_grad()
                F.cross_entropy(self.network(self.x[batch]), self.y[batch]).backward()
                self.optimizer.step()
            torch._foreach_add_(mean, self.params, alpha=1 / self.clients)
        self.start = mean

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Start the clock."""
        self._began = time.process_time()

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Keep the round's time; its remaining work counts for the next one."""
        now = time.process_time()
        self.ours.append(now - self._began)
        self.bare_round()
        self._began = time.process_time()
        self.bare.append(self._began - now)


def measure(name: str, steps: int, rounds: int) -> Turns:
    """Return the times of a model's rounds; the first two warm up and are left out."""
    network, clients = MODELS[name]
    count = clients * steps * BATCH
    data = TensorDataset(torch.randn(count, FEATURES), torch.randint(10, (count,)))
    turns = Turns(network(), data, clients, steps)
    trainer = Trainer(
        max_epochs=2 + rounds,
        accelerator="cpu",
        callbacks=[Federation(cohort=UniformCohort(size=clients), engine="sequential"), turns],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    module: Any = Classifier(network())
    trainer.fit(module, datamodule=FederatedDataModule(InMemory(data, BATCH), num_clients=clients))
    turns.ours, turns.bare = turns.ours[2:], turns.bare[2:]
    return turns


def table(rounds: int, num_models: int) -> Iterator[str]:
    """Yield the lines of the table."""
    yield f"{'a client':26}{'steps':>6}{'bare loop':>13}{'added':>12}{'ratio':>8}"
    for name, (_, clients) in [*MODELS.items()][:num_models]:
        for steps in (1, 5):
            found = measure(name, steps, rounds)
            bare = float(np.median(found.bare)) / clients * 1e6
            added = float(np.median(found.ours)) / clients * 1e6 - bare
            share = ratio(found.ours, found.bare)
            yield f"{name:26}{steps:6}{bare:10.0f} µs{added:9.0f} µs{share:8.2f}"


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=12, help="default %(default)s")
    parser.add_argument("--models", type=int, default=len(MODELS), help="how many, smallest first")
    given = parser.parse_args()
    warnings.filterwarnings("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    torch.set_num_threads(1)
    torch.manual_seed(0)
    for line in table(given.rounds, given.models):
        print(line, flush=True)


if __name__ == "__main__":
    main()
