"""Accuracy of sub-networks in shared weights, without training them further.

    accuracy(a) = Σ_owners correct answers of a / Σ_owners examples,   batch norm statistics recalibrated

`training_accuracies` counts on training examples during a run: every client counts on its own examples, and
only counts and the sums of statistics are sent. `SubNetworkScore` is the accuracy on validation examples of
a trained supernet, as the objective of a search.
Sources: Cai et al. 2020 (Once-for-All), section 3.3; Yu et al. 2020 (BigNAS), section 3.2.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, final

import torch
from lightning.pytorch import Trainer
from torch import Tensor, nn

from fl_lightning.core.modules import modes_kept
from fl_lightning.federation import Ranks, visiting
from fl_lightning.nas.spaces.space import Architecture
from fl_lightning.nas.sub_networks.recalibration import (
    Sums,
    TrainingExamples,
    batch_norms,
    collect_sums,
    normalised_by,
    recalibrated,
)


def training_accuracies(
    trainer: Trainer,
    network: nn.Module,
    architectures: Sequence[Any],
    *,
    max_examples: int | None,
    seed: int,
) -> list[float] | None:
    """Measure the accuracy of sub-networks on training examples; all processes call this.

    The network does not change.

    Args:
        trainer: trainer with the training data.
        network: network that contains the sub-networks.
        architectures: sub-networks, as second arguments of the network.
        max_examples: number of examples over all clients, in proportion to their data; None for all.
        seed: seed of the choice and order of the examples.

    Returns:
        Accuracies in [0, 1], or None without training data, or if no owner has two examples.
    """
    examples = TrainingExamples.of(trainer, max_examples=max_examples, seed=seed)
    if examples is None:
        return None
    sums: list[Sums] = [{} for _ in architectures]
    if any(batch_norms(network)):
        found = recalibrated(trainer, network, architectures, max_examples=max_examples, seed=seed)
        assert found is not None, "there are training examples"
        sums = found.sums
    ranks, parts = Ranks(trainer), list(zip(architectures, sums, strict=True))
    right, total = torch.zeros(len(parts), dtype=torch.int64), 0
    with visiting(trainer, "validation", mode="eval") as visit, torch.no_grad():
        batches = (batch for owner in examples.owners(ranks) for batch in examples.batches(owner))
        for images, labels in map(visit.prepared, batches):
            total += len(labels)
            for number, (architecture, own) in enumerate(parts):
                with trainer.precision_plugin.forward_context(), normalised_by(network, own):
                    answers = network(images, architecture).argmax(1)
                right[number] += int((answers == labels).sum())
    told = ranks.gather((right, total))
    total = sum(number for _, number in told)
    counted = torch.stack([own for own, _ in told]).sum(0).double()
    return (counted / total).tolist() if total else None  # type: ignore[no-any-return]


# returns batches of images and labels
Batches = Callable[[], Iterable[tuple[Tensor, Tensor]]]


@final
@dataclass(frozen=True, eq=False)
class SubNetworkScore:
    """Validation accuracy of a sub-network as the objective of a search; deterministic.

    Attributes:
        network: trained network whose ``forward(images, architecture)`` runs a sub-network.
        training: function for batches of at least two examples for the batch norm statistics; called once
            per score, not without batch norm.
        validation: function for the batches of validation examples; called once per score.
        context: makes the context of every forward pass, e.g. mixed precision.
    """

    network: nn.Module
    training: Batches
    validation: Batches
    context: Callable[[], AbstractContextManager[Any]] = nullcontext

    def __call__(self, architecture: Architecture) -> float:
        """Return the accuracy of an architecture, in [0, 1]."""
        right = total = 0
        with modes_kept(self.network), torch.no_grad():
            self.network.eval()
            run = partial(self._logits, architecture)
            has_norms = any(batch_norms(self.network))
            sums = collect_sums(self.network, run, self.training()) if has_norms else {}
            with normalised_by(self.network, sums):
                for batch in self.validation():
                    right += int((run(batch).argmax(1) == batch[1]).sum())
                    total += len(batch[1])
        return right / total

    def _logits(self, architecture: Architecture, batch: tuple[Tensor, Tensor]) -> Tensor:
        with self.context():
            logits: Tensor = self.network(batch[0], architecture)
        return logits
