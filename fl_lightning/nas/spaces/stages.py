"""Base of the built-in spaces of sizes, whose networks have stages of repeated blocks.

A space lists the pieces of its network: a piece is a constructor with sizes as arguments, which are choices in a
supernet and numbers in the network of one architecture. The network and its cost are computed from this list.

In the string of an architecture stages are joined by ``|``, and blocks by ``-``. A size is a letter and a number;
the sizes of a whole stage precede ``:``. In ``w0.5:k7e6-k3e4|w1:k5e3`` the first stage has width 0.5 and two blocks.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from typing import Any, ClassVar

from torch import nn
from torch.utils._pytree import tree_leaves
from typing_extensions import override

from fl_lightning.core.errors import ConfigurationError
from fl_lightning.nas.cost.count import Cost, Piece, chain_cost
from fl_lightning.nas.spaces.choices import Number, Size, ValueChoice, inside, most
from fl_lightning.nas.spaces.elastic import Repeat
from fl_lightning.nas.spaces.sizes import SizedNetwork, SizeSpace
from fl_lightning.nas.spaces.space import Architecture, ArchitectureReader, Networks, SearchSpace


@dataclass(frozen=True)
class RepeatedBlocks:
    """Blueprint of a network's stage: blocks that run one after the other, and how many run.

    Attributes:
        depth: number of blocks that run, a number or a choice.
        blocks: constructor and arguments of each block, as many as the largest depth.
    """

    depth: Any
    blocks: tuple[Piece, ...]


def repeated(depth: Size, block: Callable[[int], Piece]) -> RepeatedBlocks:
    """Describe a stage of repeated blocks; `block` makes the choices of block i and returns its constructor call."""
    blocks = []
    for number in range(most(depth)):
        with inside(depth, number):
            blocks.append(block(number))
    return RepeatedBlocks(depth, tuple(blocks))


# modules of a network by name, in the order in which they run
Pieces = Mapping[str, Any]  # Piece, RepeatedBlocks or list of stages


@dataclass(frozen=True)
class StageLabels:
    """Names of a stage's choices: those for the whole stage, one for its depth, and those for each block."""

    own: list[str]
    depth: str
    blocks: list[list[str]]


class StagedSpace(SizeSpace):
    """Base of the built-in spaces of sizes, whose networks have stages; define `letters` and `pieces`.

    The label of a choice names the stage, the block if there is one, and the kind of size:
    ``"stage 1 depth"``, ``"stage 1 block 2 kernel"``. The depth of a stage comes after its other sizes.

    Attributes:
        letters: letter before the number in strings, by kind of size; none for the depth.
    """

    letters: ClassVar[Mapping[str, str]]

    @abstractmethod
    def pieces(self, num_classes: int, in_channels: int) -> Pieces:
        """Return the network's modules by name, as constructor calls; their choices join the active `Building`."""

    @override
    def network(self, **shape: int) -> SizedNetwork:
        parts = {name: made(piece) for name, piece in self.pieces(**shape).items()}
        return SizedNetwork(self, shape, parts)

    def pieces_of(
        self, architecture: Architecture, *, num_classes: int = 10, in_channels: int = 3
    ) -> Pieces:
        """Return the modules of one architecture's network as constructor calls, with numbers as sizes."""
        with self.chosen(architecture):
            return self.pieces(num_classes, in_channels)

    @override
    def counted(self, architecture: Architecture, networks: Networks) -> Cost:
        pieces = self.pieces_of(architecture, **networks.shape).values()
        blocks = (block for piece in pieces for block in blocks_of(piece))
        return chain_cost(blocks, (networks.shape["in_channels"], networks.side, networks.side))

    @cached_property
    def stages(self) -> tuple[StageLabels, ...]:
        """Names of the choices in every stage."""
        stages: list[StageLabels] = []
        own: list[str] = []
        for label, needs in self.found.needs.items():
            if needs:
                ((_, number),), blocks = needs, stages[-1].blocks
                blocks.extend([] for _ in range(len(blocks), number + 1))
                blocks[number].append(label)
            elif label.endswith(" depth"):
                stages.append(StageLabels(own, label, []))
                own = []
            else:
                own.append(label)
        return tuple(stages)

    def texts(self, choices: Sequence[int]) -> dict[str, str]:
        """Return every size as a letter and a number such as ``k7``, by label of the choice."""
        options = zip(self.decisions, self.kinds, choices, strict=True)
        return {
            decision.name: self.letters.get(kind, "") + decision.options[choice]
            for decision, kind, choice in options
        }

    def text(self, choices: Sequence[int]) -> str:
        """Return an architecture string, e.g. ``k7e6-k3e4|k5e3-k5e3-k3e6``: stages of blocks."""
        texts, stages = self.texts(choices), []
        for stage in self.stages:
            blocks = stage.blocks[: int(texts[stage.depth])]
            own = "".join(texts[label] for label in stage.own)
            inside = "-".join("".join(texts[label] for label in block) for block in blocks)
            stages.append(f"{own}:{inside}" if own else inside)
        return "|".join(stages)

    def parse(self, text: str) -> Architecture:
        """Parse an architecture string, as `text` returns it."""
        reader = ArchitectureReader(text.strip(), self.name)
        chosen: dict[str, int] = {}
        for number, stage in enumerate(self.stages):
            if number:
                reader.expect("|")
            chosen |= self._read(reader, stage.own)
            if stage.own:
                reader.expect(":")
            depth = 0
            while depth == 0 or (depth < len(stage.blocks) and reader.follows("-")):
                chosen |= self._read(reader, stage.blocks[depth])
                depth += 1
            depths = self.found.choices[stage.depth].options
            if depth not in depths:
                name, allowed = stage.depth.removesuffix(" depth"), ", ".join(map(str, depths))
                reader.refuse(f"{name} has {depth} blocks so far; allowed: {allowed}")
            chosen[stage.depth] = depths.index(depth)
        reader.end()
        return self.architecture([chosen.get(label, 0) for label in self.found.choices])

    def _read(self, reader: ArchitectureReader, labels: Sequence[str]) -> dict[str, int]:
        """Read a letter and a number for each label; return the index of each option by label."""
        read = {}
        for label in labels:
            where, _, kind = label.rpartition(" ")
            reader.expect(self.letters[kind])
            read[label] = reader.option(self.found.choices[label].names, f"{kind} of {where}")
        return read


def blocks_of(piece: Any) -> tuple[Piece, ...]:
    """Return the constructor calls of blocks that run in sequence; a single module is one block."""
    if isinstance(piece, list):
        return tuple(block for stage in piece for block in stage.blocks)
    return piece.blocks if isinstance(piece, RepeatedBlocks) else (piece,)


def made(piece: Any) -> nn.Module:
    """Construct a module from a constructor call, a stage of repeated blocks, or a list of stages."""
    if isinstance(piece, list):
        return nn.Sequential(*map(made, piece))
    if isinstance(piece, RepeatedBlocks):
        return Repeat((make(*arguments) for make, *arguments in piece.blocks), piece.depth)
    make, *arguments = piece
    return make(*arguments)  # type: ignore[no-any-return]


def finish_settings(space: SearchSpace, **options: Sequence[Number]) -> None:
    """Check the numbers among a search space's settings, and convert its lists to tuples.

    Args:
        space: frozen dataclass whose fields are numbers and lists of numbers, e.g. from YAML.
        options: options of every kind of size.

    Raises:
        ConfigurationError: for a number that is not above 0 and finite, or options in another than rising order.

    Example:
        >>> from fl_lightning.nas.spaces.resnet import ResNet
        >>> ResNet(widths=[0.5, 1]).widths
        (0.5, 1)
        >>> ResNet(stem=0)
        Traceback (most recent call last):
        ...
        fl_lightning.core.errors.ConfigurationError: resnet: numbers in stem must be above 0 and finite, got 0
    """
    for field in fields(space):  # type: ignore[arg-type]
        value = _frozen(getattr(space, field.name))
        numbers = (one for one in tree_leaves(value) if not isinstance(one, bool))
        if any(not 0 < number < math.inf for number in numbers):
            raise ConfigurationError(
                f"{space.name}: numbers in {field.name} must be above 0 and finite, got {value}"
            )
        object.__setattr__(space, field.name, value)
    for kind, given in options.items():
        ValueChoice(given, kind)  # raises for options that do not rise


def _frozen(value: Any) -> Any:
    return tuple(_frozen(one) for one in value) if isinstance(value, list | tuple) else value
