"""The metrics that a module logs on each client's examples.

What a client's model is evaluated on: examples that the client held out, or the common test set.
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
from fl_lightning.core.metrics import metrics_of
from fl_lightning.core.seeds import numpy_generator
from fl_lightning.data.federated import FederatedDataModule
from fl_lightning.federation.groups import limited
from fl_lightning.federation.visits.personal_models import PersonalModels
from fl_lightning.federation.visits.visiting import StepOf, Visit, visiting

# With which names of metrics of clients' own models begin.
PERSONAL = "personal/"


def evaluated_clients(
    trainer: Trainer,
    data: FederatedDataModule,
    stage: StepOf,
    clients: npt.NDArray[np.int64],
    models: PersonalModels | None,
    examples: ClientExamples | None = None,
) -> dict[int, dict[str, Tensor]]:
    """Return clients' metrics by client, of the model that the module holds and of their own ones.

    Args:
        trainer: whose module, precision and device are used; of several processes each evaluates its share.
        data: whose clients.
        stage: ``validation`` or ``test``.
        clients: which of them.
        models: their own; None if there are none. Their metrics' names begin with ``personal/``.
        examples: on which; if None, those that clients hold out for the stage. Of common ones only the
            clients' own models are evaluated.
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

    Of several processes each evaluates its own share of the clients, unless told otherwise. Torchmetrics objects begin anew
    with every client and have in the end the states that they had before. A client with so few
    examples that step or metric fails on a batch of one is left out, with a warning.

    Args:
        trainer: whose module is evaluated as it is, in eval mode.
        data: whose clients.
        stage: ``validation`` or ``test``: whose step and whose metrics.
        clients: which of them, all if None; those without examples are left out.
        having: has the module hold what is evaluated for a client; if None, that is what it holds.
        examples: on which they are evaluated; if None, those that they hold out for this stage.
        is_shared: whether processes share the clients; if not, each evaluates all that it is given.
    """
    examples = examples or held_out_examples(data, stage)
    ids = (examples.clients if clients is None else clients).tolist()
    metrics = metrics_of(trainer.lightning_module)
    values = {}
    # the clients' examples are no part of the module's own validation
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
        logged = {name: value.cpu() for name, value in visit.logs.collect().items()}
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
        num_examples: how many there are for each client, shape (num_clients,).
        batches: from a client to (batch, number of examples), one after the other.
        are_common: whether they are the same ones for all clients.
    """

    num_examples: npt.NDArray[np.int64]
    batches: Callable[[int], Iterator[tuple[Any, int]]]
    are_common: bool = False

    @property
    def clients(self) -> npt.NDArray[np.int64]:
        """The clients for which there are some, increasing."""
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
        data.held_out_for(stage).num_examples, lambda client: data.held_out_batches(client, stage)
    )


def common_test_examples(trainer: Trainer, data: FederatedDataModule) -> ClientExamples:
    """Return the whole test set, limited by ``limit_test_batches``, for every client that trains.

    Raises:
        ConfigurationError: if the data module has not one `DataLoader` for tests.
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
        data: whose clients.
        most: how many at most.
        examples: on which they are evaluated; those that they hold out for validation if None.

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
