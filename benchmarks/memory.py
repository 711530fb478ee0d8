"""What clients cost in memory: ``python -m benchmarks.memory``.

The same run, logistic regression on 60,000 random examples with 10 clients of 10 a round, once
with 10 and once with 10,000 clients, each in a process of its own. Prints the peak resident memory.
"""

from __future__ import annotations

import argparse
import logging
import resource
import subprocess
import sys
import warnings

import torch
from lightning.pytorch import Trainer
from torch.utils.data import TensorDataset

from benchmarks.overhead import Classifier, InMemory, logistic_regression
from fl_lightning import FederatedDataModule, Federation, UniformCohort

NUM_EXAMPLES = 60_000


def run(num_clients: int) -> None:
    """Train three rounds and print this process's peak memory in MB."""
    warnings.filterwarnings("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    torch.manual_seed(0)
    data = TensorDataset(torch.randn(NUM_EXAMPLES, 1, 28, 28), torch.randint(10, (NUM_EXAMPLES,)))
    clients = FederatedDataModule(InMemory(data, batch_size=10), num_clients=num_clients)
    trainer = Trainer(
        max_epochs=3,
        accelerator="cpu",
        callbacks=[Federation(cohort=UniformCohort(size=10), local_steps=2)],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Classifier(logistic_regression()), datamodule=clients)
    print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024)


def peak(num_clients: int) -> int:
    """Return the peak memory of a run in a fresh process, in MB."""
    command = [sys.executable, "-m", "benchmarks.memory", "--num-clients", str(num_clients)]
    output = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    return int(output.splitlines()[-1])


def main() -> None:
    """Print both peaks and their difference."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--num-clients", type=int, help="only this run, in this process")
    num_clients = parser.parse_args().num_clients
    if num_clients is not None:
        run(num_clients)
        return
    few, many = peak(10), peak(10_000)
    print(f"peak memory: 10 clients {few} MB, 10,000 clients {many} MB, {many - few:+} MB")


if __name__ == "__main__":
    main()
