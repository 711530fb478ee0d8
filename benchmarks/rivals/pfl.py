"""pfl-research: its FederatedAveraging in its SimulatedBackend, as in its CIFAR-10 benchmark.

Its datasets do not shuffle, so a client's batches are slices and nothing is gathered.
"""

from __future__ import annotations

import types
from functools import partial
from typing import Any

import numpy as np
import torch
from pfl.aggregate.simulate import SimulatedBackend
from pfl.aggregate.weighting import WeightByDatapoints
from pfl.algorithm.base import NNAlgorithmParams
from pfl.algorithm.federated_averaging import FederatedAveraging
from pfl.callback.base import TrainingProcessCallback
from pfl.data.dataset import Dataset
from pfl.data.federated_dataset import FederatedDataset
from pfl.data.sampling import get_user_sampler
from pfl.hyperparam import NNTrainHyperParams
from pfl.metrics import Metrics, Weighted
from pfl.model.pytorch import PyTorchModel
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812 - as everyone writes it

from benchmarks.process import Column, Stopwatch
from benchmarks.rivals import adapter, stopwatch
from benchmarks.workloads import SEED, Workload


def loss(network: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(network(x), y)


@torch.no_grad()
def metrics(network: nn.Module, x: Tensor, y: Tensor) -> dict[str, Any]:
    return {"loss": Weighted(float(loss(network, x, y)) * len(y), len(y))}


class Watch(TrainingProcessCallback):  # type: ignore[misc]
    """Notes when each round ends."""

    def __init__(self, watch: Stopwatch) -> None:
        self.stopwatch = watch

    def after_central_iteration(
        self, aggregate_metrics: Metrics, model: Any, *, central_iteration: int
    ) -> tuple[bool, Metrics]:
        """Note the time."""
        self.stopwatch.round_done()
        return False, Metrics()


def train(work: Workload, num_rounds: int) -> Column:
    """Train so many rounds."""
    torch.set_num_threads(1)
    np.random.seed(SEED)
    x, y = work.data()

    def shard(client: int) -> Dataset:
        own = work.shard(client)
        return Dataset((x[own], y[own]), user_id=str(client))

    users = get_user_sampler("minimize_reuse", range(work.num_clients))
    network = work.initial_network()
    network.loss = types.MethodType(loss, network)  # type: ignore[assignment]
    network.metrics = types.MethodType(metrics, network)  # type: ignore[assignment]
    sgd = partial(torch.optim.SGD, momentum=work.momentum, weight_decay=work.weight_decay)
    central = torch.optim.SGD(network.parameters(), lr=1.0)
    watch = stopwatch(work, (x, y))
    FederatedAveraging().run(
        algorithm_params=NNAlgorithmParams(
            central_num_iterations=num_rounds,
            evaluation_frequency=num_rounds,  # in the first round only
            train_cohort_size=work.cohort,
            val_cohort_size=0,
        ),
        backend=SimulatedBackend(
            training_data=FederatedDataset(shard, users),
            val_data=None,
            postprocessors=[WeightByDatapoints()],
        ),
        model=PyTorchModel(network, local_optimizer_create=sgd, central_optimizer=central),
        model_train_params=NNTrainHyperParams(
            local_batch_size=work.batch_size,
            local_num_epochs=None if work.local_steps else 1,
            local_num_steps=work.local_steps,
            local_learning_rate=work.lr,
        ),
        callbacks=[Watch(watch)],
    )
    return watch.report()


if __name__ == "__main__":
    adapter(train)
