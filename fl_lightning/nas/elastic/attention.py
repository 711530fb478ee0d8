"""Self-attention of which the first heads run alone.

The rows of the one matrix that gives queries, keys and values are three blocks of heads: a part takes
the first heads of each block. A head has the same size in every sub-network, so that its scale is the
same. Source: Chen et al. 2021, ICCV (AutoFormer), section 3.3.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from fl_lightning.nas.elastic.width import ElasticLinear


class ElasticQKV(nn.Linear):
    """Queries, keys and values of the first heads, one after the other.

    Args:
        features: that come in, at most.
        heads: at most.
        head_features: of a head.
    """

    def __init__(self, features: int, heads: int, head_features: int) -> None:
        super().__init__(features, 3 * heads * head_features)
        self.heads, self.head_features = heads, head_features

    def forward(self, x: Tensor, heads: int | None = None) -> Tensor:
        """Return (batch, tokens, 3 · heads · head_features)."""
        features = x.shape[-1]
        if heads is None or heads == self.heads:
            return functional.linear(x, self.weight[:, :features], self.bias)
        rows = heads * self.head_features
        # three products: the blocks' rows are apart, and one matrix of them would be a copy
        blocks = zip(self.weight.chunk(3), self.bias.chunk(3), strict=True)
        return torch.cat(
            [functional.linear(x, w[:rows, :features], b[:rows]) for w, b in blocks], -1
        )

    def held_by(self, part: nn.Linear) -> dict[str, Tensor]:
        """Return which coordinates a plain layer of fewer heads holds, by parameter."""
        held = {
            name: torch.zeros(own.shape, dtype=torch.bool) for name, own in self.named_parameters()
        }
        rows = part.out_features // 3
        held["weight"].unflatten(0, (3, -1))[:, :rows, : part.in_features] = True
        held["bias"].unflatten(0, (3, -1))[:, :rows] = True
        return held

    def copy_to(self, part: nn.Linear) -> None:
        """Write the numbers of a plain layer of fewer heads."""
        rows = part.out_features // 3
        with torch.no_grad():
            weight = self.weight.unflatten(0, (3, -1))[:, :rows, : part.in_features]
            part.weight.copy_(weight.flatten(0, 1))
            part.bias.copy_(self.bias.unflatten(0, (3, -1))[:, :rows].flatten())


class Attention(nn.Module):
    """Softmax attention, as timm's, with heads of a fixed size.

    Args:
        features: that come in and go out, at most.
        heads: at most.
        head_features: of a head.
        elastic: whether parts of it can run.
    """

    def __init__(self, features: int, heads: int, head_features: int, *, elastic: bool) -> None:
        super().__init__()
        inner = heads * head_features
        self.head_features = head_features
        self.qkv = (
            ElasticQKV(features, heads, head_features)
            if elastic
            else nn.Linear(features, 3 * inner)
        )
        self.proj = (ElasticLinear if elastic else nn.Linear)(inner, features)

    def forward(self, x: Tensor, heads: int | None = None) -> Tensor:
        """Return the shape of x, (batch, tokens, features); of the first heads, or all."""
        qkv = self.qkv(x) if heads is None else self.qkv(x, heads)
        query, key, value = qkv.unflatten(-1, (3, -1, self.head_features)).permute(2, 0, 3, 1, 4)
        mixed = (
            functional.scaled_dot_product_attention(query, key, value).transpose(1, 2).flatten(2)
        )
        if heads is None:
            return self.proj(mixed)  # type: ignore[no-any-return]
        return self.proj(mixed, x.shape[-1])  # type: ignore[no-any-return]
