"""Federated learning without a Trainer: the same `Round`, for a notebook or a loop of your own.

    x ← server(x, Σ_k n_k Δ_k / Σ_k n_k),    Δ_k = x - (x after client k's local steps)

For experiments, services and devices without Lightning. Results are bit-identical to those of a fit.
"""

from __future__ import annotations

import time
from collections.abc import Generator, Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any, cast

from torch import Tensor
from torch.optim import Optimizer

from fl_lightning.client.corrections.correction import Correction
from fl_lightning.client.local_step import PlainStep
from fl_lightning.client.local_training import LocalTrainer
from fl_lightning.client.log_collector import LogCollector
from fl_lightning.client.memory import ClientMemory
from fl_lightning.client.work import ClientWork, GroupWork
from fl_lightning.core.errors import ConfigurationError, raise_together
from fl_lightning.core.update import GlobalModel
from fl_lightning.data.cohorts.cohort import AllClients, Cohort
from fl_lightning.data.cohorts.population import Population
from fl_lightning.data.federated import FederatedDataModule
from fl_lightning.federation.checks.fit import check_simple
from fl_lightning.federation.clients.one_by_one import OneByOne
from fl_lightning.federation.plan import LocalWork, WorkPlan
from fl_lightning.federation.round import Round
from fl_lightning.federation.run import Run
from fl_lightning.federation.stage import Missing, Stage, Stages, Start, Upload
from fl_lightning.federation.stages.order import stages_of_steps
from fl_lightning.federation.stages.transport import Transport
from fl_lightning.server.aggregator import Aggregator
from fl_lightning.server.means.fair_means import ByLosses
from fl_lightning.server.server import Server, ServerOptimizer, as_aggregator, fedavg_optimizer
from fl_lightning.updates.path import Step


class SimpleFederation:
    """Trains a module over many clients without a Trainer, one client after the other.

    Between rounds, and after an error, the module holds the global model.

    Args:
        module: a LightningModule, or any module with a ``training_step(batch, batch_idx)`` that returns
            the loss, on the device of the batches.
        optimizer: the clients' optimizer, over the module's parameters.
        data: the data module, set up for fitting.
        stages: stages of your own, in order.
        correction: term in the clients' objective; none if None.
        updates: transforms of updates on their way up, in order.
        cohort: samples the clients of a round; all clients if None.
        local_epochs: passes of a client over its shard.
        aggregator: combines the updates; their mean, weighted by examples, if None.
        server_optimizer: builds the optimizer that takes the aggregate as its gradient.
        seed: root seed of all random draws.

    Raises:
        ConfigurationError: for options that conflict, or that need a Trainer.

    Example:
        >>> import torch
        >>> from fl_lightning.data import Digits
        >>> from fl_lightning.models import ImageClassifier
        >>> module = ImageClassifier("lenet", num_classes=10, in_chans=1, image_size=32)
        >>> optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
        >>> data = FederatedDataModule(Digits(image_size=32), num_clients=20, seed=0)
        >>> data.setup("fit")
        >>> federation = SimpleFederation(module, optimizer, data)
        >>> model = federation.run(rounds=1)
        >>> sum(p.numel() for p in module.parameters()) == len(model.params)
        True
    """

    def __init__(
        self,
        module: Any,
        optimizer: Optimizer,
        data: FederatedDataModule,
        stages: Sequence[Stage] = (),
        *,
        correction: Correction | None = None,
        updates: Sequence[Step] = (),
        cohort: Cohort | None = None,
        local_epochs: int = 1,
        aggregator: Aggregator | None = None,
        server_optimizer: ServerOptimizer = fedavg_optimizer,
        seed: int = 0,
    ) -> None:
        self.module, self.optimizers, self.data, self.round_index = module, [optimizer], data, 0
        self._cohort, self._seed = cohort or AllClients(), seed
        if self._cohort.needs_fresh_losses:
            raise ConfigurationError(
                f"SimpleFederation has no Trainer, and cohort {type(cohort).__name__} needs one to measure clients' "
                "losses before it samples: set its losses to last_known, or use Federation"
            )
        self._population = Population(data.clients.num_examples)
        aggregator = as_aggregator(aggregator).of_clients(optimizer)
        transport = Transport.of(updates, [], seed)
        built_in = stages_of_steps(correction, aggregator, is_lossy=transport.is_lossy)
        stages = [*built_in, *stages, transport]
        self.plan = WorkPlan(data, LocalWork(None, local_epochs, accumulate=1, seed=seed))
        self.collector, self.memory = LogCollector(), ClientMemory()
        self.ranks = SimpleNamespace(size=1)
        self.step = PlainStep(module, optimizer, self.collector)
        self.local = LocalTrainer(module, optimizer, self.step, self.collector)
        if isinstance(aggregator, ByLosses):
            self.local.check_loss = aggregator.check_loss
        server = Server(self.local.read(), aggregator, server_optimizer)
        self.stages_ahead = Stages(stages)
        raise_together(
            lambda: check_simple(module, data, stages, self._cohort, aggregator),
            lambda: None if correction is None else correction.check_server(server.optimizer),
            *(partial(self._enter, stage) for stage in stages),
        )
        for stage in stages:
            stage.place(self.local.space, None)
        self._clients = OneByOne(cast(Run, self), self.stages_ahead)
        self.round = Round(self, server, self.stages_ahead, self.memory)

    def _enter(self, stage: Stage) -> None:
        try:
            stage.enter(cast(Run, self))  # as far as stages ask for one
        except AttributeError as error:
            if error.obj is not self and error.obj is not self.step:
                raise
            raise ConfigurationError(
                f"SimpleFederation has no Trainer, and {type(stage).__name__} needs one ({error.name}): "
                "leave this stage out, or use Federation"
            ) from error

    def run(self, rounds: int) -> GlobalModel:
        """Run a number of further rounds, and return the global model after them."""
        for _ in range(rounds):
            began = time.perf_counter()
            self.local.start_round(self.round_index)
            self.round.open(self.round_index)
            cohort = self._cohort.sample(self.round_index, self._population, self._seed)
            try:
                self.round.train(cohort.tolist())
                self.round.step()
            finally:  # after an error the module holds the global model as well
                self.local.end_round(self.round.server.model)
            self.round.close()
            record = self.round.record
            record.seconds = time.perf_counter() - began
            record.pooled = self.collector.collect_metrics()
            losses = record.means.by_client("train/loss")
            self._population.note(
                record.finished,
                round_index=self.round_index,
                losses=losses,
                durations=record.durations,
            )
            self.round_index += 1
        return self.round.server.model

    def shard_gradient(self, model: GlobalModel, work: ClientWork) -> Tensor:
        """Raise, since the gradient of a whole shard is computed by a Trainer."""
        raise ConfigurationError(
            "SimpleFederation cannot compute the gradient of a whole shard: use Federation"
        )

    def train(self, start: Start, work: GroupWork) -> Generator[Upload | Missing, None, None]:
        """Train clients that start from the same model and options, and yield their updates or failures."""
        return self._clients.train(start, work)
