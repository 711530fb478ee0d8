"""The accuracy of sub-networks of a trained supernet, without training: an objective of a search.

    score(a) = share of validation examples that the part a of the network gets right, with batch norm
               statistics recalibrated on training examples

Source: Cai et al. 2020 (Once-for-All), section 3.3; Yu et al. 2020 (BigNAS), section 3.2.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, final

import torch
from torch import Tensor, nn

from fl_lightning.nas.elastic.calibration import (
    Sums,
    apply_sums,
    collect_sums,
    has_norms,
    normalised_by,
)
from fl_lightning.nas.spaces.space import Architecture
from fl_lightning.nas.sub_networks.recalibration import has_statistics

Batches = Iterable[tuple[Tensor, Tensor]]


@final
@dataclass(frozen=True, eq=False)
class SubNetworkScore:
    """The objective; an architecture always has the same score.

    Attributes:
        network: of all sizes, trained, whose ``forward(images, architecture)`` runs a part; its statistics
            become those of the last one that was scored.
        training: batches of at least two examples for the statistics; a list, or what can be gone
            through again. Without batch norms none are read.
        validation: batches of examples that nothing was trained on, and no test uses.
        context: what surrounds every pass, e.g. mixed precision.
    """

    network: nn.Module
    training: Batches
    validation: Batches
    context: Callable[[], AbstractContextManager[Any]] = nullcontext

    def __call__(self, architecture: Architecture) -> float:
        """Return the accuracy, in [0, 1]."""
        was_training = self.network.training
        self.network.eval()
        sums: Sums = {}
        if has_norms(self.network):
            sums = collect_sums(
                self.network, lambda batch: self._logits(batch[0], architecture), self.training
            )
        right = total = 0
        with torch.no_grad(), self._normalised(sums):
            for images, labels in self.validation:
                right += int((self._logits(images, architecture).argmax(1) == labels).sum())
                total += len(labels)
        self.network.train(was_training)
        return right / total

    def _normalised(self, sums: Sums) -> AbstractContextManager[Any]:
        """Have the network use statistics; one that keeps none, for a while."""
        if not has_statistics(self.network):
            return normalised_by(self.network, sums)
        apply_sums(self.network, sums)
        return nullcontext()

    def _logits(self, images: Tensor, architecture: Architecture) -> Tensor:
        with self.context():
            logits: Tensor = self.network(images, architecture)
        return logits
