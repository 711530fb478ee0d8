"""The processes of a run, and how they tell each other what they know.

Between two meetings, one per round, every process trains its clients without a word. Whatever goes
wrong with a client is kept until then: a process that ended early would leave the others waiting.
"""

from __future__ import annotations

from typing import Any

import torch.distributed
from lightning.pytorch import Trainer
from torch import Tensor


class Ranks:
    """The processes of a Trainer; alone, it is its own whole world.

    Args:
        trainer: with its strategy's environment set up.

    Attributes:
        rank: of this process.
        size: how many there are.
    """

    def __init__(self, trainer: Trainer) -> None:
        self.rank, self.size = trainer.global_rank, trainer.world_size

    def gather(self, value: Any) -> list[Any]:
        """Return every process's value, in order of rank; to be called by all of them."""
        if self.size == 1:
            return [value]
        values: list[Any] = [None] * self.size
        torch.distributed.all_gather_object(values, value)
        return values

    def broadcast(self, tensor: Tensor, source: int) -> None:
        """Replace a tensor by that of one process; to be called by all of them."""
        if self.size > 1:
            torch.distributed.broadcast(tensor, src=source)

    def all_reduce(self, tensor: Tensor) -> None:
        """Replace a tensor by its sum over all processes; to be called by all of them."""
        if self.size > 1:
            torch.distributed.all_reduce(tensor)
