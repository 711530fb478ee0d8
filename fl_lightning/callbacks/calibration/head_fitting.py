"""The head before the first round: fitted on the features of all training examples, then frozen.

In a federation all clients take part, whatever the cohort: each passes its examples through the
frozen backbone once and keeps the features; what it sends are the sums that `HeadFit` asks for.
"""

from __future__ import annotations

import numpy as np
import torch
from lightning.pytorch import Trainer
from torch import Tensor, nn

from fl_lightning.callbacks.calibration.owners import example_owners, scoring_context
from fl_lightning.callbacks.calibration.progress import progress_bar
from fl_lightning.callbacks.calibration.shares import own_share, visit_together
from fl_lightning.core.errors import ConfigurationError
from fl_lightning.federation.processes.ranks import Ranks
from fl_lightning.federation.visits.visiting import visiting
from fl_lightning.sparsity.heads.head_fit import (
    Features,
    FittedHead,
    HeadFit,
    check_labels,
    head_features,
)


def fit_head(trainer: Trainer, names: list[str], fit: HeadFit) -> FittedHead:
    """Fit the head on the training data and put it into the module; to be called by all processes.

    Args:
        trainer: with a module on its device.
        names: of the modules that are the head: one linear layer.
        fit: how.

    Raises:
        ConfigurationError: if the head is anything else.
    """
    head = _linear(trainer.lightning_module, names)
    device = trainer.strategy.root_device
    owners = _features(trainer, head, fit)

    def reduce(sums: Tensor) -> None:
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
    module, owners = trainer.lightning_module, example_owners(trainer)
    ids = np.flatnonzero(owners.num_examples)
    mine = ids[own_share(trainer, ids, owners.num_examples[ids])].tolist()
    num_batches = sum(-(-int(owners.num_examples[i]) // owners.batch_size) for i in mine)
    found: list[Features] = []

    def find() -> None:
        for owner in mine:
            parts = []
            for batch in map(visit.prepared, owners.batches(owners.indices(owner))):
                parts.append((head_features(module, head, batch, fit.logits), fit.labels(batch)))
                tick()
            features, labels = zip(*parts, strict=True)
            # double precision follows, which not every accelerator has
            found.append((torch.cat(features).float().cpu(), torch.cat(labels).cpu()))
            check_labels(found[-1][1], head.out_features)

    with (
        progress_bar(trainer, "Features for the head", num_batches) as tick,
        visiting(trainer, mode="eval") as visit,
        scoring_context(trainer),
    ):
        visit_together(trainer, find)
    return found


def _linear(module: nn.Module, names: list[str]) -> nn.Linear:
    found = [module.get_submodule(name) for name in names]
    if len(found) != 1 or not isinstance(found[0], nn.Linear):
        kinds = [type(head).__name__ for head in found]
        raise ConfigurationError(
            f"a head is fitted if it is one Linear layer; {type(module).__name__} has "
            f"{dict(zip(names, kinds, strict=True))}: name one with head_name, or use head: train "
            "or head: freeze"
        )
    return found[0]
