"""Clients' losses on the present global model, for samplers that choose by them.

    F_k(x) = Σ_b n_b loss(x; b) / Σ_b n_b            over the batches b of client k's shard

The loss is what ``training_step`` returns, with the module in eval mode and, if the data set knows
how, without augmentation. Layers that are a client's own are its own here as well. Of several processes
each measures its share.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import torch
from lightning.pytorch import Trainer

from fl_lightning.client.local_training import loss_of
from fl_lightning.client.log_collector import LogCollector
from fl_lightning.core.metric_states import MetricStates, kept_apart, metrics_of
from fl_lightning.core.metrics import weighted_mean
from fl_lightning.core.seeds import derive_seed, seed_global_generators
from fl_lightning.data.cohorts.cohort import CohortSampler, as_cohort
from fl_lightning.data.cohorts.population import ClientIds, Population
from fl_lightning.federation.processes.ranks import Ranks
from fl_lightning.federation.visits.batches import batch_preparation, takes_index

# Has the module hold a client's model.
Having = Callable[[int], AbstractContextManager[None]]


def refresh_losses(
    trainer: Trainer,
    sampler: CohortSampler,
    population: Population,
    seed: int,
    having: Having | None = None,
) -> None:
    """Put the losses that a sampler asks for into what is known of clients; before it draws.

    To be called by all processes, with the global model in the module; ``having`` as in
    `measured_losses`.
    """
    cohort = as_cohort(sampler)
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
    """Return clients' mean losses on what the module holds; without those that have no example.

    Args:
        trainer: whose precision and device are used.
        clients: whose.
        max_batches: at most so many batches of each, None is all.
        seed: of what a training step may draw.
        having: has the module hold a client's own layers; None where there are none.
    """
    if not len(clients):
        return {}
    module, data = trainer.lightning_module, trainer.datamodule  # type: ignore[attr-defined]
    prepare = batch_preparation(trainer) or (lambda batch: batch)
    step = module.training_step
    was_training = {m: m.training for m in module.modules()}
    metrics = metrics_of(module)
    before, found = MetricStates(metrics), {}
    module.eval()
    try:
        with (
            LogCollector().listening_to(module),
            kept_apart(metrics),
            trainer.precision_plugin.train_step_context(),
        ):
            for client in clients.tolist():
                seed_global_generators(
                    derive_seed(seed, "fresh loss", trainer.current_epoch, client)
                )
                losses, sizes = [], []
                batches = data.clients[client].split(data.batch_size)
                with nullcontext() if having is None else having(client):
                    for index, indices in enumerate(batches[:max_batches]):
                        batch = prepare(data.evaluation_batch(indices))
                        output = step(batch, index) if takes_index(step) else step(batch)
                        loss = loss_of(output)
                        if loss is not None and len(indices):
                            losses.append(loss)
                            sizes.append(len(indices))
                if losses:
                    found[client] = float(weighted_mean(losses, sizes))
    finally:
        before.put_back()
        for submodule, training in was_training.items():
            submodule.training = training
    return found
