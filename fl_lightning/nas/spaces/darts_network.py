"""The network of DARTS: a stem, cells that read the two cells before them, a classifier.

Source: Liu et al. 2019, ICLR, sections 2.1 and 3.1, and the released code for CIFAR-10.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from fl_lightning.nas.spaces.cells import Candidate, MakeEdge, Row
from fl_lightning.nas.spaces.operations import (
    FactorizedReduce,
    ReLUConvBN,
    Zero,
    average_pool,
    dilated,
    separable,
)

STEM_MULTIPLIER = 3
NUM_NODES = 4


def candidates(affine: bool) -> tuple[Candidate, ...]:
    """Return what makes the operations, in their order."""

    def pool(make: Callable[[int], nn.Module]) -> Candidate:
        def candidate(channels_in: int, channels_out: int, stride: int) -> nn.Module:
            if affine:
                return make(stride)
            return nn.Sequential(make(stride), nn.BatchNorm2d(channels_out, affine=False))

        return candidate

    def skip(channels_in: int, channels_out: int, stride: int) -> nn.Module:
        return nn.Identity() if stride == 1 else FactorizedReduce(channels_in, channels_out, affine)

    return (
        lambda channels_in, channels_out, stride: Zero(stride),
        pool(lambda stride: nn.MaxPool2d(3, stride, padding=1)),
        pool(average_pool),
        skip,
        lambda c_in, c_out, stride: separable(c_in, c_out, 3, stride, affine),
        lambda c_in, c_out, stride: separable(c_in, c_out, 5, stride, affine),
        lambda c_in, c_out, stride: dilated(c_in, c_out, 3, stride, affine),
        lambda c_in, c_out, stride: dilated(c_in, c_out, 5, stride, affine),
    )


class DARTSCell(nn.Module):
    """Two inputs, brought to the cell's channels; four nodes; their concatenation.

    Args:
        make_edge: makes an edge.
        rows: the edges of this kind of cell, with their numbers.
        ops: the candidates.
        channels_before: of the two inputs.
        channels: of the nodes.
        reduction: whether the side is halved, by the edges from the inputs.
        halve_first: whether the first input is of twice the second's side.
        affine: whether batch norms scale and shift.
    """

    def __init__(
        self,
        make_edge: MakeEdge,
        rows: dict[int, Row],
        ops: Sequence[Candidate],
        *,
        channels_before: tuple[int, int],
        channels: int,
        reduction: bool,
        halve_first: bool,
        affine: bool,
    ) -> None:
        super().__init__()
        first, second = channels_before
        self.first: nn.Module
        if halve_first:
            self.first = FactorizedReduce(first, channels, affine)
        else:
            self.first = ReLUConvBN(first, channels, 1, 1, affine)
        self.second = ReLUConvBN(second, channels, 1, 1, affine)
        self.edges = nn.ModuleDict()
        for number, row in rows.items():
            stride = 2 if reduction and row.source < 2 else 1
            edge = make_edge(number, ops, channels, channels, stride)
            if edge is not None:
                self.edges[f"{row.source}_{row.target}"] = edge

    def forward(self, before_last: Tensor, last: Tensor, weights: Any = None) -> Tensor:
        """Return the concatenation of the four nodes."""
        nodes = [self.first(before_last), self.second(last)]
        for target in range(2, 2 + NUM_NODES):
            names = [(source, f"{source}_{target}") for source in range(target)]
            terms = [
                self.edges[name](nodes[source], weights)
                for source, name in names
                if name in self.edges
            ]
            nodes.append(sum(terms[1:], start=terms[0]))
        return torch.cat(nodes[2:], 1)


class DARTSNetwork(nn.Module):
    """A stem, ``cells`` cells, the third and two thirds of which reduce; a classifier."""

    def __init__(
        self,
        make_edge: MakeEdge,
        rows: Sequence[Row],
        ops: Sequence[Candidate],
        *,
        num_classes: int,
        in_channels: int,
        channels: int,
        cells: int,
        affine: bool,
    ) -> None:
        super().__init__()
        stem = STEM_MULTIPLIER * channels
        self.stem = nn.Sequential(
            nn.Conv2d(in_channels, stem, 3, padding=1, bias=False), nn.BatchNorm2d(stem)
        )
        self.cells = nn.ModuleList()
        before, halve_first = (stem, stem), False
        for number in range(cells):
            reduction = number in (cells // 3, 2 * cells // 3)
            channels *= 2 if reduction else 1
            kind = "reduction" if reduction else "normal"
            cell = DARTSCell(
                make_edge,
                {r: row for r, row in enumerate(rows) if row.cell == kind},
                ops,
                channels_before=before,
                channels=channels,
                reduction=reduction,
                halve_first=halve_first,
                affine=affine,
            )
            self.cells.append(cell)
            before, halve_first = (before[1], NUM_NODES * channels), reduction
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.classifier = nn.Linear(before[1], num_classes)

    def forward(self, x: Tensor, weights: Any = None) -> Tensor:
        """Return logits, (batch, num_classes)."""
        before_last = last = self.stem(x)
        for cell in self.cells:
            before_last, last = last, cell(before_last, last, weights)
        return self.classifier(self.pool(last).flatten(1))  # type: ignore[no-any-return]

    def get_classifier(self) -> nn.Module:
        """Return the last layer."""
        return self.classifier
