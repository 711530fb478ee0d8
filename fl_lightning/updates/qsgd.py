"""Stochastic uniform quantisation to a few bits, unbiased.

    T(x)_i = (N_b / s) ξ_i        ξ_i = ⌊y⌋ + 1 with probability y - ⌊y⌋, else ⌊y⌋;  y = s x_i / N_b

N_b is the norm of the block that holds x_i, s = 2^(bits-1) - 1 the number of levels on each side of
zero. One bit has the two levels ±N_b. Source: Alistarh et al. 2017 (1610.02132), section 3.1 with
the L2 norm; its experiments use the largest magnitude in blocks, which is the default here. Levels
are of fixed width: the paper's Elias code gains for few large numbers, for which there is top-k.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, final

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
from fl_lightning.updates.payload import Block, Payload, Quantised, per_member
from fl_lightning.updates.transform import with_values


@final
@dataclass(frozen=True)
class QSGD(InBlocks):
    """Rounds at random to one of 2^bits - 1 levels (of 2, for one bit).

    Args:
        bits: of a number, from 1 to 8.
        norm: which norm of a block its outermost level is: its largest magnitude or its length.
        block: neighbours that share a norm, ``tensor`` for those of each tensor, None for all.

    Raises:
        ConfigurationError: if an option is outside its range.

    Example:
        >>> from fl_lightning.updates.payload import Dense
        >>> payload = QSGD(bits=2).on_client(Dense(torch.tensor([2.0, -2.0, 0.0])), seed=0)
        >>> payload.to_dense()
        tensor([ 2., -2.,  0.])
    """

    bits: int = 8
    norm: Literal["max", "l2"] = "max"
    block: BlockOption = None

    def __post_init__(self) -> None:
        if not 1 <= self.bits <= 8:
            raise ConfigurationError(f"bits must be from 1 to 8, got {self.bits}")
        if self.norm not in ("max", "l2"):
            raise ConfigurationError(f"norm must be 'max' or 'l2', got {self.norm!r}")
        checked_block(self.block)

    @property
    def name(self) -> str:
        """What it is."""
        return f"qsgd {self.bits} bits, {self.norm}{block_name(self.block)}"

    def on_client(self, payload: Payload, seed: int) -> Payload:
        """Round."""
        return with_values(payload, lambda values: self._quantised(values, seed), self.name)

    def _quantised(self, values: Tensor, seed: int) -> Quantised:
        order = 2 if self.norm == "l2" else torch.inf
        block = known_block(self.block, values.numel())
        norms = over_blocks(
            values, block, lambda rows: torch.linalg.vector_norm(rows, order, dim=1)
        )
        draws = torch.rand(values.numel(), generator=torch.Generator().manual_seed(seed))
        draws = draws.to(values.device)
        if self.bits == 1:
            codes = _rounded(values, 2 * norms, draws, block, shift=0.5).clamp_(0, 1)
            return Quantised(codes.to(torch.uint8), 1, 2 * norms, -norms, block)
        levels = 2 ** (self.bits - 1) - 1
        steps = norms / torch.full_like(norms, levels)  # GPUs take 1 / levels of a Python number
        codes = _rounded(values, steps, draws, block).clamp_(-levels, levels)
        return Quantised(codes.to(torch.int8), self.bits, steps, None, block)


def _rounded(
    values: Tensor, steps: Tensor, draws: Tensor, block: Block, shift: float = 0.0
) -> Tensor:
    """Return values / steps + shift, rounded at random; where a step is 0 so are the values."""
    exact = values / per_member(torch.where(steps > 0, steps, 1.0), values.numel(), block) + shift
    low = exact.floor()
    return low.add_(draws < exact - low)
