"""PC-DARTS: a part of the channels goes through the mixed edge, the rest passes by.

    y = β' · shuffle([Σ_o softmax(α)_o o(x_first), x_rest]),   β' = softmax(β) over a node's edges

The rest is pooled where the operations halve the side. The shuffle lets the next edge see other
channels. β' steadies which edges win, since α of an edge moves with the channels that it saw.
Source: Xu et al. 2020, PC-DARTS, sections 3.2 and 3.3, and its code. α waits 15 of the 50 epochs.
Differs: the pool of the rest rounds odd sides up, as strided convolutions do.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import final

import torch
from torch import Tensor, nn
from torch.nn import functional

from fl_lightning.core.errors import ConfigurationError
from fl_lightning.nas.relax.relaxation import EdgeWeights, MixedEdge, Relaxation, SearchStep
from fl_lightning.nas.spaces.cells import Candidate


def shuffle_channels(x: Tensor, num_groups: int) -> Tensor:
    """Return the channels, the first of every group first, then the second of every group.

    Example:
        >>> shuffle_channels(torch.arange(8.0).reshape(1, 8), 4)
        tensor([[0., 2., 4., 6., 1., 3., 5., 7.]])
    """
    batch, channels, *sides = x.shape
    grouped = x.reshape(batch, num_groups, channels // num_groups, *sides)
    return grouped.transpose(1, 2).reshape(x.shape)


class PartialEdge(nn.Module):
    """An edge that mixes operations on its first 1/K of the channels.

    Args:
        mixed: of these channels.
        part: K.
        stride: of the edge.
    """

    def __init__(self, mixed: MixedEdge, part: int, stride: int) -> None:
        super().__init__()
        self.mixed, self._part, self._stride = mixed, part, stride

    def forward(self, x: Tensor, weights: EdgeWeights | None = None) -> Tensor:
        """Return the shuffled channels, times the edge's share of its node."""
        active = x.shape[1] // self._part
        y = self.mixed(x[:, :active], weights)
        if self._part > 1:
            rest = x[:, active:]
            if self._stride > 1:
                rest = functional.max_pool2d(rest, self._stride, ceil_mode=True)
            y = shuffle_channels(torch.cat([y, rest], 1), self._part)
        if weights is None or weights.edges is None:
            return y  # type: ignore[no-any-return]
        return weights.edges[self.mixed.row] * y  # type: ignore[no-any-return]


@final
class PartialChannels(Relaxation):
    """PC-DARTS.

    Args:
        part: K >= 1: one in K channels is searched on; the paper takes 4, for ImageNet 2.
        edge_weights: whether edges have the logits β; off, with ``part=1``, this is DARTS.
        alpha_from: progress in [0, 1] from which α and β move.

    Raises:
        ConfigurationError: if a setting is out of its range.
    """

    draws = False

    def __init__(
        self, part: int = 4, edge_weights: bool = True, alpha_from: float = 15 / 50
    ) -> None:
        if part < 1:
            raise ConfigurationError(f"part must be at least 1, got {part}: 1 in `part` channels")
        if not 0 <= alpha_from <= 1:
            raise ConfigurationError(f"alpha_from must be in [0, 1], got {alpha_from}")
        self._part, self.has_beta, self.alpha_from = part, edge_weights, alpha_from

    def weights(
        self, alpha: Tensor, step: SearchStep, *, edge_shares: Tensor | None = None
    ) -> EdgeWeights:
        """Return the softmax of every row and the shares of the edges.

        Raises:
            ValueError: if the rule has β and got no shares.
        """
        if not self.has_beta:
            return EdgeWeights(alpha.softmax(1))
        if edge_shares is None:
            raise ValueError("partial channels with edge_weights need edge_shares, (num_rows,)")
        return EdgeWeights(alpha.softmax(1), edges=edge_shares)

    def edge(
        self,
        row: int,
        candidates: Sequence[Candidate],
        channels_in: int,
        channels_out: int,
        stride: int,
    ) -> nn.Module:
        """Return an edge whose operations have 1/K of the channels.

        Raises:
            ConfigurationError: if the channels cannot be parted, or change on this edge.
        """
        if channels_in != channels_out and self._part > 1:
            raise ConfigurationError(
                f"partial channels pass a part of the channels by, but this edge makes "
                f"{channels_out} of {channels_in}: take another space or rule, or part: 1"
            )
        if channels_in % self._part:
            raise ConfigurationError(
                f"partial channels take one in {self._part} channels, but an edge has {channels_in}: "
                f"choose channels that {self._part} divides, or another part"
            )
        sizes = (channels_in // self._part, channels_out // self._part, stride)
        mixed = MixedEdge(row, [make(*sizes) for make in candidates])
        return PartialEdge(mixed, self._part, stride)
