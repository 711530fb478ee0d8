"""The accuracy of sub-networks of a trained supernet, without training: an objective of a search.

    score(a) = share of validation examples that the part a of the network gets right, with batch norm
               statistics recalibrated on training examples

Source: Cai et al. 2020 (Once-for-All), section 3.3; Yu et al. 2020 (BigNAS), section 3.2.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor, nn

from fl_lightning.nas.elastic.calibration import apply_sums, collect_sums
from fl_lightning.nas.spaces.space import Architecture

Batches = Iterable[tuple[Tensor, Tensor]]


@final
@dataclass(frozen=True, eq=False)
class SubNetworkScore:
    """The objective; an architecture always has the same score.

    Attributes:
        network: of all sizes, trained; its statistics become those of the last one that was scored.
        training: batches of at least two examples for the statistics; a list, or what can be gone
            through again.
        validation: batches of examples that nothing was trained on, and no test uses.
    """

    network: nn.Module
    training: Batches
    validation: Batches

    def __call__(self, architecture: Architecture) -> float:
        """Return the accuracy, in [0, 1]."""
        was_training = self.network.training
        self.network.eval()
        sums = collect_sums(
            self.network, lambda batch: self.network(batch[0], architecture), self.training
        )
        apply_sums(self.network, sums)
        right = total = 0
        with torch.no_grad():
            for images, labels in self.validation:
                right += int((self.network(images, architecture).argmax(1) == labels).sum())
                total += len(labels)
        self.network.train(was_training)
        return right / total
