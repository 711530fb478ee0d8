"""Space of DARTS: a normal and a reduction cell of four nodes, each with two inputs.

The inputs of a cell (nodes 0 and 1) are the outputs of the two cells before; the output is the concatenation
of nodes 2 to 5. In a search every node has an edge from each earlier node (14 edges per cell), and an edge may
be ``none``. In the result every node has two edges with one of seven operations each: 10¹⁸ pairs of cells. The
network is a stem, a sequence of cells, and a classifier. `parse` also reads the published form
``Genotype(normal=[('sep_conv_3x3', 1), …], normal_concat=…)``.
Source: Liu et al. 2019, ICLR, sections 2.1 to 2.4 and 3.1, and the released code for CIFAR-10: stem of 3C
channels, reductions at 1/3 and 2/3 of the cells, which double the channels.
Differs: no drop path and no auxiliary head. Images of odd size work.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from itertools import combinations, product
from typing import ClassVar, final

import torch
from torch import Tensor, nn

from fl_lightning.nas.spaces.cells import (
    Candidate,
    CellNetwork,
    CellSpace,
    FactorizedReduce,
    MakeEdge,
    ReLUConvBN,
    Row,
    Zero,
    average_pool,
    dilated,
    next_node,
    separable,
)
from fl_lightning.nas.spaces.space import Architecture, ArchitectureReader, Decision

NODES = (2, 3, 4, 5)
CELLS = ("normal", "reduction")
# per node: ((operation, source), (operation, source))
Inputs = tuple[tuple[tuple[str, int], tuple[str, int]], ...]


@final
@dataclass(frozen=True)
class DARTS(CellSpace):
    """Cell space of DARTS: an architecture is a normal cell and a reduction cell.

    Every node has three decisions: the pair of its inputs, and an operation on each of the two edges.

    Example:
        >>> import torch
        >>> space = DARTS()
        >>> f"{space.size:.2e}"
        '1.08e+18'
        >>> space.parse(str(space.derive(torch.zeros(28, 8)))).options[:3]
        ('0 and 1', 'max_pool_3x3', 'max_pool_3x3')
    """

    name: ClassVar[str] = "darts"
    operations: ClassVar[tuple[str, ...]] = (
        "none",
        "max_pool_3x3",
        "avg_pool_3x3",
        "skip_connect",
        "sep_conv_3x3",
        "sep_conv_5x5",
        "dil_conv_3x3",
        "dil_conv_5x5",
    )
    none: ClassVar[int] = 0

    @cached_property
    def rows(self) -> tuple[Row, ...]:
        """The 14 edges of the normal cell, then the 14 of the reduction cell."""
        return tuple(
            Row(cell, source, node) for cell in CELLS for node in NODES for source in range(node)
        )

    @cached_property
    def decisions(self) -> tuple[Decision, ...]:
        """Decisions of every node in both cells: pair of inputs, operation on the first, operation on the second."""
        decisions = []
        for cell, node in product(CELLS, NODES):
            pairs = tuple(f"{low} and {high}" for low, high in _pairs(node))
            decisions.append(Decision(f"{cell} inputs of {node}", pairs))
            decisions += [
                Decision(f"{cell} {which} operation of {node}", self.operations[1:])
                for which in ("first", "second")
            ]
        return tuple(decisions)

    def inputs(self, architecture: Architecture) -> dict[str, Inputs]:
        """Return each node's two incoming edges, ((operation, source), (operation, source)), by cell."""
        choices, cells = iter(architecture.choices), {}
        for cell in CELLS:
            nodes = []
            for node in NODES:
                first, second = _pairs(node)[next(choices)]
                named = [self.operations[1 + next(choices)] for _ in range(2)]
                nodes.append(((named[0], first), (named[1], second)))
            cells[cell] = tuple(nodes)
        return cells

    def operations_of(self, architecture: Architecture) -> tuple[int, ...]:
        """Return the operation index on each of the 28 edges; the index `none` on the 12 unused edges."""
        chosen = dict.fromkeys(self.rows, self.none)
        for cell, nodes in self.inputs(architecture).items():
            for node, pair in zip(NODES, nodes, strict=True):
                for operation, source in pair:
                    chosen[Row(cell, source, node)] = self.operations.index(operation)
        return tuple(chosen.values())

    def node_names(self, cell: str) -> tuple[str, ...]:
        """Return the names of a cell's nodes as in the DARTS paper, the output last."""
        return ("c_{k-2}", "c_{k-1}", "0", "1", "2", "3", "c_{k}")

    def concatenated(self, cell: str) -> tuple[tuple[int, int], ...]:
        """Return the edges from the four inner nodes to the output, which concatenates them."""
        return tuple((node, NODES[-1] + 1) for node in NODES)

    def text(self, choices: Sequence[int]) -> str:
        """Return an architecture's string ``normal:|op~source|op~source|+…;reduction:…``, two edges per node."""
        cells = self.inputs(self.architecture(choices))
        return ";".join(
            f"{cell}:"
            + "+".join(
                "|" + "".join(f"{name}~{source}|" for name, source in pair) for pair in nodes
            )
            for cell, nodes in cells.items()
        )

    def parse(self, text: str) -> Architecture:
        """Parse an architecture's string, in the form of `text` or of a published ``Genotype(normal=…)``."""
        text = _published("".join(text.split()))
        reader, cells = ArchitectureReader(text, self.name), {}
        for cell in CELLS:
            reader.expect(f"{cell}:" if cell == CELLS[0] else f";{cell}:")
            cells[cell] = tuple(self._read_node(reader, node) for node in NODES)
        reader.end()
        return self.of_inputs(cells)

    def _read_node(
        self, reader: ArchitectureReader, node: int
    ) -> tuple[tuple[str, int], tuple[str, int]]:
        reader.expect("|" if node == NODES[0] else "+|")
        pair: list[tuple[str, int]] = []
        for _ in range(2):
            name = self.operations[1 + reader.option(self.operations[1:], "operation")]
            reader.expect("~")
            taken = [source for _, source in pair]
            free = [source for source in range(node) if source not in taken]
            what = "earlier node, another than that of the first edge"
            pair.append((name, free[reader.option([str(source) for source in free], what)]))
            reader.expect("|")
        return pair[0], pair[1]

    def of_inputs(self, cells: dict[str, Inputs]) -> Architecture:
        """Return the architecture with the given edges (inverse of `inputs`); a node's edges may be in any order."""
        choices = []
        for cell in CELLS:
            for node, pair in zip(NODES, cells[cell], strict=True):
                (first, low), (second, high) = sorted(pair, key=lambda entry: entry[1])
                choices.append(_pairs(node).index((low, high)))
                choices += [self.operations.index(name) - 1 for name in (first, second)]
        return self.architecture(choices)

    def network(
        self,
        make_edge: MakeEdge,
        *,
        num_classes: int,
        in_channels: int = 3,
        channels: int = 36,
        cells: int = 20,
        affine: bool = True,
    ) -> CellNetwork:
        """Build a network of ``cells`` cells altogether; published searches use 8 cells of 16 channels.

        With ``affine=False`` a batch norm follows every pool, as in the published search network.
        """
        stem = STEM_MULTIPLIER * channels
        convolution = nn.Conv2d(in_channels, stem, 3, padding=1, bias=False)
        chain = DARTSCells(make_edge, self.rows, channels, cells, affine)
        return CellNetwork(
            {
                "stem": nn.Sequential(convolution, nn.BatchNorm2d(stem)),
                "cells": chain,
                "pool": nn.AdaptiveAvgPool2d(1),
                "flatten": nn.Flatten(),
                "classifier": nn.Linear(chain.channels_out, num_classes),
            }
        )

    def derive(self, alpha: Tensor, beta: Tensor | None = None) -> Architecture:
        """Return the architecture that keeps, per node, the two edges whose best operations have the largest weights.

        The weight of an operation is its softmax(α), times the softmax of β over the edges of the node if
        β is given. `none` is part of the softmax but never chosen. Of equal weights the first is chosen.
        """
        self.check_alpha(alpha, beta)
        strengths = alpha.detach().double().softmax(1)
        if beta is not None:
            strengths = strengths * self.edge_shares(beta.detach().double())[:, None]
        best, operation = strengths[:, 1:].max(1)
        cells: dict[str, list[tuple[tuple[str, int], tuple[str, int]]]] = {c: [] for c in CELLS}
        for rows in self.incoming:
            first, second = sorted(rows, key=lambda row: -float(best[row]))[:2]
            entries = [
                (self.operations[1 + int(operation[row])], self.rows[row].source)
                for row in (first, second)
            ]
            cells[self.rows[first].cell].append((entries[0], entries[1]))
        return self.of_inputs({cell: tuple(nodes) for cell, nodes in cells.items()})


_ENTRY = r"\('\w+',\d+\)"
_CELL = rf"=\[({_ENTRY}(?:,{_ENTRY})*)\]"
_OUTPUT = r"_concat=(?:\[2,3,4,5\]|range\(2,6\)|list\(range\(2,6\)\))"
_GENOTYPE = re.compile(rf"Genotype\(normal{_CELL},normal{_OUTPUT},reduce{_CELL},reduce{_OUTPUT}\)")


def _published(text: str) -> str:
    """Convert a published genotype to an architecture string (see `text`); return other strings unchanged."""
    found = _GENOTYPE.fullmatch(text)
    if found is None:
        return text
    cells = []
    for name, entries in zip(CELLS, found.groups(), strict=True):
        edges = [f"{name}~{source}|" for name, source in re.findall(r"'(\w+)',(\d+)", entries)]
        nodes = ("|" + "".join(edges[start : start + 2]) for start in range(0, len(edges), 2))
        cells.append(f"{name}:" + "+".join(nodes))
    return ";".join(cells)


@cache
def _pairs(node: int) -> tuple[tuple[int, int], ...]:
    return tuple(combinations(range(node), 2))


STEM_MULTIPLIER = 3


def candidates(affine: bool) -> tuple[Candidate, ...]:
    """Return constructors of the candidate operations, in the order of `DARTS.operations`."""

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
    """Cell of DARTS: two inputs and four nodes; the output concatenates the four nodes.

    Args:
        make_edge: function that makes an edge.
        rows: edges of this kind of cell by row number.
        ops: candidate operations.
        channels_before: channels of the two inputs.
        channels: channels of each node.
        reduction: whether edges from the inputs halve the image size.
        halve_first: whether the first input has twice the image size of the second.
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

    def forward(self, before_last: Tensor, last: Tensor) -> Tensor:
        """Return the cell's output: the concatenation of its four nodes."""
        nodes = [self.first(before_last), self.second(last)]
        for _ in NODES:
            nodes.append(next_node(self.edges, nodes))
        return torch.cat(nodes[2:], 1)


class DARTSCells(nn.ModuleList):
    """Cells in sequence, each fed by the two cells before it; reduction cells are at 1/3 and 2/3 of the sequence.

    Attributes:
        channels_out: channels of the output.
    """

    def __init__(
        self, make_edge: MakeEdge, rows: Sequence[Row], channels: int, cells: int, affine: bool
    ) -> None:
        super().__init__()
        ops, stem = candidates(affine), STEM_MULTIPLIER * channels
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
            self.append(cell)
            before, halve_first = (before[1], len(NODES) * channels), reduction
        self.channels_out = before[1]

    def forward(self, x: Tensor) -> Tensor:
        """Return the output of the last cell."""
        before_last = last = x
        for cell in self:
            before_last, last = last, cell(before_last, last)
        return last
