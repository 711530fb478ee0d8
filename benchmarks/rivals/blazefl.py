"""BlazeFL: its own FedAvg, clients in turn, as in its examples.

A client's state of the optimizer lives on to the next client: that is how its trainer is. Every
client gets a `DataLoader` of its own, which is what its data sets are asked for.
"""

from __future__ import annotations

import torch
from blazefl.contrib.fedavg import (
    FedAvgBaseClientTrainer,
    FedAvgBaseServerHandler,
    FedAvgPartitionType,
)
from torch import Generator, Tensor, nn
from torch.utils.data import DataLoader, RandomSampler, TensorDataset

from benchmarks.process import Column
from benchmarks.rivals import adapter, stopwatch
from benchmarks.workloads import SEED, Workload


class Shards:
    """The clients' examples: a `PartitionedDataset`."""

    def __init__(self, work: Workload) -> None:
        self.work = work
        self.x, self.y = work.data()

    def get_dataloader(
        self,
        type_: FedAvgPartitionType,
        cid: int,
        batch_size: int,
        generator: Generator | None = None,
    ) -> DataLoader[tuple[Tensor, ...]]:
        """Return one client's loader: of all its examples, or of enough for its steps."""
        own = self.work.shard(cid)
        shard = TensorDataset(self.x[own], self.y[own])
        steps = self.work.local_steps
        sampler = RandomSampler(
            shard, num_samples=steps and steps * batch_size, generator=generator
        )
        return DataLoader(shard, batch_size, sampler=sampler, generator=generator)


class TheNetwork:
    """The workload's network, whatever name is asked for: a `ModelSelector`."""

    def __init__(self, work: Workload) -> None:
        self.work = work

    def select_model(self, model_name: str) -> nn.Module:
        """Return it with its initial weights."""
        return self.work.initial_network()


def train(work: Workload, num_rounds: int) -> Column:
    """Train so many rounds."""
    torch.set_num_threads(1)
    shards = Shards(work)
    watch = stopwatch(work, (shards.x, shards.y))
    common = {
        "model_selector": TheNetwork(work),
        "model_name": "",
        "dataset": shards,
        "num_clients": work.num_clients,
        "device": "cpu",
        "batch_size": work.batch_size,
        "seed": SEED,
    }
    server = FedAvgBaseServerHandler(
        **common,
        global_round=num_rounds,
        sample_ratio=(work.cohort + 0.5) / work.num_clients,  # rounded down
    )
    clients = FedAvgBaseClientTrainer(**common, epochs=1, lr=work.lr)
    clients.optimizer = torch.optim.SGD(
        clients.model.parameters(),
        lr=work.lr,
        momentum=work.momentum,
        weight_decay=work.weight_decay,
    )
    while not server.if_stop():
        cohort = server.sample_clients()
        clients.local_process(server.downlink_package(), cohort)
        for package in clients.uplink_package():
            server.load(package)
        watch.round_done()
    return watch.report()


if __name__ == "__main__":
    adapter(train)
