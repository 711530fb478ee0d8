"""Evaluation per client: metrics that a module logs on each client's examples.

A client's model is evaluated on examples that the client held out, or on the common test set.
"""

from __future__ import annotations

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

from fl_lightning.client.local_step import SizedBatch
from fl_lightning.core.errors import ConfigurationError
from fl_lightning.core.metrics import PER_EXAMPLE, metrics_of
from fl_lightning.core.seeds import numpy_generator
from fl_lightning.data.federated import FederatedDataModule
from fl_lightning.federation.round_cohorts import limited
from fl_lightning.federation.visits.personal_models import PersonalModels
from fl_lightning.federation.visits.visiting import StepOf, Visit, visiting

# Prefix of the metrics of clients' personal models.
PERSONAL = "personal/"


def evaluated_clients(
    trainer: Trainer,
    data: FederatedDataModule,
    stage: StepOf,
    clients: npt.NDArray[np.int64],
    models: PersonalModels | None,
    examples: ClientExamples | None = None,
) -> dict[int, dict[str, Tensor]]:
    """Return metrics by client, of the model in the module and of clients' personal models.

    Args:
        trainer: the Trainer of the module; each of several processes evaluates its share of the clients.
        data: the data module with the clients.
        stage: ``validation`` or ``test``.
        clients: ids of the clients.
        models: personal models, whose metrics' names begin with ``personal/``; None without any.
        examples: the examples; if None, those that clients hold out for the stage. On common examples only
            personal models are evaluated.
    """
    found = dict[int, dict[str, Tensor]]()
    if examples is None or not examples.are_common:
        found = evaluate_clients(trainer, data, stage, clients, examples=examples)
    if models is not None:
        own = evaluate_clients(trainer, data, stage, clients, having=models.of, examples=examples)
        for client, metrics in own.items():
            named = {f"{PERSONAL}{name}": value for name, value in metrics.items()}
            found[client] = found.get(client, {}) | named
    return found


@torch.no_grad()
def evaluate_clients(
    trainer: Trainer,
    data: FederatedDataModule,
    stage: StepOf,
    clients: npt.NDArray[np.int64] | None = None,
    having: Callable[[int], AbstractContextManager[None]] | None = None,
    examples: ClientExamples | None = None,
    *,
    is_shared: bool = True,
) -> dict[int, dict[str, Tensor]]:
    """Return the metrics that the module logs on each client's examples, on the CPU.

    Torchmetrics objects are reset for every client, and restored in the end. A client is left out, with a
    warning, if step or metric fails on a last batch of one example.

    Args:
        trainer: the Trainer of the module, which is evaluated in eval mode.
        data: the data module with the clients.
        stage: ``validation`` or ``test``.
        clients: ids of the clients, all if None; clients without examples are left out.
        having: makes a context in which the module holds a client's model; None for the model of the module.
        examples: the examples; if None, those that clients hold out for the stage.
        is_shared: whether each process evaluates its share of the clients; if not, it evaluates all.
    """
    examples = examples or held_out_examples(data, stage)
    ids = (examples.clients if clients is None else clients).tolist()
    metrics = metrics_of(trainer.lightning_module)
    values = {}
    # clients' examples are no part of the module's own validation
    with visiting(trainer, stage, mode="eval") as visit:
        for client in ids[trainer.global_rank :: trainer.world_size] if is_shared else ids:
            for metric in metrics:  # of the global set, of the client before, logged or not
                metric.reset()
            with nullcontext() if having is None else having(client):
                logged = _logged(visit, examples.batches(client), client)
            if logged:
                values[client] = logged
    return values


def _logged(visit: Visit, batches: Iterator[SizedBatch], client: int) -> dict[str, Tensor]:
    """Return the values that a step logs on a client's batches; empty if a batch of one example fails."""
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
            f"per-client evaluation: client {client} is left out, whose last batch has one example: "
            f"{type(error).__name__}: {error} Have clients hold out more examples, by larger "
            "fractions, fewer clients or a partition with min_examples",
            stacklevel=2,
        )
        return {}


@dataclass(frozen=True)
class ClientExamples:
    """Examples by client.

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
    """Return the whole test set, limited by ``limit_test_batches``, for every client that trains.

    Raises:
        ConfigurationError: if the data module has no single `DataLoader` for tests.
    """
    loader = data.test_dataloader()
    loader = loader[0] if isinstance(loader, (list, tuple)) and len(loader) == 1 else loader
    if not isinstance(loader, DataLoader):
        raise ConfigurationError(
            "ClientEvaluation(common_test_set=True) needs one test set, of which test_dataloader() "
            f"returns a DataLoader, got {type(loader).__name__}: return one, or set "
            "common_test_set to false and data.client_test_fraction"
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
    """Return the sorted ids of clients with examples; draw ``most`` of them if there are more.

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
