"""Clients' losses on the present global model, for samplers that choose by them.

    F_k(x) = Σ_b n_b loss(x; b) / Σ_b n_b            over the batches b of client k's shard

The loss is what ``training_step`` returns, with the module in eval mode and, if the data set knows
how, without augmentation. Layers that are a client's own are its own here as well. Of several processes
each measures its share.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from itertools import islice

import torch
from lightning.pytorch import Trainer

from fl_lightning.client.local_step import SizedBatch, loss_of
from fl_lightning.core.metrics import weighted_mean
from fl_lightning.core.seeds import derive_seed, seed_global_generators
from fl_lightning.data.cohorts.cohort import CohortSampler, as_cohort
from fl_lightning.data.cohorts.population import ClientIds, Population
from fl_lightning.data.federated import FederatedDataModule
from fl_lightning.federation.processes.ranks import Ranks
from fl_lightning.federation.visits.visiting import Visit, visiting

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
    data: FederatedDataModule = trainer.datamodule  # type: ignore[attr-defined]
    found = {}
    with visiting(trainer, mode="eval") as visit:
        for client in clients.tolist():
            seed_global_generators(derive_seed(seed, "fresh loss", trainer.current_epoch, client))
            batches = islice(_batches(data, client), max_batches)
            with nullcontext() if having is None else having(client):
                loss = _mean_loss(visit, batches)
            if loss is not None:
                found[client] = loss
    return found


def _batches(data: FederatedDataModule, client: int) -> Iterator[SizedBatch]:
    for indices in data.clients[client].split(data.batch_size):
        if len(indices):
            yield data.evaluation_batch(indices), len(indices)


def _mean_loss(visit: Visit, batches: Iterator[SizedBatch]) -> float | None:
    losses, sizes = [], []
    for output in visit.steps(batches):
        loss = loss_of(output)
        if loss is not None:
            losses.append(loss)
            sizes.append(visit.size)
    return float(weighted_mean(losses, sizes)) if losses else None
