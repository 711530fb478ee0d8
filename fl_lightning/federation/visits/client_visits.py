"""The metrics that a module logs on each client's examples."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext

import numpy as np
import numpy.typing as npt
import torch
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor

from fl_lightning.client.local_step import SizedBatch
from fl_lightning.core.metric_states import metrics_of
from fl_lightning.data.federated import FederatedDataModule
from fl_lightning.federation.visits.client_examples import ClientExamples, held_out_examples
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
    module, found = trainer.lightning_module, dict[int, dict[str, Tensor]]()
    if examples is None or not examples.are_common:
        found = evaluate_clients(trainer, module, data, stage, clients, examples=examples)
    if models is not None:
        own = evaluate_clients(
            trainer, module, data, stage, clients, having=models.of, examples=examples
        )
        for client, metrics in own.items():
            named = {f"{PERSONAL}{name}": value for name, value in metrics.items()}
            found[client] = found.get(client, {}) | named
    return found


@torch.no_grad()
def evaluate_clients(
    trainer: Trainer,
    module: LightningModule,
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
        trainer: whose precision and device are used.
        module: evaluated as it is, in eval mode.
        data: whose clients.
        stage: ``validation`` or ``test``: whose step and whose metrics.
        clients: which of them, all if None; those without examples are left out.
        having: has the module hold what is evaluated for a client; if None, that is what it holds.
        examples: on which they are evaluated; if None, those that they hold out for this stage.
        is_shared: whether processes share the clients; if not, each evaluates all that it is given.
    """
    examples = examples or held_out_examples(data, stage)
    ids = (examples.clients if clients is None else clients).tolist()
    metrics = metrics_of(module)
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
    """Return what a step logs on a client's batches; empty if it fails on a batch of one example."""
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
