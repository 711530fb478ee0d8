"""Accuracy of sub-networks in shared weights, without training them further.

    accuracy(a) = Σ_owners correct answers of a / Σ_owners examples,   batch norm statistics recalibrated

`training_accuracies` counts on training examples during a run: every client counts on its own examples, and
only counts and the sums of statistics are sent. `SubNetworkScore` is the accuracy on validation examples of
a trained supernet, as the objective of a search.
Sources: Cai et al. 2020 (Once-for-All), section 3.3; Yu et al. 2020 (BigNAS), section 3.2.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, final

import numpy as np
import torch
from lightning.pytorch import Trainer
from torch import Tensor, nn

from fl_lightning.federation import Ranks, shares, visiting
from fl_lightning.nas.spaces.space import Architecture
from fl_lightning.nas.sub_networks.recalibration import (
    Sums,
    TrainingExamples,
    collect_sums,
    has_norms,
    normalised_by,
    recalibrated,
)

_AT_ONCE = 16  # number of sub-networks whose statistics are in memory together


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
    right, total = torch.zeros(0, dtype=torch.int64), 0
    for start in range(0, len(architectures), _AT_ONCE):
        some = architectures[start : start + _AT_ONCE]
        sums: list[Sums] = [{} for _ in some]
        if has_norms(network):
            found = recalibrated(trainer, network, some, max_examples=max_examples, seed=seed)
            assert found is not None, "there are training examples"
            sums = found.sums
        counted, total = _counted(trainer, network, list(zip(some, sums, strict=True)), examples)
        right = torch.cat([right, counted])
    if total == 0:
        return None
    accuracies: list[float] = (right.double() / total).tolist()
    return accuracies


def _counted(
    trainer: Trainer,
    network: nn.Module,
    parts: Sequence[tuple[Any, Sums]],
    examples: TrainingExamples,
) -> tuple[Tensor, int]:
    """Return the number of correct answers of each part, and of examples, over all owners."""
    ranks = Ranks(trainer)
    right, total = torch.zeros(len(parts), dtype=torch.int64), 0
    with visiting(trainer, "validation", mode="eval") as visit, torch.no_grad():
        for images, labels in map(visit.prepared, _own_batches(ranks, examples)):
            total += len(labels)
            for number, (architecture, sums) in enumerate(parts):
                with trainer.precision_plugin.forward_context(), normalised_by(network, sums):
                    answers = network(images, architecture).argmax(1)
                right[number] += int((answers == labels).sum())
    told = ranks.gather((right, total))
    return torch.stack([own for own, _ in told]).sum(0), sum(number for _, number in told)


def _own_batches(ranks: Ranks, examples: TrainingExamples) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield the batches of the owners that belong to this process."""
    sizes = np.array([len(indices) for indices in examples.indices])
    for owner in shares(sizes, ranks.size)[ranks.rank].tolist():
        yield from examples.batches(owner)


Batches = Iterable[tuple[Tensor, Tensor]]


@final
@dataclass(frozen=True, eq=False)
class SubNetworkScore:
    """Validation accuracy of a sub-network as the objective of a search; deterministic.

    Attributes:
        network: trained network whose ``forward(images, architecture)`` runs a sub-network.
        training: batches of at least two examples for the batch norm statistics, iterated once per score;
            not read without batch norm.
        validation: batches of validation examples, iterated once per score.
        context: makes the context of every forward pass, e.g. mixed precision.
    """

    network: nn.Module
    training: Batches
    validation: Batches
    context: Callable[[], AbstractContextManager[Any]] = nullcontext

    def __call__(self, architecture: Architecture) -> float:
        """Return the accuracy of an architecture, in [0, 1]."""
        was_training = self.network.training
        self.network.eval()
        sums: Sums = {}
        if has_norms(self.network):
            sums = collect_sums(
                self.network, lambda batch: self._logits(batch[0], architecture), self.training
            )
        right = total = 0
        with torch.no_grad(), normalised_by(self.network, sums):
            for images, labels in self.validation:
                right += int((self._logits(images, architecture).argmax(1) == labels).sum())
                total += len(labels)
        self.network.train(was_training)
        return right / total

    def _logits(self, images: Tensor, architecture: Architecture) -> Tensor:
        with self.context():
            logits: Tensor = self.network(images, architecture)
        return logits
