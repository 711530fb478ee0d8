"""The head before the first round: fitted on the features of all training examples, then frozen.

In a federation all clients take part, whatever the cohort: each passes its examples through the
frozen backbone once and keeps the features; what it sends are the sums that `HeadFit` asks for.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TypeAlias

import numpy as np
import torch
from lightning.pytorch import Trainer
from torch import Tensor, nn

from fl_lightning.callbacks.calibration.scores import (
    ExampleOwners,
    example_owners,
    own_share,
    progress_bar,
    scoring_context,
    visit_together,
)
from fl_lightning.core.errors import ConfigurationError
from fl_lightning.federation import Ranks, Visit, visiting
from fl_lightning.sparsity.heads import (
    Features,
    FittedHead,
    HeadFit,
    check_labels,
    head_features,
)

# Yields the sums of those clients whose examples are elsewhere, in the order given, each like a tensor;
# see `OneExchange`.
SumsElsewhere: TypeAlias = Callable[[list[int], Tensor], Iterator[Tensor]]


def fit_head(
    trainer: Trainer, names: list[str], fit: HeadFit, elsewhere: SumsElsewhere | None = None
) -> FittedHead:
    """Fit the head on the training data and put it into the module; to be called by all processes.

    Args:
        trainer: with a module on its device.
        names: of the modules that are the head: one linear layer.
        fit: how.
        elsewhere: gives the sums of clients whose examples are not here; None if they are.

    Raises:
        ConfigurationError: if the head is anything else.
    """
    head = linear_head(trainer.lightning_module, names)
    device = trainer.strategy.root_device
    owners = [] if elsewhere is not None else _features(trainer, head, fit)

    def reduce(sums: Tensor) -> None:
        if elsewhere is not None:
            clients = np.flatnonzero(example_owners(trainer).num_examples).tolist()
            for told in elsewhere(clients, sums):
                sums += told
            return
        there = sums.to(device)
        Ranks(trainer).all_reduce(there)
        sums.copy_(there)

    fitted = fit.fit(
        owners,
        head.in_features,
        head.out_features,
        has_bias=head.bias is not None,
        reduce=reduce,
    )
    fitted.write_to(head)
    return fitted


def _features(trainer: Trainer, head: nn.Linear, fit: HeadFit) -> list[Features]:
    """Return the features and labels of the owners that this process visits."""
    owners = example_owners(trainer)
    ids = np.flatnonzero(owners.num_examples)
    mine = ids[own_share(trainer, ids, owners.num_examples[ids])].tolist()
    num_batches = sum(-(-int(owners.num_examples[i]) // owners.batch_size) for i in mine)
    found: list[Features] = []

    def find() -> None:
        for owner in mine:
            found.append(owner_features(visit, owners, owner, head, fit, tick))

    with (
        progress_bar(trainer, "Features for the head", num_batches) as tick,
        visiting(trainer, mode="eval") as visit,
        scoring_context(trainer),
    ):
        visit_together(trainer, find)
    return found


def owner_features(
    visit: Visit,
    owners: ExampleOwners,
    owner: int,
    head: nn.Linear,
    fit: HeadFit,
    tick: Callable[[], None] = lambda: None,
) -> Features:
    """Return the features and labels of an owner's examples, on the CPU.

    Args:
        visit: to the module, in eval mode and the Trainer's precision.
        owners: of the examples.
        owner: which.
        head: whose inputs the features are.
        fit: knows labels and logits.
        tick: told of every batch.
    """
    parts = []
    for batch in map(visit.prepared, owners.batches(owners.indices(owner))):
        parts.append((head_features(visit.module, head, batch, fit.logits), fit.labels(batch)))
        tick()
    features, labels = zip(*parts, strict=True)
    # double precision follows, which not every accelerator has
    found = torch.cat(features).float().cpu(), torch.cat(labels).cpu()
    check_labels(found[1], head.out_features)
    return found


def linear_head(module: nn.Module, names: list[str]) -> nn.Linear:
    """Return the module that a head is, if it is one linear layer.

    Raises:
        ConfigurationError: if it is anything else.
    """
    found = [module.get_submodule(name) for name in names]
    if len(found) != 1 or not isinstance(found[0], nn.Linear):
        kinds = [type(head).__name__ for head in found]
        raise ConfigurationError(
            f"a head is fitted if it is one Linear layer; {type(module).__name__} has "
            f"{dict(zip(names, kinds, strict=True))}: name one with head_name, or use head: train "
            "or head: freeze"
        )
    return found[0]
