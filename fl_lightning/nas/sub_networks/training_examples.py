"""The training examples that a run reads between rounds, owner by owner: never an evaluation's.

In a federation every client owns its own; a central run is one owner. Examples are read without
augmentation, in a fixed random order.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from lightning.pytorch import Trainer
from torch import Tensor

from fl_lightning.core.seeds import torch_generator
from fl_lightning.data.federated import FederatedDataModule
from fl_lightning.data.training_set import evaluation_reader, loader_option
from fl_lightning.federation.federation import Federation

_LEAST_BATCH = 128  # the statistics of smaller ones are coarse


@dataclass(frozen=True, eq=False)
class TrainingExamples:
    """Some of the examples of each owner.

    Attributes:
        indices: of all examples of each owner.
        read: makes a batch of indices.
        batch_size: of the run; batches here may be larger.
        part: of its examples that each owner reads, a fraction in (0, 1].
        seed: of which examples, and of their order.
    """

    indices: list[Tensor]
    read: Any
    batch_size: int
    part: float
    seed: int

    @classmethod
    def of(
        cls, trainer: Trainer, *, max_examples: int | None, seed: int
    ) -> TrainingExamples | None:
        """Return those of a trainer's run; None if no training data are at hand.

        Args:
            trainer: whose training data are read.
            max_examples: of all owners together, each in proportion to its own; None for all.
            seed: of which examples, and of their order.
        """
        found = _owners(trainer)
        if found is None:
            return None
        total = sum(map(len, found[0]))
        part = 1.0 if max_examples is None else min(1.0, max_examples / max(1, total))
        return cls(*found, part, seed)

    def batches(self, owner: int) -> Iterator[Any]:
        """Yield an owner's examples, none of them alone: a batch of one has no variance."""
        indices = self.indices[owner]
        order = torch.randperm(
            len(indices), generator=torch_generator(self.seed, "recalibration", owner)
        )
        chosen = indices[order[: max(2, math.ceil(self.part * len(indices)))]]
        if len(chosen) > 1:
            for some in chosen.tensor_split(
                max(1, len(chosen) // max(self.batch_size, _LEAST_BATCH))
            ):
                yield self.read(some)


def _owners(trainer: Trainer) -> tuple[list[Tensor], Any, int] | None:
    data = trainer.datamodule  # type: ignore[attr-defined]
    if isinstance(data, FederatedDataModule):
        federated = any(isinstance(c, Federation) for c in trainer.callbacks)  # type: ignore[attr-defined]
        clients = data.clients
        indices = [clients[i] for i in range(len(clients))]
        return (
            indices if federated else [torch.cat(indices)],
            data.evaluation_batch,
            data.batch_size,
        )
    loader = trainer.train_dataloader
    if loader is None and data is not None:
        loader = data.train_dataloader()
    if loader is None or not hasattr(loader, "dataset") or not hasattr(loader.dataset, "__len__"):
        return None
    everything = [torch.arange(len(loader.dataset))]
    return everything, evaluation_reader(loader), loader_option(loader, "batch_size") or 32
