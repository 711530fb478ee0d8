"""Spaces of cells: a small graph whose edges carry operations, repeated to make a network.

A row is an edge with a decision of its own: row r of α (num_rows, num_operations) says what each
operation on that edge is worth. Networks are made of edges that somebody else makes: one that mixes
all candidates while a search runs, one operation in the network that comes out of it.

Operations that more than one space has normalise after they convolve, and convolve without bias: ReLU,
convolution, batch norm.
Sources: Liu et al. 2019 (DARTS) and Dong & Yang 2020 (NAS-Bench-201), with their released code.
Differs: on images of odd side a factorized reduction pads by one; theirs cannot run there.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from fl_lightning.nas.spaces.space import Architecture, SearchSpace

# channels in, channels out, stride -> an operation
Candidate = Callable[[int, int, int], nn.Module]
# row, candidates in the order of the space's operations, channels in, channels out, stride
# -> the edge, called with what flows in and the weights; None: no such edge
MakeEdge = Callable[[int, Sequence[Candidate], int, int, int], nn.Module | None]


@dataclass(frozen=True)
class Row:
    """An edge with a decision of its own.

    Attributes:
        cell: the kind of cell that it is in, e.g. ``"normal"``.
        source: the number of the node that it leaves.
        target: the number of the node that it enters.
    """

    cell: str
    source: int
    target: int

    def __str__(self) -> str:
        return f"{self.source}→{self.target}"


class FixedEdge(nn.Module):
    """An edge with one operation; it ignores the weights."""

    def __init__(self, operation: nn.Module) -> None:
        super().__init__()
        self.operation = operation

    def forward(self, x: Tensor, weights: Any = None) -> Tensor:
        """Return what the operation makes of x."""
        return self.operation(x)  # type: ignore[no-any-return]


class CellSpace(SearchSpace):
    """A space whose decisions are operations on edges.

    A member writes `rows`, `operations_of`, `network` and `derive` besides what a space writes.
    ``operations[none]`` is the one that gives zeros: an edge that is left out.
    """

    operations: ClassVar[tuple[str, ...]]
    none: ClassVar[int]

    @property
    @abstractmethod
    def rows(self) -> tuple[Row, ...]:
        """The edges, in the order of α's rows; those that enter one node follow each other."""

    @property
    def num_rows(self) -> int:
        """How many edges have a decision of their own."""
        return len(self.rows)

    @property
    def incoming(self) -> tuple[tuple[int, ...], ...]:
        """For every node that edges enter, their rows."""
        rows = self.rows
        starts = [
            row
            for row, edge in enumerate(rows)
            if row == 0 or (edge.cell, edge.target) != (rows[row - 1].cell, rows[row - 1].target)
        ]
        return tuple(tuple(range(*ends)) for ends in pairwise([*starts, len(rows)]))

    @abstractmethod
    def operations_of(self, architecture: Architecture) -> tuple[int, ...]:
        """Return the number of the operation on every row; `none` on edges that are left out."""

    @abstractmethod
    def node_names(self, cell: str) -> tuple[str, ...]:
        """Return the names of a cell's nodes, in the order of their numbers, for pictures."""

    def concatenated(self, cell: str) -> tuple[tuple[int, int], ...]:
        """Return the edges (source, target) that no operation is on: by default none."""
        return ()

    @abstractmethod
    def network(
        self,
        make_edge: MakeEdge,
        *,
        num_classes: int,
        in_channels: int = 3,
        channels: int = 16,
        cells: int = 5,
        affine: bool = True,
    ) -> nn.Module:
        """Return a network of these edges; its ``forward(x, weights=None)`` hands weights to each.

        Args:
            make_edge: makes an edge.
            num_classes: of the classifier.
            in_channels: of the images.
            channels: of the first cells.
            cells: how many; of what, the space says.
            affine: whether the candidates' batch normalisations scale and shift. Off while
                operations compete: a scale could undo α.
        """

    @abstractmethod
    def derive(self, alpha: Tensor, beta: Tensor | None = None) -> Architecture:
        """Return the architecture that architecture parameters mean, by the published rule.

        Args:
            alpha: logits of the operations, (num_rows, num_operations).
            beta: logits of the edges that enter a node, (num_rows,), as PC-DARTS has them.

        Raises:
            ValueError: if a shape is wrong, or a number not finite.
        """

    def build(self, architecture: Architecture, *, num_classes: int, **options: Any) -> nn.Module:
        """Return the network of an architecture.

        Args:
            architecture: of this space.
            num_classes: of the classifier.
            options: as of `network`.
        """
        chosen = self.operations_of(architecture)

        def make_edge(
            row: int,
            candidates: Sequence[Candidate],
            channels_in: int,
            channels_out: int,
            stride: int,
        ) -> nn.Module | None:
            if chosen[row] == self.none:
                return None
            return FixedEdge(candidates[chosen[row]](channels_in, channels_out, stride))

        return self.network(make_edge, num_classes=num_classes, **options)

    def edge_shares(self, beta: Tensor) -> Tensor:
        """Return the softmax of edges' logits over the edges that enter one node, (num_rows,)."""
        return torch.cat([beta[list(rows)].softmax(0) for rows in self.incoming])

    def check_alpha(self, alpha: Tensor, beta: Tensor | None = None) -> None:
        """Refuse architecture parameters that are not this space's.

        Raises:
            ValueError: if a shape is wrong, or a number not finite.
        """
        rows = {"alpha": (alpha, (self.num_rows, len(self.operations)))}
        if beta is not None:
            rows["beta"] = (beta, (self.num_rows,))  # type: ignore[assignment]
        for name, (tensor, shape) in rows.items():
            if tuple(tensor.shape) != shape:
                raise ValueError(
                    f"{name} of {self.name} is of shape {shape}, got {tuple(tensor.shape)}"
                )
            if not tensor.isfinite().all():
                raise ValueError(f"{name} holds a number that is not finite: it means no cell")


class Zero(nn.Module):
    """Zeros, in the shape that an operation of this stride would give (``none``)."""

    def __init__(self, stride: int) -> None:
        super().__init__()
        self.stride = stride

    def forward(self, x: Tensor) -> Tensor:
        """Return them."""
        return torch.zeros_like(x[:, :, :: self.stride, :: self.stride])


class ReLUConvBN(nn.Sequential):
    """ReLU, a convolution that keeps the side (at stride 1), batch norm."""

    def __init__(
        self, channels_in: int, channels_out: int, kernel: int, stride: int, affine: bool = True
    ) -> None:
        super().__init__(
            nn.ReLU(),
            nn.Conv2d(channels_in, channels_out, kernel, stride, kernel // 2, bias=False),
            nn.BatchNorm2d(channels_out, affine=affine),
        )


class FactorizedReduce(nn.Module):
    """ReLU, then half of the channels from even pixels, half from odd ones: nothing is lost.

    Args:
        channels_in: of the input.
        channels_out: of the output, even.
        affine: whether the batch norm scales and shifts.
    """

    def __init__(self, channels_in: int, channels_out: int, affine: bool = True) -> None:
        super().__init__()
        self.relu = nn.ReLU()
        half = channels_out // 2
        self.even = nn.Conv2d(channels_in, half, 1, 2, bias=False)
        self.odd = nn.Conv2d(channels_in, channels_out - half, 1, 2, bias=False)
        self.norm = nn.BatchNorm2d(channels_out, affine=affine)

    def forward(self, x: Tensor) -> Tensor:
        """Return (batch, channels_out, ⌈side / 2⌉, ⌈side / 2⌉)."""
        x = self.relu(x)
        shifted = pad(x, (0, x.shape[3] % 2, 0, x.shape[2] % 2))[:, :, 1:, 1:]
        return self.norm(torch.cat([self.even(x), self.odd(shifted)], 1))  # type: ignore[no-any-return]


def average_pool(stride: int) -> nn.Module:
    """Return a 3×3 average that does not count the padding."""
    return nn.AvgPool2d(3, stride, padding=1, count_include_pad=False)


def depthwise(channels: int, kernel: int, stride: int, dilation: int = 1) -> nn.Conv2d:
    """Return a convolution of each channel by itself that keeps the side (at stride 1)."""
    padding = dilation * (kernel // 2)
    return nn.Conv2d(
        channels, channels, kernel, stride, padding, dilation, groups=channels, bias=False
    )


def separable(
    channels_in: int, channels_out: int, kernel: int, stride: int, affine: bool
) -> nn.Module:
    """Return a separable convolution, twice: the published one."""
    return nn.Sequential(
        nn.ReLU(),
        depthwise(channels_in, kernel, stride),
        nn.Conv2d(channels_in, channels_in, 1, bias=False),
        nn.BatchNorm2d(channels_in, affine=affine),
        nn.ReLU(),
        depthwise(channels_in, kernel, 1),
        nn.Conv2d(channels_in, channels_out, 1, bias=False),
        nn.BatchNorm2d(channels_out, affine=affine),
    )


def dilated(
    channels_in: int, channels_out: int, kernel: int, stride: int, affine: bool
) -> nn.Module:
    """Return a separable convolution over every second pixel."""
    return nn.Sequential(
        nn.ReLU(),
        depthwise(channels_in, kernel, stride, dilation=2),
        nn.Conv2d(channels_in, channels_out, 1, bias=False),
        nn.BatchNorm2d(channels_out, affine=affine),
    )
