"""Signs with a scale: one bit a number.

    T(x)_i = s_b sign(x_i)        s_b = mean |x| over the block b

Source: Karimireddy et al. 2019 (1901.09847), ‖x‖₁/d · sign(x), with error feedback; after top-k it
is sparse ternary compression, Sattler et al. 2019 (1903.02891), Algorithm 1. The sign of 0 is +1.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from fl_lightning.updates.blocks import (
    BlockOption,
    InBlocks,
    block_name,
    checked_block,
    known_block,
    over_blocks,
)
from fl_lightning.updates.payload import Payload, Quantised
from fl_lightning.updates.top_k import TopK
from fl_lightning.updates.transform import Chain, with_values


@final
@dataclass(frozen=True)
class Sign(InBlocks):
    """Sends signs. Biased: use it with `ErrorFeedback`.

    Args:
        block: neighbours that share a scale, ``tensor`` for those of each tensor, None for all.

    Raises:
        ConfigurationError: if ``block`` is below 1.

    Example:
        >>> from fl_lightning.updates.payload import Dense
        >>> Sign().on_client(Dense(torch.tensor([1.0, -4.0, 0.0, -3.0])), seed=0).to_dense()
        tensor([ 2., -2.,  2., -2.])
    """

    block: BlockOption = None

    def __post_init__(self) -> None:
        checked_block(self.block)

    @property
    def name(self) -> str:
        """What it is."""
        return f"sign{block_name(self.block)}"

    def on_client(self, payload: Payload, seed: int) -> Payload:
        """Take signs and means."""
        return with_values(payload, self._quantised, self.name)

    def _quantised(self, values: Tensor) -> Quantised:
        block = known_block(self.block, values.numel())
        members = over_blocks(torch.ones_like(values), block, _sums)
        scales = over_blocks(values.abs(), block, _sums) / members
        codes = (values >= 0).to(torch.uint8)
        return Quantised(codes, 1, 2 * scales, -scales, block)


def _sums(rows: Tensor) -> Tensor:
    return rows.sum(1)


def ternary(fraction: float) -> Chain:
    """Return sparse ternary compression: the largest numbers, each as ± their mean magnitude.

    Args:
        fraction: of numbers that are kept.

    Example:
        >>> from fl_lightning.updates.payload import Dense
        >>> values = Dense(torch.tensor([1.0, -4.0, 0.0, 2.0]))
        >>> ternary(0.5).on_client(values, seed=0).to_dense()
        tensor([ 0., -3.,  0.,  3.])
    """
    return Chain((TopK(fraction), Sign()))
