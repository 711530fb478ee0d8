"""Blocks of which the first few run alone.

Source: Cai et al. 2020, ICLR (Once-for-All), section 3.2, "elastic depth".
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn


class ElasticDepth(nn.ModuleList):
    """Blocks, one after the other."""

    def forward(self, x: Tensor, chosen: Sequence[tuple[Any, ...]] | None = None) -> Tensor:
        """Run the first ``len(chosen)`` blocks, each with its sizes; without any, all blocks whole."""
        sizes = [()] * len(self) if chosen is None else chosen
        for block, own in zip(self, sizes, strict=False):
            x = block(x, *own)
        return x
