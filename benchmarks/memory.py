"""What clients cost in memory and at the start: ``python -m benchmarks.memory``.

Logistic regression on 60,000 random examples, each run in a process of its own:

- with 10 and with 10,000 clients, 10 of them a round, who divide the examples;
- with 1,000,000 clients of 20 examples each, 1,000 of them a round. Their shards overlap.

Prints the peak resident memory, and of the million the seconds from the data set to the first round
and those of a round. ``--parameters 22000000`` instead trains a model of so many with SCAFFOLD: all of 100
clients take part in two rounds, and each remembers as many numbers (by default 2 GB of them in RAM).
"""

from __future__ import annotations

import argparse
import logging
import resource
import tempfile
import time
import warnings
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

import numpy as np
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import nn
from torch.utils.data import TensorDataset

from benchmarks.networks import logistic_regression
from benchmarks.ours import Classifier, InMemory
from benchmarks.workloads import WORKLOADS
from fl_lightning import FederatedDataModule, Federation, PartitionReport, Scaffold, UniformCohort
from fl_lightning.core.seeds import numpy_generator
from fl_lightning.data import FlatShards

NUM_EXAMPLES = 60_000
MANY = 1_000_000  # from so many clients on they cannot all have examples of their own


class Windows:
    """Every client has some neighbouring examples, from a random place on: shards overlap."""

    uses_labels = False

    def __init__(self, size: int) -> None:
        self.size = size

    def assign(self, labels: np.ndarray, num_clients: int, seed: int) -> FlatShards:
        """Return ``num_clients`` windows of ``size`` examples."""
        rng = numpy_generator(seed, "partition", num_clients)
        first = rng.integers(len(labels) - self.size, size=num_clients, dtype=np.int32)
        indices = first[:, None] + np.arange(self.size, dtype=np.int32)
        return FlatShards(indices.ravel(), np.full(num_clients, self.size))


class Stopwatch(Callback):
    """Notes when rounds begin and end."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Note the time."""
        self.times.append(time.perf_counter())

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Note the time."""
        self.times.append(time.perf_counter())


def run(num_clients: int) -> tuple[int, float, float]:
    """Train three rounds; return peak memory in MB, seconds of set-up and of the last round."""
    million = num_clients >= MANY
    # without a number of steps a client takes an epoch
    federation = Federation(
        cohort=UniformCohort(size=1000 if million else 10), local_steps=None if million else 2
    )
    partition = Windows(20) if million else None
    return fit(num_clients, federation, logistic_regression(784, 10), partition, 3)


def run_remembering(num_parameters: int) -> tuple[int, float, float]:
    """Train two rounds of 100 clients with SCAFFOLD; return the same."""
    federation = Federation(correction=Scaffold(), local_steps=1, engine="sequential")
    network = nn.Sequential(nn.Flatten(), nn.Linear(784, num_parameters // 785))
    return fit(100, federation, network, None, 2)


def fit(
    num_clients: int,
    federation: Federation,
    network: nn.Module,
    partition: Windows | None,
    num_rounds: int,
) -> tuple[int, float, float]:
    """Train; return peak memory in MB, seconds of set-up and of the last round."""
    torch.manual_seed(0)
    data = TensorDataset(torch.randn(NUM_EXAMPLES, 1, 28, 28), torch.randint(10, (NUM_EXAMPLES,)))
    began = time.perf_counter()
    clients = FederatedDataModule(
        InMemory(data, batch_size=10), num_clients=num_clients, partition=partition
    )
    watch = Stopwatch()
    with tempfile.TemporaryDirectory() as folder:
        trainer = Trainer(
            max_epochs=num_rounds,
            accelerator="cpu",
            callbacks=[federation, PartitionReport(), watch],
            default_root_dir=folder,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        trainer.fit(Classifier(network, WORKLOADS["U-logreg"]), datamodule=clients)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024
    return peak, watch.times[0] - began, watch.times[-1] - watch.times[-2]


def measure(run: Callable[[int], tuple[int, float, float]], size: int) -> tuple[int, float, float]:
    """Return what a run does in a process of its own, forked so that it need not import."""
    with ProcessPoolExecutor(1, mp_context=get_context("fork")) as process:
        return process.submit(run, size).result()


def main() -> None:
    """Print peaks, differences and seconds."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--parameters", type=int, default=0, help="of a model with SCAFFOLD")
    num_parameters = parser.parse_args().parameters
    warnings.filterwarnings("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    torch.set_num_threads(1)
    if num_parameters:
        peak, _, seconds = measure(run_remembering, num_parameters)
        print(
            f"SCAFFOLD, 100 clients who remember {num_parameters:,} numbers each "
            f"({4e-7 * num_parameters:.3g} GB): peak memory {peak} MB, a round {seconds:.0f} s"
        )
        return
    few, many = measure(run, 10)[0], measure(run, 10_000)[0]
    print(f"peak memory: 10 clients {few} MB, 10,000 clients {many} MB, {many - few:+} MB")
    million, setup, seconds = measure(run, MANY)
    print(
        f"1,000,000 clients: {million} MB, {million - few:+} MB; set-up {setup:.1f} s, "
        f"a round of 1,000 clients {seconds:.1f} s"
    )


if __name__ == "__main__":
    main()
