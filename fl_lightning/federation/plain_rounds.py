"""A run of rounds without a Trainer: what the papers write, over the pieces that a fit uses as well.

    x ← server(x, Σ_k n_k Δ_k / Σ_k n_k),    Δ_k = x - (x after client k's local steps)

To read, to try an idea in, and to take out: for a loop of your own, a service, a phone. In a fit the
same two sides, `LocalTrainer` and `Server`, are driven by Lightning's loop, to the same bits.
"""

from __future__ import annotations

from typing import Any

from torch.optim import Optimizer

from fl_lightning.client.local_step import plain_step
from fl_lightning.client.local_training import LocalTrainer
from fl_lightning.client.log_collector import LogCollector
from fl_lightning.core.seeds import seed_global_generators
from fl_lightning.core.update import GlobalModel, Updates
from fl_lightning.data.cohorts.cohort import AllClients, CohortSampler
from fl_lightning.data.cohorts.population import Population
from fl_lightning.data.federated import FederatedDataModule
from fl_lightning.federation.plan import LocalWork, WorkPlan
from fl_lightning.server.aggregator import Aggregator
from fl_lightning.server.robust.rule import RobustRule
from fl_lightning.server.server import Server, ServerOptimizer, fedavg_optimizer


def plain_rounds(
    module: Any,
    optimizer: Optimizer,
    data: FederatedDataModule,
    *,
    rounds: int,
    cohort: CohortSampler | None = None,
    local_epochs: int = 1,
    aggregator: Aggregator | RobustRule | None = None,
    server_optimizer: ServerOptimizer = fedavg_optimizer,
    seed: int = 0,
) -> GlobalModel:
    """Train a module over clients, one after the other; it holds the global model afterwards.

    Args:
        module: whose ``training_step(batch, batch_idx)`` gives the loss; a LightningModule, or any
            other, on the device of the batches.
        optimizer: of the clients, over the module's parameters.
        data: set up for fitting.
        rounds: how many.
        cohort: who takes part in a round; everybody if None.
        local_epochs: passes of a client over its shard.
        aggregator: how updates become one; the mean weighted by examples if None.
        server_optimizer: builds what descends the aggregate.
        seed: root of every draw.

    Returns:
        The global model.

    Example:
        >>> import torch
        >>> from fl_lightning.data import Digits
        >>> from fl_lightning.models import ImageClassifier
        >>> module = ImageClassifier("lenet", num_classes=10, in_chans=1, image_size=32)
        >>> data = FederatedDataModule(Digits(image_size=32), num_clients=20, seed=0)
        >>> data.setup("fit")
        >>> optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
        >>> model = plain_rounds(module, optimizer, data, rounds=1)
        >>> sum(p.numel() for p in module.parameters()) == len(model.params)
        True
    """
    cohort, population = cohort or AllClients(), Population(data.clients.num_examples)
    plan = WorkPlan(data, LocalWork(None, local_epochs, accumulate=1, seed=seed))
    collector = LogCollector()
    client = LocalTrainer(module, optimizer, plain_step(module, optimizer, collector), collector)
    server = Server(client.read(), aggregator, server_optimizer)
    for number in range(rounds):
        client.start_round(number)
        server.open_round(number)
        chosen = cohort.sample(number, population, seed).tolist()
        for work in plan.of(chosen, [number] * len(chosen)):
            seed_global_generators(work.seed)
            with collector.listening_to(module):
                update = client.train(
                    server.model,
                    client_id=work.client_id,
                    num_examples=work.num_examples,
                    batches=plan.steps(work),
                )
            server.receive(Updates.of(update))
        server.close_round()
        client.end_round(server.model)
    return server.model
