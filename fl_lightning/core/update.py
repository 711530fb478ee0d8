"""What a client sends: a delta, how many examples it stands for, and a few numbers about it."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor


@dataclass(frozen=True)
class ClientUpdate:
    """One client's contribution to a round.

    Attributes:
        client_id: whose it is.
        delta: ``start - end`` of local training, shape (k,): the pseudo-gradient, which the
            server optimizer descends.
        buffers: floating-point buffers after local training, shape (b,).
        num_examples: size of the client's shard, the aggregation weight, ≥ 1.
        num_steps: local steps taken.
        metrics: means over the client's local steps by name, each a scalar tensor.
    """

    client_id: int
    delta: Tensor
    buffers: Tensor
    num_examples: int
    num_steps: int
    metrics: dict[str, Tensor] = field(default_factory=dict)

    @cached_property
    def norm(self) -> Tensor:
        """The L2 norm of the delta; it is finite only if every coordinate is."""
        norm: Tensor = torch.linalg.vector_norm(self.delta)
        return norm
