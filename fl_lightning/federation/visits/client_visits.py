"""Evaluation per client: metrics on each client's examples, and losses on its shard.

A client's model is evaluated on examples that the client held out, or on the common test set: the metrics
are what the module logs.

Clients' losses on the current global model are for cohorts that are chosen by loss:

    F_k(x) = Σ_b n_b loss(x; b) / Σ_b n_b            over the batches b of client k's shard

The loss is that of ``training_step``, with the module in eval mode and, if the data set supports it,
without augmentation. Personal layers are those of the client. Each of several processes measures its
share of the clients.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from itertools import islice
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from lightning.pytorch import Trainer
from lightning.pytorch.utilities.data import extract_batch_size
from torch import Tensor
from torch.utils.data import DataLoader

from fl_lightning.client.local_step import SizedBatch, loss_of
from fl_lightning.client.log_collector import weighted_mean
from fl_lightning.client.work import ClientWork
from fl_lightning.core.errors import ConfigurationError
from fl_lightning.core.metrics import PER_EXAMPLE, metrics_of
from fl_lightning.core.seeds import derive_seed, numpy_generator, seed_global_generators
from fl_lightning.data.cohorts.cohort import Cohort
from fl_lightning.data.cohorts.population import ClientIds, Population
from fl_lightning.data.federated import FederatedDataModule
from fl_lightning.federation.processes.ranks import Ranks
from fl_lightning.federation.round_cohorts import limited
from fl_lightning.federation.visits.local_counts import counted
from fl_lightning.federation.visits.personal_models import PersonalModels
from fl_lightning.federation.visits.visiting import StepOf, Visit, visiting

# From a client to a context in which the module holds the client's model.
ModelOfClient = Callable[[int], AbstractContextManager[None]]
# Prefix of the metrics of clients' personal models.
PERSONAL = "personal/"


@torch.no_grad()
def evaluate_clients(
    trainer: Trainer,
    data: FederatedDataModule,
    stage: StepOf,
    clients: npt.NDArray[np.int64] | None = None,
    examples: ClientExamples | None = None,
    *,
    having: ModelOfClient | None = None,
    models: PersonalModels | None = None,
    is_shared: bool = True,
) -> dict[int, dict[str, Tensor]]:
    """Return the metrics that the module logs on each client's examples: by client, as tensors on the CPU.

    Torchmetrics objects are reset for every client, and restored at the end. If the step or a metric fails on a
    client's last batch because it has one example, the client is left out with a warning.

    Args:
        trainer: the Trainer of the module, which is evaluated in eval mode.
        data: the data module with the clients.
        stage: ``validation`` or ``test``.
        clients: ids of the clients, all if None; clients without examples are skipped.
        examples: the examples of each client; if None, those held out for the stage.
        having: returns a context in which the module holds a client's model; None for the module's own.
        models: personal models, evaluated as well; their metrics' names begin with ``personal/``. On common
            examples only they are evaluated.
        is_shared: whether each process evaluates its share of the clients; if not, it evaluates all.
    """
    examples = examples or held_out_examples(data, stage)
    ids = (examples.clients if clients is None else clients).tolist()
    ids = ids[trainer.global_rank :: trainer.world_size] if is_shared else ids
    kinds = [] if models is not None and examples.are_common else [("", having)]
    if models is not None:
        kinds.append((PERSONAL, models.of))
    metrics = metrics_of(trainer.lightning_module)
    found = dict[int, dict[str, Tensor]]()
    for prefix, model_of in kinds:
        # clients' examples are no part of the module's own validation
        with visiting(trainer, stage, mode="eval") as visit:
            for client in ids:
                for metric in metrics:  # of the global set, of the client before, logged or not
                    metric.reset()
                with nullcontext() if model_of is None else model_of(client):
                    logged = _logged(visit, examples.batches(client), client)
                if logged:
                    named = {f"{prefix}{name}": value for name, value in logged.items()}
                    found[client] = found.get(client, {}) | named
    return found


def _logged(visit: Visit, batches: Iterator[SizedBatch], client: int) -> dict[str, Tensor]:
    """Return what a module logs on a client's batches; empty if a batch of one example fails."""
    try:
        for _ in visit.steps(batches):
            pass
        logged = {n: v.cpu() for n, v in visit.logs.collect().items() if PER_EXAMPLE not in n}
        return logged | {k: torch.tensor(v) for k, v in visit.logs.collect_metrics().items()}
    except (ValueError, RuntimeError, IndexError) as error:
        if visit.size != 1:
            raise
        visit.logs.forget()
        warnings.warn(
            f"per-client evaluation leaves client {client} out, because its last batch has one example "
            f"({type(error).__name__}: {error}): let clients hold out more examples, by larger fractions, fewer "
            "clients or a partition with min_examples",
            stacklevel=2,
        )
        return {}


@dataclass(frozen=True)
class ClientExamples:
    """Examples on which each client is evaluated: their numbers, and iterators over their batches.

    Attributes:
        num_examples: number of examples of each client, shape (num_clients,).
        batches: from a client to an iterator over (batch, number of examples).
        are_common: whether all clients have the same examples.
    """

    num_examples: npt.NDArray[np.int64]
    batches: Callable[[int], Iterator[tuple[Any, int]]]
    are_common: bool = False

    @property
    def clients(self) -> npt.NDArray[np.int64]:
        """Sorted ids of the clients with examples."""
        return np.flatnonzero(self.num_examples)


def held_out_examples(data: FederatedDataModule, stage: str) -> ClientExamples:
    """Return the examples that every client holds out for ``validation`` or ``test``.

    Example:
        >>> from fl_lightning.data import Digits
        >>> data = FederatedDataModule(Digits(), num_clients=9, client_test_fraction=0.2, seed=0)
        >>> len(held_out_examples(data, "test").clients)
        9
        >>> len(held_out_examples(data, "validation").clients)
        0
    """
    return ClientExamples(
        data.held_out(stage).num_examples, lambda client: data.held_out_batches(client, stage)
    )


def common_test_examples(trainer: Trainer, data: FederatedDataModule) -> ClientExamples:
    """Return the whole test set, limited by ``limit_test_batches``, as examples of every client with a shard.

    Raises:
        ConfigurationError: if the data module has no single `DataLoader` for tests.
    """
    loader = data.test_dataloader()
    loader = loader[0] if isinstance(loader, (list, tuple)) and len(loader) == 1 else loader
    if not isinstance(loader, DataLoader):
        raise ConfigurationError(
            "ClientEvaluation(common_test_set=True) needs a test_dataloader() that returns one DataLoader, got "
            f"{type(loader).__name__}: return one, or set common_test_set to false and data.client_test_fraction"
        )
    count = limited(len(loader), trainer.limit_test_batches)

    def batches(client: int) -> Iterator[tuple[Any, int]]:
        return ((batch, extract_batch_size(batch)) for batch in islice(loader, count))

    total = sum(size for _, size in batches(0))
    return ClientExamples(
        np.where(data.clients.num_examples > 0, total, 0), batches, are_common=True
    )


def chosen_clients(
    data: FederatedDataModule, most: int, examples: ClientExamples | None = None
) -> npt.NDArray[np.int64]:
    """Return the sorted ids of clients with examples to evaluate on; draw ``most`` clients if there are more.

    Args:
        data: the data module with the clients.
        most: most clients.
        examples: the examples; if None, those that clients hold out for validation.

    Example:
        >>> from fl_lightning.data import Digits
        >>> data = FederatedDataModule(Digits(), num_clients=9, client_val_fraction=0.2, seed=0)
        >>> len(chosen_clients(data, 10)), len(chosen_clients(data, 4))
        (9, 4)
    """
    clients = (examples or held_out_examples(data, "validation")).clients
    if len(clients) <= most:
        return clients
    return np.sort(numpy_generator(data.seed, "evaluated").choice(clients, most, replace=False))


def refresh_losses(
    trainer: Trainer,
    cohort: Cohort,
    population: Population,
    seed: int,
    having: ModelOfClient | None = None,
) -> None:
    """Measure clients' losses for a cohort that chooses clients by loss, and store them in the population.

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
    having: ModelOfClient | None = None,
) -> dict[int, float]:
    """Return each client's mean loss under the module's model; clients without examples are left out.

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
