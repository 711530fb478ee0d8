"""Kinds of blocks in the networks of a space, for latency tables.

Two blocks are of the same kind if they have the same layers and the same input size:

    cells   "cell nor_conv_3x3 16→32 stride 2": cell, operation, channels and stride
    sizes   "stage 2 first w0.8 after w0.65 e0.25": stage, "first" for the block that opens the stage,
            sizes of the stage, sizes of the stage before (for the first block), sizes of the block

A space has few kinds of blocks, and a handful of its networks contain all of them.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from itertools import product
from typing import Any, final

import torch
from torch import Tensor, nn
from typing_extensions import override

from fl_lightning.core.errors import ConfigurationError
from fl_lightning.nas.spaces.cells import Candidate, CellSpace, FixedEdge
from fl_lightning.nas.spaces.choices import Number
from fl_lightning.nas.spaces.elastic import Repeat
from fl_lightning.nas.spaces.sizes import NamedSize, Part, StagedSpace
from fl_lightning.nas.spaces.space import Architecture, SearchSpace

# network, kinds of the blocks by module
Marked = tuple[nn.Module, Mapping[nn.Module, str]]


class Blocks(ABC):
    """Base of the blocks of a space, in networks of one shape."""

    @abstractmethod
    def kinds(self) -> list[str]:
        """Return all kinds of blocks, without repetitions."""

    @abstractmethod
    def of(self, architecture: Architecture) -> list[str]:
        """Return the kind of every block of an architecture, with repetitions."""

    @abstractmethod
    def networks(self, generator: torch.Generator) -> Iterator[Marked]:
        """Yield a few networks that together contain every kind of block."""


def blocks_of(space: SearchSpace, options: Mapping[str, Any]) -> Blocks:
    """Return the blocks of a space.

    Args:
        space: built-in space of cells or of sizes.
        options: options of the space's `build`.

    Raises:
        ConfigurationError: for a space of your own, whose blocks are unknown.
    """
    if isinstance(space, CellSpace) and space.has_shapes:
        return CellBlocks(space, options)
    if isinstance(space, StagedSpace):
        return SizeBlocks(space, options)
    raise ConfigurationError(
        f"{space.name} is made neither of cells nor of sizes: its blocks are not known"
    )


@final
class CellBlocks(Blocks):
    """Blocks of a space of cells: operations on edges.

    Args:
        space: space of cells.
        options: options of the space's `network`.
    """

    def __init__(self, space: CellSpace, options: Mapping[str, Any]) -> None:
        self.space, self.options = space, options
        # (row, channels in, channels out, stride) -> number of such edges in the network
        self.edges: Counter[tuple[int, int, int, int]] = Counter()

        def make_edge(
            row: int, candidates: Sequence[Candidate], before: int, after: int, stride: int
        ) -> nn.Module:
            self.edges[row, before, after, stride] += 1
            return nn.Identity()

        with torch.device("meta"):
            space.network(make_edge, **options)

    def kind(self, edge: tuple[int, int, int, int], operation: int) -> str:
        """Return the kind of an edge with a given operation."""
        row, before, after, stride = edge
        name = self.space.operations[operation]
        return f"{self.space.rows[row].cell} {name} {before}→{after} stride {stride}"

    def _operations(self) -> list[int]:
        """Indices of all operations except `none`, which takes no time."""
        return [o for o in range(len(self.space.operations)) if o != self.space.none]

    @override
    def kinds(self) -> list[str]:
        pairs = product(self.edges, self._operations())
        return sorted({self.kind(edge, operation) for edge, operation in pairs})

    @override
    def of(self, architecture: Architecture) -> list[str]:
        chosen = self.space.operations_of(architecture)
        return [
            self.kind(edge, chosen[edge[0]])
            for edge, count in self.edges.items()
            for _ in range(count)
            if chosen[edge[0]] != self.space.none
        ]

    def table(self, milliseconds: Mapping[str, float]) -> Tensor:
        """Total time of each operation on each row in ms, shape (num_rows, num_operations)."""
        table = torch.zeros(self.space.num_rows, len(self.space.operations), dtype=torch.float64)
        for edge, count in self.edges.items():
            for operation in self._operations():
                table[edge[0], operation] += count * milliseconds[self.kind(edge, operation)]
        return table

    @override
    def networks(self, generator: torch.Generator) -> Iterator[Marked]:
        # one network per operation; over all of them every edge has every operation once
        operations = self._operations()
        for shift in range(len(operations)):
            kinds: dict[nn.Module, str] = {}

            def make_edge(
                row: int,
                candidates: Sequence[Candidate],
                *shape: int,
                shift: int = shift,
                kinds: dict[nn.Module, str] = kinds,
            ) -> nn.Module:
                operation = operations[(row + shift) % len(operations)]
                before, after, stride = shape
                edge = FixedEdge(candidates[operation](before, after, stride))
                kinds[edge] = self.kind((row, before, after, stride), operation)
                return edge

            yield self.space.network(make_edge, **self.options), kinds


@final
class SizeBlocks(Blocks):
    """Blocks of a space of sizes: blocks of stages.

    Args:
        space: space of sizes.
        options: options of the space's `build`.
    """

    def __init__(self, space: StagedSpace, options: Mapping[str, Any]) -> None:
        self.space, self.options = space, options

    @override
    def kinds(self) -> list[str]:
        kinds: list[str] = []
        before_sizes: tuple[NamedSize, ...] = ()
        for part in self.space.parts:
            befores = list(product(*(size.options for size in before_sizes)))
            owns = product(*(size.options for size in part.own))
            inner = list(product(*(size.options for size in part.block)))
            several = part.depth.options[-1] > 1
            for own, block in product(owns, inner):
                kinds += [_kind(part, own, block, (before_sizes, before)) for before in befores]
                kinds += [_kind(part, own, block, None)] if several else []
            before_sizes = part.own
        return kinds

    @override
    def of(self, architecture: Architecture) -> list[str]:
        kinds = []
        before: _Chosen = ((), ())
        for part, sizes in zip(self.space.parts, self.space.sizes(architecture), strict=True):
            for number, block in enumerate(sizes.blocks):
                opens = before if number == 0 else None
                kinds.append(_kind(part, sizes.own, block, opens))
            before = (part.own, sizes.own)
        return kinds

    @override
    def networks(self, generator: torch.Generator) -> Iterator[Marked]:
        # deepest networks; of some random ones always the one with the most kinds not covered yet
        missing = set(self.kinds())
        while missing:
            drawn = [self._deepest(self.space.sample(generator)) for _ in range(_CANDIDATES)]
            architecture = max(drawn, key=lambda one: len(missing.intersection(self.of(one))))
            covered = self.of(architecture)
            missing -= set(covered)
            network = self.space.build(architecture, **self.options)
            stages = [module for module in network.modules() if isinstance(module, Repeat)]
            blocks = [block for stage in stages for block in stage]
            yield network, dict(zip(blocks, covered, strict=True))

    def _deepest(self, architecture: Architecture) -> Architecture:
        """Return a copy of an architecture with the largest depths."""
        depths = [name.endswith(" depth") for name, _ in self.space.named_sizes]
        rows = zip(architecture.choices, depths, self.space.decisions, strict=True)
        return self.space.architecture(
            [len(decision.options) - 1 if is_depth else own for own, is_depth, decision in rows]
        )


_CANDIDATES = 100  # number of random networks per timed network
# sizes, chosen options
_Chosen = tuple[Sequence[NamedSize], Sequence[Number]]


def _kind(part: Part, own: Sequence[Number], block: Sequence[Number], opens: _Chosen | None) -> str:
    """Return the name of a kind; ``opens``: sizes of the stage before, for the first block of a stage."""
    words = [part.name, _text(part.own, own)]
    if opens is not None:
        words.insert(1, "first")
        words.append(f"after {_text(*opens)}" if opens[0] else "")
    return " ".join(word for word in (*words, _text(part.block, block)) if word)


def _text(sizes: Sequence[NamedSize], numbers: Sequence[Number]) -> str:
    pairs = zip(sizes, numbers, strict=True)
    return "".join(f"{size.letter}{number:g}" for size, number in pairs)
