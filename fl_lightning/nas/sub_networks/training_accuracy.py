"""The accuracy of sub-networks on training examples, between rounds.

    accuracy(a) = Σ_owners right answers of a / Σ_owners examples,   batch norm statistics recalibrated

In a federation every client counts its own examples; only counts travel, and the sums of statistics.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import torch
from lightning.pytorch import Trainer
from torch import Tensor, nn

from fl_lightning.federation.processes.ranks import Ranks
from fl_lightning.federation.processes.shares import shares
from fl_lightning.federation.visits.visiting import visiting
from fl_lightning.nas.elastic.calibration import Sums, apply_sums
from fl_lightning.nas.spaces.space import Architecture
from fl_lightning.nas.sub_networks.recalibration import has_statistics, recalibrated
from fl_lightning.nas.sub_networks.training_examples import TrainingExamples

_AT_ONCE = 16  # sub-networks, whose statistics are in memory together
_BYTES = 8  # of a count


class Accuracies(NamedTuple):
    """What clients have counted.

    Attributes:
        values: of each sub-network, in [0, 1].
        num_bytes: that clients sent together.
    """

    values: list[float]
    num_bytes: int


def training_accuracies(
    trainer: Trainer,
    network: nn.Module,
    architectures: Sequence[Architecture],
    *,
    max_examples: int | None,
    seed: int,
) -> Accuracies | None:
    """Return accuracies of sub-networks; to be called by all processes. The network is left as it was.

    Args:
        trainer: whose training data are read.
        network: of all sizes.
        architectures: of the sub-networks.
        max_examples: of all clients together, each in proportion to its own; None for all.
        seed: of which examples, and of their order.

    Returns:
        None if no training data are at hand, or none of two examples.
    """
    examples = TrainingExamples.of(trainer, max_examples=max_examples, seed=seed)
    if examples is None:
        return None
    right, total, num_bytes = torch.zeros(0, dtype=torch.int64), 0, 0
    for start in range(0, len(architectures), _AT_ONCE):
        some = architectures[start : start + _AT_ONCE]
        sums: list[Sums] = [{} for _ in some]
        if has_statistics(network):
            found = recalibrated(trainer, network, some, max_examples=max_examples, seed=seed)
            assert found is not None, "the examples are at hand"
            sums, num_bytes = found.sums, num_bytes + found.num_bytes
        counted, total = _counted(trainer, network, list(zip(some, sums, strict=True)), examples)
        right = torch.cat([right, counted])
    if total == 0:
        return None
    num_bytes += _BYTES * len(examples.indices) * (len(architectures) + 1)
    return Accuracies((right.double() / total).tolist(), num_bytes)


def _counted(
    trainer: Trainer,
    network: nn.Module,
    parts: Sequence[tuple[Architecture, Sums]],
    examples: TrainingExamples,
) -> tuple[Tensor, int]:
    """Return the right answers of each part, and of how many examples, over all owners."""
    ranks = Ranks(trainer)
    right, total = torch.zeros(len(parts), dtype=torch.int64), 0
    with visiting(trainer, "validation", mode="eval") as visit, torch.no_grad():
        for images, labels in map(visit.prepared, _own_batches(ranks, examples)):
            total += len(labels)
            for number, (architecture, sums) in enumerate(parts):
                apply_sums(network, sums)
                with trainer.precision_plugin.forward_context():
                    answers = network(images, architecture).argmax(1)
                right[number] += int((answers == labels).sum())
    told = ranks.gather((right, total))
    return torch.stack([own for own, _ in told]).sum(0), sum(number for _, number in told)


def _own_batches(ranks: Ranks, examples: TrainingExamples) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield the batches of the owners that this process reads for."""
    sizes = np.array([len(indices) for indices in examples.indices])
    for owner in shares(sizes, ranks.size)[ranks.rank].tolist():
        yield from examples.batches(owner)
