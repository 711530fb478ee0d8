"""The gradient of a client's whole shard at the global model.

    ∇F_i(x) = Σ_b n_b/n ∇f_b(x),    n = Σ_b n_b

b: the batches of one pass; with the loader's ``drop_last``, full batches only, as in training. Random
draws (dropout, augmentation) are keyed by seed, round and client.

Clients' losses on the current global model, for cohorts that are chosen by loss:

    F_k(x) = Σ_b n_b loss(x; b) / Σ_b n_b            over the batches b of client k's shard

The loss is that of ``training_step``, with the module in eval mode and, if the data set supports it,
without augmentation. Personal layers are those of the client. Each of several processes measures its
share of the clients.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext

import torch
from lightning.pytorch import Trainer
from torch import Tensor

from fl_lightning.client.local_step import SizedBatch, loss_of
from fl_lightning.client.local_training import LocalTrainer
from fl_lightning.client.log_collector import weighted_mean
from fl_lightning.client.work import ClientWork
from fl_lightning.core.errors import ClientFailure, ConfigurationError, help_with_one_example
from fl_lightning.core.seeds import derive_seed, seed_global_generators
from fl_lightning.core.update import GlobalModel
from fl_lightning.data.cohorts.cohort import Cohort
from fl_lightning.data.cohorts.population import ClientIds, Population
from fl_lightning.data.federated import FederatedDataModule
from fl_lightning.federation.plan import WorkPlan
from fl_lightning.federation.processes.ranks import Ranks
from fl_lightning.federation.visits.lightning_step import LightningStep
from fl_lightning.federation.visits.local_counts import counted
from fl_lightning.federation.visits.visiting import Visit, visiting

# Factor by which a scale is lowered at which fp16 gradients overflow.
_LOWER = 16.0


class ShardGradient:
    """Computes the gradient of a client's whole shard, in the module that clients train.

    Args:
        module: the module.
        local: the sequential engine.
        step: computes gradients of batches.
        plan: builds the batches of clients' shards.
    """

    def __init__(
        self, module: torch.nn.Module, local: LocalTrainer, step: LightningStep, plan: WorkPlan
    ) -> None:
        self._module, self._local, self._step, self._plan = module, local, step, plan
        self._size = 0  # of the batch at work

    def __call__(self, model: GlobalModel, work: ClientWork) -> Tensor:
        """Return the gradient at a model, shape (k,); afterwards the module holds that model.

        Raises:
            ClientFailure: if a step raised, or the gradient is not finite.
        """
        local, step = self._local, self._step
        step.forget_gradients()  # of the last step, which would only take memory
        shard = self._plan.shard(work)
        with (
            visiting(step.trainer, logs=local.collector, in_place=True),
            step.counts.of(shard),
        ):
            try:
                return self._finite(model, shard)
            except (ClientFailure, ConfigurationError):
                raise
            except Exception as error:
                located = f"in the gradient of its whole shard: {type(error).__name__}: {error}"
                located += help_with_one_example(error, [self._size], work.num_examples)
                raise ClientFailure(work.client_id, located) from error
            finally:
                local.restore(model)

    def _finite(self, model: GlobalModel, shard: ClientWork) -> Tensor:
        """Return the gradient, with the largest loss scale at which it is finite."""
        seed = derive_seed(shard.root_seed, "shard gradient", shard.round_index, shard.client_id)
        scale = self._step.scale
        while True:
            self._local.restore(model)
            seed_global_generators(seed)
            gradient = self._scaled(shard, scale) / scale
            if bool(gradient.isfinite().all()):
                return gradient
            if scale <= 1.0:
                reason = "the gradient of its whole shard holds NaN or infinite values"
                raise ClientFailure(shard.client_id, reason)
            scale = max(1.0, scale / _LOWER)

    def _scaled(self, shard: ClientWork, scale: float) -> Tensor:
        self._step.forget_gradients()
        num_examples = sum(shard.sizes)
        for index, (batch, size) in enumerate(self._plan.batches(shard)):
            self._size = size
            self._step.backward(batch, size, index, factor=scale * size / num_examples)
        space = self._local.space
        zeros = torch.zeros(space.size, dtype=space.dtype, device=space.device)
        for param, active, view in space.entries(zeros):
            if param.grad is not None:
                grad = param.grad.to_dense() if param.grad.is_sparse else param.grad
                flat = grad.reshape(-1)
                view.view(-1).copy_(flat if active is None else flat.index_select(0, active))
        return zeros


# From a client to a context in which the module holds the client's model.
Having = Callable[[int], AbstractContextManager[None]]


def refresh_losses(
    trainer: Trainer,
    cohort: Cohort,
    population: Population,
    seed: int,
    having: Having | None = None,
) -> None:
    """Measure the losses of a cohort's candidates and store them in the population.

    To be called by all processes before the cohort is drawn, with the global model in the module;
    ``having`` as in `measured_losses`.
    """
    clients = cohort.candidates(trainer.current_epoch, population, seed)
    if not len(clients):
        return
    ranks = Ranks(trainer)
    share = clients[ranks.rank :: ranks.size]
    own = measured_losses(trainer, share, cohort.loss_batches, seed, having)
    for losses in ranks.gather(own):
        population.losses[list(losses)] = list(losses.values())


@torch.no_grad()
def measured_losses(
    trainer: Trainer,
    clients: ClientIds,
    max_batches: int | None,
    seed: int,
    having: Having | None = None,
) -> dict[int, float]:
    """Return clients' mean losses with the module's model, without clients that have no example.

    Args:
        trainer: the Trainer of the module.
        clients: ids of the clients.
        max_batches: most batches of each client; None for all.
        seed: seed of draws in training steps.
        having: makes a context in which the module holds a client's personal layers; None without any.
    """
    if not len(clients):
        return {}
    data: FederatedDataModule = trainer.datamodule  # type: ignore[attr-defined]
    found = {}
    with visiting(trainer, mode="eval") as visit:
        for client in clients.tolist():
            seed_global_generators(derive_seed(seed, "fresh loss", trainer.current_epoch, client))
            order, most = data.clients[client], max_batches or sys.maxsize
            sizes = [len(part) for part in order.split(data.batch_size)[:most] if len(part)]
            work = ClientWork(client, len(order), order[: sum(sizes)], sizes, trainer.current_epoch)
            batches = ((data.evaluation_batch(part), len(part)) for part in work.batches if sizes)
            with nullcontext() if having is None else having(client), counted(trainer, work):
                loss = _mean_loss(visit, batches)
            if loss is not None:
                found[client] = loss
    return found


def _mean_loss(visit: Visit, batches: Iterator[SizedBatch]) -> float | None:
    losses, sizes = [], []
    for output in visit.steps(batches):
        loss = loss_of(output)
        if loss is not None:
            losses.append(loss)
            sizes.append(visit.size)
    return float(weighted_mean(losses, sizes)) if losses else None
