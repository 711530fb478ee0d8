"""Kinds of blocks in the networks of a space, for latency tables.

Two blocks are of the same kind if they have the same layers and the same input size:

    cells   "cell nor_conv_3x3 16→32 stride 2": cell, operation, channels and stride
    sizes   "stage 2 Bottleneck(24, 40, 2, 0.25, True)": stage, constructor and arguments of the block

A space has few kinds of blocks, all of which occur in a handful of its networks.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from itertools import product
from typing import Any, final

import torch
from torch import Tensor, nn

from fl_lightning.core.errors import ConfigurationError
from fl_lightning.nas.spaces.cells import Candidate, CellSpace
from fl_lightning.nas.spaces.elastic import Repeat
from fl_lightning.nas.spaces.space import Architecture, Networks
from fl_lightning.nas.spaces.stages import RepeatedBlocks, StagedSpace

# a network, and the kind of each of its blocks by module
Marked = tuple[nn.Module, Mapping[nn.Module, str]]


def blocks_of(networks: Networks) -> CellBlocks | SizeBlocks:
    """Return the blocks of a built-in space's networks that are timed for latency tables.

    Raises:
        ConfigurationError: for a space of your own, whose blocks are unknown.
    """
    space = networks.space
    if isinstance(space, CellSpace) and space.has_shapes:
        return CellBlocks(space, networks.shape)
    if getattr(space, "resolutions", ()):
        raise ConfigurationError(
            f"latency: {space.name} has several resolutions, and a latency file is for one: leave resolutions empty"
        )
    if isinstance(space, StagedSpace):
        return SizeBlocks(space, networks)
    raise ConfigurationError(
        f"latency: the blocks of {space.name}, a space of your own, are not known: use a built-in space, or bound "
        "flops or params instead"
    )


@final
class CellBlocks:
    """Blocks timed for the latency table of a cell space: the operations on edges.

    Args:
        space: space of cells.
        shape: options of the space's `network`.
    """

    def __init__(self, space: CellSpace, shape: Mapping[str, Any]) -> None:
        self.space, self.shape = space, shape
        # (row, channels in, channels out, stride) -> number of such edges in the network
        self.edges: Counter[tuple[int, ...]] = Counter()

        def make_edge(row: int, candidates: Sequence[Candidate], *sizes: int) -> nn.Module:
            self.edges[row, *sizes] += 1
            return nn.Identity()

        with torch.device("meta"):
            space.network(make_edge, **shape)

    def kind(self, edge: tuple[int, ...], operation: int) -> str:
        """Return a text for the kind of block that an edge is: cell, operation, channels and stride."""
        row, before, after, stride = edge
        name = self.space.operations[operation]
        return f"{self.space.rows[row].cell} {name} {before}→{after} stride {stride}"

    def _operations(self) -> list[int]:
        """Return the indices of all operations except `none`, which takes no time."""
        return [o for o in range(len(self.space.operations)) if o != self.space.none]

    def kinds(self) -> list[str]:
        """Return all kinds of blocks in the space's networks, each once."""
        pairs = product(self.edges, self._operations())
        return sorted({self.kind(edge, operation) for edge, operation in pairs})

    def of(self, architecture: Architecture) -> list[str]:
        """Return the kinds of an architecture's blocks, one entry per block."""
        chosen = self.space.operations_of(architecture)
        return [
            self.kind(edge, chosen[edge[0]])
            for edge, count in self.edges.items()
            for _ in range(count)
            if chosen[edge[0]] != self.space.none
        ]

    def table(self, milliseconds: Mapping[str, float]) -> Tensor:
        """Return each operation's total milliseconds on each edge, shape (num_rows, num_operations)."""
        table = torch.zeros(self.space.num_rows, len(self.space.operations), dtype=torch.float64)
        for edge, count in self.edges.items():
            for operation in self._operations():
                table[edge[0], operation] += count * milliseconds[self.kind(edge, operation)]
        return table

    def networks(self) -> Iterator[Marked]:
        """Yield a few networks that together contain every kind of block, with the kinds of their blocks."""
        # one network per operation: over all of them every edge has every operation once
        for shift in range(len(self._operations())):
            kinds: dict[nn.Module, str] = {}
            yield self.space.network(partial(self._edge, kinds, shift), **self.shape), kinds

    def _edge(
        self,
        kinds: dict[nn.Module, str],
        shift: int,
        row: int,
        candidates: Sequence[Candidate],
        *sizes: int,
    ) -> nn.Module:
        """Build an edge of the network number `shift`, and record its kind of block."""
        operations = self._operations()
        operation = operations[(row + shift) % len(operations)]
        edge = candidates[operation](*sizes)
        kinds[edge] = self.kind((row, *sizes), operation)
        return edge


@final
class SizeBlocks:
    """Blocks timed for the latency table of a space of sizes: the repeated blocks of its stages.

    Args:
        space: space of sizes.
        every: networks of the space, for one image size and number of classes.
    """

    def __init__(self, space: StagedSpace, every: Networks) -> None:
        self.space, self._build = space, every.build

    def kinds(self) -> list[str]:
        """Return all kinds of blocks in the space's networks, each once."""
        return sorted({kind for one in self._covering() for kind in self.of(one)})

    def of(self, architecture: Architecture) -> list[str]:
        """Return the kinds of an architecture's blocks, one entry per block."""
        pieces = self.space.pieces_of(architecture).values()
        every = (one for piece in pieces for one in (piece if isinstance(piece, list) else [piece]))
        stages = (one for one in every if isinstance(one, RepeatedBlocks))
        return [
            f"stage {number} {make.__name__}{tuple(arguments)}"
            for number, stage in enumerate(stages, 1)
            for make, *arguments in stage.blocks
        ]

    def networks(self) -> Iterator[Marked]:
        """Yield a few networks that together contain every kind of block, with the kinds of their blocks."""
        for architecture in self._covering():
            network = self._build(architecture)
            stages = [module for module in network.modules() if isinstance(module, Repeat)]
            blocks = [block for stage in stages for block in stage]
            yield network, dict(zip(blocks, self.of(architecture), strict=True))

    def _covering(self) -> list[Architecture]:
        """Return a few architectures of largest depth that together contain every kind of block.

        All blocks of a network have the same sizes. Sizes of whole stages differ between odd and even stages,
        so that every pair of them meets at every stage.
        """
        space, stages = self.space, enumerate(self.space.stages)
        turn = {label: number % 2 for number, stage in stages for label in stage.own}
        labels = (decision.name for decision in space.decisions)
        keys = [(kind, turn.get(label)) for kind, label in zip(space.kinds, labels, strict=True)]
        options = {key: range(space.most_options[key[0]]) for key in keys if key[0] != "depth"}
        found = []
        for chosen in product(*options.values()):
            index = dict(zip(options, chosen, strict=True))
            ends = zip(keys, space.largest.choices, strict=True)
            found.append(space.architecture([min(index.get(key, end), end) for key, end in ends]))
        return list(dict.fromkeys(found))
