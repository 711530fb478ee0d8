"""The space of DARTS: a normal and a reduction cell of four nodes, two inputs to each node.

A cell's inputs (nodes 0 and 1) are the outputs of the two cells before it; its output is the
concatenation of the nodes 2 to 5. While a search runs every node has an edge from each earlier one
(14 a cell), and an edge may be ``none``; the cell that comes out keeps two edges a node and one of
seven operations on each: 10¹⁸ pairs of cells.
Source: Liu et al. 2019, ICLR, sections 2.1 to 2.4 and 3.1, and the released code: stem of 3C channels,
reductions at 1/3 and 2/3 of the cells, which double the channels.
Differs: no drop path and no auxiliary head (they belong to the recipe of training). Images of odd
side work.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from itertools import combinations
from typing import ClassVar, final

from torch import Tensor, nn

from fl_lightning.nas.spaces.cells import CellSpace, MakeEdge, Row
from fl_lightning.nas.spaces.darts_network import DARTSNetwork, candidates
from fl_lightning.nas.spaces.genotype import CELLS, Inputs, is_genotype, read_genotype
from fl_lightning.nas.spaces.reader import Reader
from fl_lightning.nas.spaces.space import Architecture, Decision

NODES = (2, 3, 4, 5)


@final
@dataclass(frozen=True)
class DARTS(CellSpace):
    """The space.

    Three decisions a node: which two earlier nodes it reads, and an operation on each.

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

    @property
    def rows(self) -> tuple[Row, ...]:
        """The 14 edges of the normal cell, then those of the reduction cell."""
        return _rows()

    @property
    def decisions(self) -> tuple[Decision, ...]:
        """For each node of each cell: its inputs, the operation on the first, on the second."""
        return _decisions()

    def inputs(self, architecture: Architecture) -> dict[str, Inputs]:
        """Return for each cell, node by node, ((operation, source), (operation, source))."""
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
        """Return the number of the operation on each of the 28 edges: `none` on 12."""
        chosen = dict.fromkeys(self.rows, self.none)
        for cell, nodes in self.inputs(architecture).items():
            for node, pair in zip(NODES, nodes, strict=True):
                for operation, source in pair:
                    chosen[Row(cell, source, node)] = self.operations.index(operation)
        return tuple(chosen.values())

    def node_names(self, cell: str) -> tuple[str, ...]:
        """Return the published ones, with the output as the last."""
        return ("c_{k-2}", "c_{k-1}", "0", "1", "2", "3", "c_{k}")

    def concatenated(self, cell: str) -> tuple[tuple[int, int], ...]:
        """Return the edges from the four nodes to the output."""
        return tuple((node, NODES[-1] + 1) for node in NODES)

    def text(self, choices: Sequence[int]) -> str:
        """Return ``normal:|op~source|op~source|+…;reduction:…``, a pair for each of four nodes."""
        cells = self.inputs(self.architecture(choices))
        return ";".join(
            f"{cell}:"
            + "+".join(
                "|" + "".join(f"{name}~{source}|" for name, source in pair) for pair in nodes
            )
            for cell, nodes in cells.items()
        )

    def parse(self, text: str) -> Architecture:
        """Return the pair of cells of a string of ours, or of a published ``Genotype(normal=…)``."""
        text = " ".join(text.split())  # a genotype may go over several lines
        if is_genotype(text):
            return self.of_inputs(read_genotype(text, self.name, self.operations[1:]))
        reader, cells = Reader(text, self.name), {}
        for cell in CELLS:
            reader.expect(f"{cell}:" if cell == CELLS[0] else f";{cell}:")
            cells[cell] = tuple(self._read_node(reader, node) for node in NODES)
        reader.end()
        return self.of_inputs(cells)

    def _read_node(self, reader: Reader, node: int) -> tuple[tuple[str, int], tuple[str, int]]:
        reader.expect("|" if node == NODES[0] else "+|")
        pair: list[tuple[str, int]] = []
        for _ in range(2):
            name = self.operations[1 + reader.word(self.operations[1:], "operation")]
            reader.expect("~")
            free = [source for source in range(node) if source not in [taken for _, taken in pair]]
            pair.append(
                (name, reader.number(free, "an earlier node, not the other input of this one"))
            )
            reader.expect("|")
        return pair[0], pair[1]

    def of_inputs(self, cells: dict[str, Inputs]) -> Architecture:
        """Return the architecture of what `inputs` gives; the order in a pair means nothing."""
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
    ) -> nn.Module:
        """Return a network of ``cells`` cells in all; published searches have 8 of 16 channels.

        ``affine=False`` also normalises what pools give, as the published search network does.
        """
        return DARTSNetwork(
            make_edge,
            self.rows,
            candidates(affine),
            num_classes=num_classes,
            in_channels=in_channels,
            channels=channels,
            cells=cells,
            affine=affine,
        )

    def derive(self, alpha: Tensor, beta: Tensor | None = None) -> Architecture:
        """Return for each node the two edges whose best operation is strongest, and that operation.

        Strength is softmax(α), times the softmax of β over the node's edges if there is β. `none`
        takes part in the softmax, and in nothing else. Of equals the first wins.
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


@cache
def _rows() -> tuple[Row, ...]:
    return tuple(
        Row(cell, source, node) for cell in CELLS for node in NODES for source in range(node)
    )


@cache
def _pairs(node: int) -> tuple[tuple[int, int], ...]:
    return tuple(combinations(range(node), 2))


@cache
def _decisions() -> tuple[Decision, ...]:
    decisions = []
    for cell in CELLS:
        for node in NODES:
            pairs = tuple(f"{low} and {high}" for low, high in _pairs(node))
            decisions.append(Decision(f"{cell} inputs of {node}", pairs))
            decisions += [
                Decision(f"{cell} {which} operation of {node}", DARTS.operations[1:])
                for which in ("first", "second")
            ]
    return tuple(decisions)
