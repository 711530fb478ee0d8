"""The processes of a run: their communication, and their shares of clients.

Processes exchange results once per round. A client's failure is reported only then, because a process that
ends early would leave the others waiting. They communicate through Lightning's process group: gloo on CPUs,
NCCL on GPUs.
"""

from __future__ import annotations

import heapq
from typing import Any

import numpy as np
import torch
from lightning.pytorch import Trainer
from torch import Tensor, distributed

from fl_lightning.core.seeds import Integers


class Ranks:
    """This process's rank among a Trainer's processes, and its communication with the others.

    Attributes:
        rank: rank of this process, in [0, size).
        size: number of processes.
    """

    def __init__(self, trainer: Trainer) -> None:
        self.rank, self.size = trainer.global_rank, trainer.world_size

    def gather(self, value: Any) -> list[Any]:
        """Return the values of all processes, in order of rank; every process must call this."""
        values = [value] * self.size
        if self.size > 1:
            distributed.all_gather_object(values, value)
        return values

    def broadcast(self, tensor: Tensor, source: int) -> None:
        """Overwrite a contiguous tensor in all processes by that of process ``source``; every process must call this."""
        if self.size > 1:  # as bytes: gloo does not know all types of numbers
            distributed.broadcast(tensor.detach().view(-1).view(torch.uint8), src=source)

    def all_reduce(self, tensor: Tensor) -> None:
        """Overwrite a contiguous tensor by its sum over all processes; every process must call this."""
        if self.size > 1:
            distributed.all_reduce(tensor.detach())


def shares(work: Integers, num_shares: int) -> list[Integers]:
    """Divide clients among processes, as evenly as their work allows.

    Longest processing time first: clients in decreasing order of work, each to the process with the least
    work so far. The busiest process has at most 4/3 of its work in the best division (Graham 1969, Bounds
    on multiprocessing timing anomalies, Theorem 2).

    Args:
        work: amount of work of each client, e.g. local batches, shape (number of clients,).
        num_shares: number of processes.

    Returns:
        For every process, the increasing positions of its clients in ``work``.

    Example:
        >>> [share.tolist() for share in shares(np.array([5, 1, 4, 1, 3]), 2)]
        [[0, 1, 3], [2, 4]]
    """
    loads = [(0, share) for share in range(num_shares)]
    parts: list[list[int]] = [[] for _ in range(num_shares)]
    for client in np.argsort(-work, kind="stable").tolist():
        load, share = heapq.heappop(loads)
        parts[share].append(client)
        heapq.heappush(loads, (load + int(work[client]), share))
    return [np.sort(np.array(part, np.int64)) for part in parts]
