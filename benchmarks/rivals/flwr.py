"""Flower: its FedAvg in its simulation over Ray, with one worker process.

Network and data stay in the worker from one client to the next; a client shuffles and gathers from
tensors, as the bare loop does. The memory is that of worker and server; the server holds the data
for the bare loop's rounds only.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass, replace

os.environ |= {"FLWR_TELEMETRY_ENABLED": "0", "FLWR_DISABLE_UPDATE_CHECK": "1"}
os.environ["RAY_ENABLE_UV_RUN_RUNTIME_ENV"] = "0"  # the worker uses this very environment

import torch
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg
from flwr.simulation import run_simulation
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812 - as everyone writes it

from benchmarks.bare import shuffled
from benchmarks.process import Column, peak_mb
from benchmarks.rivals import adapter, stopwatch
from benchmarks.workloads import Workload


@dataclass
class Worker:
    """What a process keeps between its clients."""

    network: nn.Module
    x: Tensor
    y: Tensor


_workers: dict[str, Worker] = {}


def worker_of(work: Workload) -> Worker:
    """Return this process's worker, made when it is first asked for."""
    if work.title not in _workers:
        torch.set_num_threads(1)
        _workers[work.title] = Worker(work.initial_network(), *work.data())
    return _workers[work.title]


def client_app(work: Workload) -> ClientApp:
    """Return what every client does with a message."""
    app = ClientApp()

    @app.train()  # type: ignore[untyped-decorator]
    def train(message: Message, context: Context) -> Message:
        worker, client = worker_of(work), int(context.node_config["partition-id"])
        network = worker.network
        network.load_state_dict(message.content["arrays"].to_torch_state_dict())
        optimizer = torch.optim.SGD(
            network.parameters(),
            lr=work.lr,
            momentum=work.momentum,
            weight_decay=work.weight_decay,
        )
        for batch in shuffled(work, client):
            optimizer.zero_grad()
            F.cross_entropy(network(worker.x[batch]), worker.y[batch]).backward()
            optimizer.step()
        facts = {"num-examples": int(work.sizes[client]), "peak-mb": peak_mb()}
        content = {"arrays": ArrayRecord(network.state_dict()), "metrics": MetricRecord(facts)}
        return Message(RecordDict(content), reply_to=message)

    return app


class Watch(FedAvg):  # type: ignore[misc]
    """FedAvg that notes when each round is aggregated, and the worker's memory."""

    def __init__(self, work: Workload) -> None:
        super().__init__(
            fraction_train=(work.cohort + 0.5) / work.num_clients,  # rounded down
            fraction_evaluate=0.0,
            min_available_nodes=work.num_clients,
        )
        self.stopwatch = stopwatch(work, work.data(), in_one_process=False)
        self.worker_mb = 0.0

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Aggregate and note the time."""
        arrays, metrics = super().aggregate_train(server_round, replies)
        if arrays is None or metrics is None:
            raise SystemExit("no client of Flower's came to an end")
        self.worker_mb = max(self.worker_mb, float(metrics["peak-mb"]))
        self.stopwatch.round_done()
        return arrays, metrics


def train(work: Workload, num_rounds: int) -> Column:
    """Train so many rounds."""
    server, watch = ServerApp(), Watch(work)

    @server.main()  # type: ignore[untyped-decorator]
    def main(grid: Grid, context: Context) -> None:
        arrays = ArrayRecord(work.initial_network().state_dict())
        watch.start(grid=grid, initial_arrays=arrays, num_rounds=num_rounds)

    one_worker = {
        "init_args": {"num_cpus": 1, "include_dashboard": False},
        "client_resources": {"num_cpus": 1, "num_gpus": 0.0},
    }
    run_simulation(
        server_app=server,
        client_app=client_app(replace(work)),  # a copy without cached arrays: it is pickled often
        num_supernodes=work.num_clients,
        backend_config=one_worker,
    )
    return watch.stopwatch.report(extra_mb=watch.worker_mb)


if __name__ == "__main__":
    # by its importable name: the worker process would not find what __main__ defines
    from benchmarks.rivals import flwr  # noqa: PLW0406 - that is the point

    adapter(flwr.train)
