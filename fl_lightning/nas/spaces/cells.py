"""Spaces of cells: a cell is a small graph with operations on its edges; a network repeats cells.

A row is an edge with a decision of its own: row r of α, shape (num_rows, num_operations), has the logits of the
operations on the edge. A network is built with a function that makes its edges: mixtures of all candidates in a
search, single operations in the network of one architecture.

A cost of a network is a sum over rows, so that exact and expected costs have one table (`RowCosts`):

    cost(cell) = fixed + Σ_rows cost[row, operation on it]
    E[cost]    = fixed + Σ_rows Σ_operations p[row, operation] · cost[row, operation]

The expectation is differentiable in p, so that hardware-aware searches add it to their loss. The cost of a row
is the sum over all cells that repeat the edge, at their channels and image sizes.

Convolutions are ReLU, convolution without bias, batch norm, in this order.
Sources: Liu et al. 2019 (DARTS) and Dong & Yang 2020 (NAS-Bench-201), with their released code; Cai et al.
2019, ProxylessNAS, section 3.3, and Wu et al. 2019, FBNet, eq. 7, for the expectation.
Differs: on images of odd size a factorized reduction pads by one; the published one fails there.
"""

from __future__ import annotations

from abc import abstractmethod
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import astuple, dataclass
from functools import cached_property, lru_cache
from itertools import pairwise
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn.functional import pad
from torch.utils._pytree import tree_leaves
from typing_extensions import override

from fl_lightning.nas.cost.count import MEASURES, Cost, count
from fl_lightning.nas.spaces.space import Architecture, Networks, SearchSpace

# sizes: channels in, channels out, stride -> operation
Candidate = Callable[[int, int, int], nn.Module]
# row, candidates in the order of the space's operations, sizes of the edge -> edge; None for no edge
MakeEdge = Callable[[int, Sequence[Candidate], int, int, int], nn.Module | None]


@dataclass(frozen=True)
class Row:
    """Edge of a cell whose operation is a decision of its own; it is one row of the matrix α.

    Attributes:
        cell: kind of the cell, e.g. ``"normal"``.
        source: number of the node at which the edge starts.
        target: number of the node at which the edge ends.
    """

    cell: str
    source: int
    target: int

    def __str__(self) -> str:
        return f"{self.source}→{self.target}"


class WeighedEdge(nn.Module):
    """Base of the edges of a search network; `CellNetwork` sets their weights before each forward pass.

    Attributes:
        weights: `EdgeWeights` of a rule of relaxation.
    """

    weights: Any = None


class CellNetwork(nn.Sequential):
    """Network of a space of cells: a sequence of named modules.

    Args:
        parts: modules by name, the classifier last.
    """

    def __init__(self, parts: Mapping[str, nn.Module]) -> None:
        super().__init__(OrderedDict(parts))

    @cached_property
    def _edges(self) -> list[WeighedEdge]:
        return [part for part in self.modules() if isinstance(part, WeighedEdge)]

    def forward(self, x: Tensor, weights: Any = None) -> Tensor:
        """Return logits (B, num_classes); search edges use the given edge weights, by default those already set."""
        before = [edge.weights for edge in self._edges]
        try:
            for edge in self._edges:
                edge.weights = edge.weights if weights is None else weights
            return super().forward(x)  # type: ignore[no-any-return,no-untyped-call]
        finally:
            for edge, own in zip(self._edges, before, strict=True):
                edge.weights = own

    def get_classifier(self) -> nn.Module:
        """Return the classifier, which is the last layer."""
        return self[-1][-1] if isinstance(self[-1], nn.Sequential) else self[-1]


def next_node(edges: nn.ModuleDict, nodes: Sequence[Tensor]) -> Tensor:
    """Compute a cell's next node: the sum of its incoming edges' outputs; zeros if no edge enters.

    Args:
        edges: edges of the cell, named ``source_target``.
        nodes: earlier nodes, in order.
    """
    named = ((x, f"{source}_{len(nodes)}") for source, x in enumerate(nodes))
    terms = [edges[name](x) for x, name in named if name in edges]
    return sum(terms[1:], start=terms[0]) if terms else torch.zeros_like(nodes[0])


@dataclass(frozen=True, eq=False)
class RowCosts:
    """One cost measure for all networks of a cell space: a fixed part plus a term per edge and operation.

    Attributes:
        fixed: cost of everything except the operations.
        of_rows: cost of each operation on each row, shape (num_rows, num_operations).
    """

    fixed: float
    of_rows: Tensor

    def of(self, operations: Sequence[int]) -> float:
        """Return a network's cost, given the index of the operation on each edge."""
        return self.fixed + self.of_rows[range(len(operations)), list(operations)].sum().item()

    def expected(self, probabilities: Tensor) -> Tensor:
        """Return the expected cost, a scalar, if every edge draws its operation independently.

        Args:
            probabilities: shape (num_rows, num_operations); gradients flow.
        """
        expectation: Tensor = self.fixed + (probabilities * self.of_rows.to(probabilities)).sum()
        return expectation


class CellSpace(SearchSpace):
    """Base of the cell spaces, in which an architecture chooses an operation for each edge of a cell.

    Attributes:
        operations: names of the operations.
        none: index of the operation that stands for no edge; -1 if there is none.
        has_shapes: whether candidates are made for given channels and stride.
    """

    operations: ClassVar[tuple[str, ...]]
    none: ClassVar[int]
    has_shapes: ClassVar[bool] = True

    @property
    @abstractmethod
    def rows(self) -> tuple[Row, ...]:
        """Edges in the order of α's rows; edges into the same node are adjacent."""

    @property
    def num_rows(self) -> int:
        """Number of rows of α: one per edge with a decision of its own."""
        return len(self.rows)

    @property
    def incoming(self) -> tuple[tuple[int, ...], ...]:
        """For every node, the row numbers of the edges that enter it."""
        rows = self.rows
        starts = [
            row
            for row, edge in enumerate(rows)
            if row == 0 or (edge.cell, edge.target) != (rows[row - 1].cell, rows[row - 1].target)
        ]
        return tuple(tuple(range(*ends)) for ends in pairwise([*starts, len(rows)]))

    @abstractmethod
    def operations_of(self, architecture: Architecture) -> tuple[int, ...]:
        """Return the index of the operation on each edge; the index `none` for edges that the cell lacks."""

    @abstractmethod
    def node_names(self, cell: str) -> tuple[str, ...]:
        """Return the names of a cell's nodes, for pictures."""

    def name_of(self, row: int, operation: int) -> str:
        """Return the name of an operation on an edge."""
        return self.operations[operation]

    def masked(self, alpha: Tensor) -> Tensor:
        """Return α with very low logits for operations that an edge does not offer; by default α unchanged."""
        return alpha

    def concatenated(self, cell: str) -> tuple[tuple[int, int], ...]:
        """Return a cell's edges (source, target) that only concatenate, without an operation; by default none."""
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
        """Build a network of the space; in a search its ``forward(x, weights=None)`` takes edge weights.

        Args:
            make_edge: function that makes an edge.
            num_classes: number of classes.
            in_channels: channels of the images.
            channels: channels of the first cells.
            cells: number of cells, per stage or in all, as the space defines.
            affine: whether batch norms of candidates scale and shift; False in a search, in which a scale
                could undo α.
        """

    @abstractmethod
    def derive(self, alpha: Tensor, beta: Tensor | None = None) -> Architecture:
        """Return the architecture that α selects, by the rule that the space's paper gives.

        Args:
            alpha: logits of the operations, shape (num_rows, num_operations).
            beta: logits of the edges that enter a node, shape (num_rows,), for PC-DARTS.

        Raises:
            ValueError: if a shape is wrong, or a value is not finite.
        """

    @override
    def build(self, architecture: Architecture, **shape: Any) -> nn.Module:
        chosen = self.operations_of(architecture)

        def make_edge(row: int, candidates: Sequence[Candidate], *sizes: int) -> nn.Module | None:
            is_none = chosen[row] == self.none
            return None if is_none else candidates[chosen[row]](*sizes)

        return self.network(make_edge, **shape)

    @override
    def counted(self, architecture: Architecture, networks: Networks) -> Cost:
        table, chosen = cost_table(networks), self.operations_of(architecture)
        return Cost(*(int(table[measure].of(chosen)) for measure in MEASURES))

    def edge_shares(self, beta: Tensor) -> Tensor:
        """Return the weights of edges, shape (num_rows,): a softmax of β over the edges into the same node."""
        return torch.cat([beta[list(rows)].softmax(0) for rows in self.incoming])

    def check_alpha(self, alpha: Tensor, beta: Tensor | None = None) -> None:
        """Raise ValueError if α or β has a wrong shape or is not finite."""
        rows = {"alpha": (alpha, (self.num_rows, len(self.operations)))}
        if beta is not None:
            rows["beta"] = (beta, (self.num_rows,))  # type: ignore[assignment]
        for name, (tensor, shape) in rows.items():
            if tuple(tensor.shape) != shape:
                raise ValueError(
                    f"{name} of {self.name} must have the shape {shape}, got {tuple(tensor.shape)}"
                )
            if not tensor.isfinite().all():
                raise ValueError(
                    f"{name} is not finite, so that it selects no cell: the search has diverged, lower the lr of "
                    "model.architecture_optimizer"
                )


@lru_cache(maxsize=64)
def cost_table(networks: Networks) -> Mapping[str, RowCosts]:
    """Return cost tables for all networks of a cell space, by measure, counted on the meta device."""
    space: Any = networks.space
    inputs: list[tuple[int, Sequence[Candidate], tuple[int, ...], Any]] = []

    def make_edge(row: int, candidates: Sequence[Candidate], *sizes: int) -> nn.Module:
        edge = nn.Sequential(candidates[0](*sizes))
        edge.register_forward_pre_hook(
            lambda _, given: inputs.append((row, candidates, sizes, given[0]))
        )
        return edge

    def counts(module: nn.Module, x: Any) -> Tensor:
        return torch.tensor(astuple(count(module, x)), device="cpu")

    shape_of_rows = len(MEASURES), space.num_rows, len(space.operations)
    of_rows = torch.zeros(shape_of_rows, dtype=torch.int64, device="cpu")
    with torch.device("meta"):
        # an edge has its first candidate
        rest = counts(space.network(make_edge, **networks.shape), networks.images(1))
        known: dict[tuple[Any, ...], Tensor] = {}
        for row, candidates, sizes, x in inputs:
            for number, candidate in enumerate(candidates):
                key = candidate, sizes, tuple(tensor.shape for tensor in tree_leaves(x))
                if key not in known:
                    known[key] = counts(candidate(*sizes), x)
                if number == 0:
                    rest -= known[key]
                if number != space.none:  # a missing edge costs nothing
                    of_rows[:, row, number] += known[key]
    rows = zip(MEASURES, rest.tolist(), of_rows, strict=True)
    return {measure: RowCosts(fixed, own) for measure, fixed, own in rows}


class RowSpace(CellSpace):
    """Base of the cell spaces in which each edge chooses its operation independently of the others."""

    @override
    def operations_of(self, architecture: Architecture) -> tuple[int, ...]:
        return architecture.choices

    @override
    def derive(self, alpha: Tensor, beta: Tensor | None = None) -> Architecture:
        """Return the architecture with the operation of the largest logit on each edge; β is ignored."""
        self.check_alpha(alpha, beta)
        return self.architecture(self.masked(alpha).argmax(1).tolist())


class Zero(nn.Module):
    """Operation ``none``: outputs zeros, in the shape that an operation of this stride outputs."""

    def __init__(self, stride: int) -> None:
        super().__init__()
        self.stride = stride

    def forward(self, x: Tensor) -> Tensor:
        """Return zeros (batch, channels, ⌈height / stride⌉, ⌈width / stride⌉)."""
        return torch.zeros_like(x[:, :, :: self.stride, :: self.stride])


class ReLUConvBN(nn.Sequential):
    """Sequence of ReLU, convolution (image size kept at stride 1) and batch norm."""

    def __init__(
        self, channels_in: int, channels_out: int, kernel: int, stride: int, affine: bool = True
    ) -> None:
        super().__init__(
            nn.ReLU(),
            nn.Conv2d(channels_in, channels_out, kernel, stride, kernel // 2, bias=False),
            nn.BatchNorm2d(channels_out, affine=affine),
        )


class FactorizedReduce(nn.Module):
    """ReLU, two stride-2 convolutions (even pixels, odd pixels) with half of the channels each, batch norm."""

    def __init__(self, channels_in: int, channels_out: int, affine: bool = True) -> None:
        super().__init__()
        self.relu = nn.ReLU()
        half = channels_out // 2
        self.even = nn.Conv2d(channels_in, half, 1, 2, bias=False)
        self.odd = nn.Conv2d(channels_in, channels_out - half, 1, 2, bias=False)
        self.norm = nn.BatchNorm2d(channels_out, affine=affine)

    def forward(self, x: Tensor) -> Tensor:
        """Return the input at half the image size: (batch, channels_out, ⌈side / 2⌉, ⌈side / 2⌉)."""
        x = self.relu(x)
        shifted = pad(x, (0, x.shape[3] % 2, 0, x.shape[2] % 2))[:, :, 1:, 1:]
        return self.norm(torch.cat([self.even(x), self.odd(shifted)], 1))  # type: ignore[no-any-return]


def average_pool(stride: int) -> nn.Module:
    """Return a 3×3 average pool whose averages leave out the padding."""
    return nn.AvgPool2d(3, stride, padding=1, count_include_pad=False)


def depthwise(channels: int, kernel: int, stride: int, dilation: int = 1) -> nn.Conv2d:
    """Return a depthwise convolution that keeps the image size at stride 1."""
    padding = dilation * (kernel // 2)
    return nn.Conv2d(
        channels, channels, kernel, stride, padding, dilation, groups=channels, bias=False
    )


def _separable(
    channels_in: int, channels_out: int, kernel: int, stride: int, dilation: int, affine: bool
) -> tuple[nn.Module, ...]:
    return (
        nn.ReLU(),
        depthwise(channels_in, kernel, stride, dilation),
        nn.Conv2d(channels_in, channels_out, 1, bias=False),
        nn.BatchNorm2d(channels_out, affine=affine),
    )


def separable(
    channels_in: int, channels_out: int, kernel: int, stride: int, affine: bool
) -> nn.Module:
    """Return two depthwise separable convolutions in sequence, as in the DARTS paper."""
    first = _separable(channels_in, channels_in, kernel, stride, 1, affine)
    return nn.Sequential(*first, *_separable(channels_in, channels_out, kernel, 1, 1, affine))


def dilated(
    channels_in: int, channels_out: int, kernel: int, stride: int, affine: bool
) -> nn.Module:
    """Return a depthwise separable convolution with dilation 2."""
    return nn.Sequential(*_separable(channels_in, channels_out, kernel, stride, 2, affine))
