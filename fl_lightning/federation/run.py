"""The objects that the parts of a run share, made once when a fit starts; and gradients of whole shards."""

from __future__ import annotations

import math

import torch
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor
from torch.optim import Optimizer

from fl_lightning.client.local_training import LocalTrainer
from fl_lightning.client.log_collector import LogCollector
from fl_lightning.client.work import ClientWork
from fl_lightning.core.errors import ClientFailure, ConfigurationError, help_with_one_example
from fl_lightning.core.seeds import derive_seed, seed_global_generators
from fl_lightning.core.space import Space
from fl_lightning.core.update import GlobalModel
from fl_lightning.data.federated import FederatedDataModule
from fl_lightning.federation.checkpoints.files import run_memory
from fl_lightning.federation.hooks import NOT_THE_USERS
from fl_lightning.federation.plan import LocalWork, WorkPlan
from fl_lightning.federation.processes.ranks import Ranks
from fl_lightning.federation.round_cohorts import RoundCohorts
from fl_lightning.federation.visits.lightning_step import LightningStep
from fl_lightning.federation.visits.local_counts import local_schedules
from fl_lightning.federation.visits.visiting import visiting

# Factor by which a scale is lowered at which fp16 gradients overflow.
_LOWER = 16.0


class Run:
    """Shared objects of one fit: module, data, optimizers, processes, client states, work plan and local training.

    Args:
        trainer: a Trainer that is about to fit, with its optimizer built and its module on its device.
        cohorts: the clients of each round.
        work: how much each client trains per round.
        memory_bytes: most bytes of client states to keep in RAM.

    Attributes:
        module: the module that clients train.
        data: the data module with the clients' shards.
        optimizers: the clients' optimizers.
        accumulate: batches per local step.
        ranks: the processes of the run.
        memory: client states that last from round to round.
        plan: each client's examples, their order and its steps.
        collector: collects the values that clients log.
        step: runs one local step.
        by_step: learning-rate schedules that count local steps; None without one.
        local: the sequential engine.
    """

    def __init__(
        self, trainer: Trainer, cohorts: RoundCohorts, work: LocalWork, memory_bytes: float
    ) -> None:
        self.trainer, self.cohorts, self.accumulate = trainer, cohorts, work.accumulate
        self.module: LightningModule = trainer.lightning_module
        self.data: FederatedDataModule = trainer.datamodule  # type: ignore[attr-defined]
        self.optimizers: list[Optimizer] = trainer.optimizers
        self.ranks, self.collector = Ranks(trainer), LogCollector()
        self.memory = run_memory(trainer, memory_bytes)
        self.plan = WorkPlan(self.data, work)
        self.step = LightningStep(trainer, self.collector, work.accumulate)
        self.by_step = local_schedules(trainer)
        self.local = LocalTrainer(
            self.module,
            self.optimizers,
            self.step,
            self.collector,
            [config.scheduler for config in trainer.lr_scheduler_configs],
            self.by_step,
            getattr(trainer.precision_plugin, "scaler", None),
            by_hand=not self.module.automatic_optimization,
            ignore=NOT_THE_USERS,
        )
        self.step.on_new_layout = self.local.tensors.note

    @property
    def num_rounds(self) -> float:
        """Number of planned rounds; infinite if no end is planned."""
        rounds = self.trainer.max_epochs
        return math.inf if rounds is None or rounds < 0 else rounds

    @property
    def round_index(self) -> int:
        """Index of the current round, from 0."""
        return self.trainer.current_epoch

    def shard_gradient(self, model: GlobalModel, work: ClientWork) -> Tensor:
        """Return the gradient of a client's mean loss over its training examples at a given model, shape (k,).

            ∇F_i(x) = Σ_b n_b/n ∇f_b(x),    n = Σ_b n_b

        b: the batches of one pass; with the loader's ``drop_last``, full batches only, as in training.
        Random draws (dropout, augmentation) are keyed by seed, round and client. Afterwards the module
        holds the model.

        Raises:
            ClientFailure: if a step raised, or the gradient is not finite.
        """
        shard, scale = self.plan.shard(work), self.local.round_start.scale()
        self.step.forget_gradients()  # of the last step, which would only take memory
        with (
            visiting(self.trainer, logs=self.collector, in_place=True),
            self.step.counts.of(shard),
        ):
            try:
                return self._finite_gradient(model, shard)
            except (ClientFailure, ConfigurationError):
                raise
            except Exception as error:
                located = f"in the gradient of its whole shard: {type(error).__name__}: {error}"
                sizes = [self.collector.batch_size]
                located += help_with_one_example(error, sizes)
                raise ClientFailure(work.client_id, located) from error
            finally:
                self.local.restore(model)
                self.local.round_start.set_scale(scale)  # with which the client's steps ended

    def _finite_gradient(self, model: GlobalModel, shard: ClientWork) -> Tensor:
        """Return the gradient of a client's whole shard, with the largest loss scale at which it is finite."""
        seed = derive_seed(shard.root_seed, "shard gradient", shard.round_index, shard.client_id)
        scale, num_examples = self.step.scale, sum(shard.sizes)
        while True:
            self.local.restore(model)
            seed_global_generators(seed)
            self.step.forget_gradients()
            for index, (batch, size) in enumerate(self.plan.batches(shard)):
                self.step.backward(batch, size, index, factor=scale * size / num_examples)
            gradient = _gradient(self.local.space) / scale
            if bool(gradient.isfinite().all()):
                return gradient
            if scale <= 1.0:
                reason = "the gradient of its whole shard holds NaN or infinite values"
                raise ClientFailure(shard.client_id, reason)
            scale = max(1.0, scale / _LOWER)


def _gradient(space: Space) -> Tensor:
    """Return the gradients of the exchanged parameters as one vector, shape (k,); 0 where a parameter has none."""
    vector = torch.zeros(space.size, dtype=space.dtype, device=space.device)
    for param, active, view in space.entries(vector):
        if param.grad is not None:
            grad = param.grad.to_dense() if param.grad.is_sparse else param.grad
            flat = grad.reshape(-1)
            view.view(-1).copy_(flat if active is None else flat.index_select(0, active))
    return vector
