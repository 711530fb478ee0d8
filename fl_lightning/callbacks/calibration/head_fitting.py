"""Fit of the head before the first round, on the features of all training examples.

In a federation all clients take part, not only a cohort. Each client computes the features of its examples with
the frozen backbone once, and sends the sums over them that `HeadFit` needs.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np
import torch
from lightning.pytorch import Trainer
from torch import Tensor, nn

from fl_lightning.callbacks.calibration.scores import example_owners, of_each, scoring
from fl_lightning.core.errors import ConfigurationError
from fl_lightning.federation import ExampleOwners, Ranks, Visit
from fl_lightning.reports.progress import progress_bar
from fl_lightning.sparsity.heads import (
    Features,
    FittedHead,
    HeadFit,
    check_labels,
    head_features,
)

HEAD = "head"  # name of the sums that remote clients send


def fit_head(trainer: Trainer, names: list[str], fit: HeadFit) -> FittedHead:
    """Fit the head (a linear layer) to the training data by regression, in place; every process calls this.

    Args:
        trainer: Trainer whose module is on its device.
        names: names of the modules that form the head, which must be one linear layer.
        fit: the regression that fits the head.

    Raises:
        ConfigurationError: if the head is not one linear layer, or a remote client sends no valid sums.
    """
    head = linear_head(trainer.lightning_module, names)
    owners = example_owners(trainer)
    remote = getattr(trainer.datamodule, "summed_by", None)  # type: ignore[attr-defined]
    clients = np.flatnonzero(owners.shards.num_examples)
    counts = owners.shards.num_examples[clients]
    features: list[Features] = []
    if remote is None:
        num_batches = owners.num_batches(counts) / trainer.world_size
        with (
            progress_bar(trainer, "Features for the head", num_batches) as tick,
            scoring(trainer) as visit,
        ):
            counted = replace(owners, tick=tick)

            def find(owner: int, _: int) -> None:
                features.append(owner_features(visit, counted, owner, head, fit))

            of_each(trainer, clients, counts, find)

    def reduce(sums: Tensor) -> None:
        def read(sent: Mapping[str, Tensor], num_examples: int) -> Tensor:
            own = sent.get(HEAD)
            if own is None or (own.shape, own.dtype) != form or not own.isfinite().all():
                raise ValueError(
                    f"its sums for the head are not {form[1]} numbers of shape {form[0]}"
                )
            return own

        if remote is not None:
            form = sums.shape, sums.dtype
            for received in remote(HEAD, dict.fromkeys(clients.tolist(), 0), read):
                sums += received
            return
        there = sums.to(trainer.strategy.root_device)
        Ranks(trainer).all_reduce(there)
        sums.copy_(there)

    fitted = fit.fit(
        features,
        head.in_features,
        head.out_features,
        has_bias=head.bias is not None,
        reduce=reduce,
    )
    fitted.write_to(head)
    return fitted


def owner_features(
    visit: Visit, owners: ExampleOwners, owner: int, head: nn.Linear, fit: HeadFit
) -> Features:
    """Return features (inputs of the head) and labels of the examples of an owner (a client), on the CPU."""
    parts = [
        (head_features(visit.module, head, batch, fit.logits), fit.labels(batch))
        for batch in owners.batches(visit, owners.shards[owner])
    ]
    features, labels = zip(*parts, strict=True)
    # on the CPU, because the fit needs double precision, which some accelerators lack
    found = torch.cat(features).float().cpu(), torch.cat(labels).cpu()
    check_labels(found[1], head.out_features)
    return found


def linear_head(module: nn.Module, names: list[str]) -> nn.Linear:
    """Return the linear layer that forms the head (the classifier).

    Raises:
        ConfigurationError: if the head is not one linear layer.
    """
    found = [module.get_submodule(name) for name in names]
    if len(found) != 1 or not isinstance(found[0], nn.Linear):
        kinds = [type(head).__name__ for head in found]
        raise ConfigurationError(
            f"only a head of one Linear layer can be fitted; {type(module).__name__} has "
            f"{dict(zip(names, kinds, strict=True))}: name one with head_name, or use head: train "
            "or head: freeze"
        )
    return found[0]
