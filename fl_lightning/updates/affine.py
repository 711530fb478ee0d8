"""Rounding to evenly spaced levels between the smallest and the largest number of a block.

    c_i = round((x_i - o_b) / s_b),   o_b = min x,   s_b = (max x - min x) / (2^bits - 1)

The error is at most half a step. A block whose numbers are equal has s_b = 0 and comes out exactly.
Source: Jacob et al. 2018 (1712.05877), section 2.1, with the minimum itself in place of an integer
zero point, so that blocks far from zero lose nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from fl_lightning.core.errors import ConfigurationError
from fl_lightning.updates.blocks import (
    BlockOption,
    InBlocks,
    block_name,
    checked_block,
    known_block,
    over_blocks,
)
from fl_lightning.updates.payload import Payload, Quantised, per_member
from fl_lightning.updates.transform import with_values


@final
@dataclass(frozen=True)
class Affine(InBlocks):
    """Rounds to the nearest of 2^bits levels. Biased: use it with `ErrorFeedback`.

    Args:
        bits: of a number, from 1 to 8.
        block: neighbours that share their levels, ``tensor`` for those of each tensor, None for all.

    Raises:
        ConfigurationError: if an option is outside its range.

    Example:
        >>> from fl_lightning.updates.payload import Dense
        >>> Affine(bits=2).on_client(Dense(torch.tensor([0.0, 1.4, 3.0])), seed=0).to_dense()
        tensor([0., 1., 3.])
    """

    bits: int = 8
    block: BlockOption = None

    def __post_init__(self) -> None:
        if not 1 <= self.bits <= 8:
            raise ConfigurationError(f"bits must be from 1 to 8, got {self.bits}")
        checked_block(self.block)

    @property
    def name(self) -> str:
        """What it is."""
        return f"affine {self.bits} bits{block_name(self.block)}"

    def on_client(self, payload: Payload, seed: int) -> Payload:
        """Round."""
        return with_values(payload, self._quantised, self.name)

    def _quantised(self, values: Tensor) -> Quantised:
        # the last block is filled with a member of its own
        block = known_block(self.block, values.numel())
        low, high = over_blocks(values, block, _range, pad=values[-1:].sum()).unbind(1)
        levels = 2**self.bits - 1
        steps = (high / 2 - low / 2) * (2 / levels)  # halves, whose difference is in range
        safe = torch.where(steps > 0, steps, 1.0)
        offsets = per_member(low, values.numel(), block)
        codes = ((values - offsets) / per_member(safe, values.numel(), block)).round_()
        return Quantised(codes.clamp_(0, levels).to(torch.uint8), self.bits, steps, low, block)


def _range(rows: Tensor) -> Tensor:
    """Return the least and the largest number of each row, shape (rows, 2)."""
    return torch.stack(rows.aminmax(dim=1), 1)
