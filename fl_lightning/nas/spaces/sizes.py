"""Spaces whose decisions are sizes: widths, depths, kernels.

A network consists of parts (stages). A part has its own sizes, a depth, and sizes for each block. Choices of
blocks beyond the depth have no effect and are always 0, so that equal networks are equal architectures.

In strings, parts are joined by ``|``, the sizes of a part precede ``:``, blocks are joined by ``-``, and a
size is a letter and a number: ``w0.5:k7e6-k3e4|w1:k5e3``. The number of blocks is the depth.

The layers of a supernet have choices as sizes; those of a plain network have numbers.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from itertools import product
from typing import Any

from torch import Tensor, nn
from typing_extensions import override

from fl_lightning.core.errors import ConfigurationError
from fl_lightning.nas.cost.count import Cost
from fl_lightning.nas.spaces import subnetwork
from fl_lightning.nas.spaces.choices import Number, ValueChoice, most
from fl_lightning.nas.spaces.space import (
    MOST_ENUMERATED,
    Architecture,
    ArchitectureReader,
    Decision,
    SearchSpace,
)


@dataclass(frozen=True)
class NamedSize:
    """A named size with options.

    Attributes:
        name: name of the size, e.g. ``"kernel"``.
        letter: letter before the number in strings.
        options: options in rising order.
    """

    name: str
    letter: str
    options: tuple[Number, ...]

    def __post_init__(self) -> None:
        ValueChoice(self.options, self.name)  # raises for options that do not rise


@dataclass(frozen=True)
class Part:
    """A stage of a network and the sizes to choose in it.

    Attributes:
        name: name of the stage, e.g. ``"stage 1"``.
        own: sizes of the whole stage.
        depth: number of blocks.
        block: sizes of each block.
    """

    name: str
    own: tuple[NamedSize, ...]
    depth: NamedSize
    block: tuple[NamedSize, ...]

    @property
    def most_blocks(self) -> int:
        """Largest number of blocks."""
        return int(self.depth.options[-1])

    @property
    def sizes(self) -> tuple[tuple[str, NamedSize], ...]:
        """Names and sizes of all decisions of the stage, in order."""
        head = [*self.own, self.depth]
        blocks = range(1, self.most_blocks + 1)
        inside = [(f"block {number} {size.name}", size) for number in blocks for size in self.block]
        named = [*((size.name, size) for size in head), *inside]
        return tuple((f"{self.name} {name}", size) for name, size in named)


@dataclass(frozen=True)
class PartSizes:
    """Values or choices of the sizes of a stage.

    Attributes:
        own: sizes of the whole stage.
        depth: number of blocks.
        blocks: sizes of each block; of the largest number of blocks if the depth is a choice.
    """

    own: tuple[Any, ...]
    depth: Any
    blocks: tuple[tuple[Any, ...], ...]


class SizeSpace(SearchSpace):
    """Base of the spaces of sizes.

    A supernet is a network whose sizes are choices; ``forward(x, architecture=None)`` runs a sub-network.
    """

    @property
    @abstractmethod
    def named_sizes(self) -> tuple[tuple[str, NamedSize], ...]:
        """Name and size of every decision, in order."""

    @abstractmethod
    def active(self, choices: Sequence[int]) -> tuple[bool, ...]:
        """Return for each choice whether it has an effect; choices of blocks beyond the depth have none."""

    @abstractmethod
    def supernet(self, *, num_classes: int, in_channels: int = 3) -> nn.Module:
        """Return a new supernet of the space."""

    @abstractmethod
    def build(
        self, architecture: Architecture, *, num_classes: int, in_channels: int = 3
    ) -> nn.Module:
        """Return a new plain network of an architecture."""

    @abstractmethod
    def cost(
        self,
        architecture: Architecture,
        *,
        side: int = 32,
        in_channels: int = 3,
        num_classes: int = 10,
    ) -> Cost:
        """Exact cost of an architecture's network for one image.

        Args:
            architecture: architecture of this space.
            side: height and width of the images, in pixels.
            in_channels: channels of the images.
            num_classes: number of classes.
        """

    @cached_property
    def decisions(self) -> tuple[Decision, ...]:
        """A decision for every size."""
        return tuple(
            Decision(name, tuple(f"{option:g}" for option in size.options))
            for name, size in self.named_sizes
        )

    @property
    def smallest(self) -> Architecture:
        """Architecture with the first option of every decision."""
        return self.architecture([0] * len(self.decisions))

    @property
    def largest(self) -> Architecture:
        """Architecture with the last option of every decision."""
        return self.architecture([len(decision.options) - 1 for decision in self.decisions])

    def architecture(self, choices: Sequence[int]) -> Architecture:
        """Return the architecture with given choices; choices without effect become 0."""
        checked = Architecture(self, tuple(int(choice) for choice in choices))
        active = self.active(checked.choices)
        pairs = zip(checked.choices, active, strict=True)
        return Architecture(self, tuple(choice if on else 0 for choice, on in pairs))

    def check_own(self, architecture: Architecture) -> None:
        """Raise ConfigurationError for an architecture of another space."""
        if architecture.space is not self and architecture.space != self:
            raise ConfigurationError(
                f"{self.name} cannot use an architecture of another space ({architecture.space.name})"
            )

    def extract(self, supernet: nn.Module, architecture: Architecture) -> nn.Module:
        """Return a plain network with the weights of a sub-network, and so the same outputs."""
        part = self.build(architecture, **_shape(supernet))
        return subnetwork.copy(supernet, part)

    def held(self, supernet: nn.Module, architecture: Architecture) -> dict[str, Tensor]:
        """Return masks of the supernet's coordinates that a sub-network uses, bool by parameter name.

        True exactly for the coordinates that can get a gradient from the sub-network.
        """
        return subnetwork.held(supernet, lambda: self.build(architecture, **_shape(supernet)))


class StagedSpace(SizeSpace):
    """Base of the built-in spaces of stages; subclasses define `parts`, `network` and `cost`."""

    @property
    @abstractmethod
    def parts(self) -> tuple[Part, ...]:
        """Stages of the network."""

    @abstractmethod
    def network(
        self, sizes: Sequence[PartSizes], *, num_classes: int, in_channels: int
    ) -> SizedNetwork:
        """Return a network with given sizes, which are numbers or choices."""

    @override
    @cached_property
    def named_sizes(self) -> tuple[tuple[str, NamedSize], ...]:
        return tuple(named for part in self.parts for named in part.sizes)

    @cached_property
    def size(self) -> int:
        """Number of different architectures."""
        return math.prod(_count(part) for part in self.parts)

    @override
    def active(self, choices: Sequence[int]) -> tuple[bool, ...]:
        active: list[bool] = []
        for part in self.parts:
            depth = int(part.depth.options[choices[len(active) + len(part.own)]])
            last = len(active) + len(part.own) + 1 + depth * len(part.block)
            end = len(active) + len(part.sizes)
            active += [index < last for index in range(len(active), end)]
        return tuple(active)

    def sizes(self, architecture: Architecture) -> tuple[PartSizes, ...]:
        """Return the sizes of an architecture, by stage.

        Raises:
            ConfigurationError: if the architecture is of another space.
        """
        self.check_own(architecture)
        return self._sizes(architecture.choices)

    def _sizes(self, choices: Sequence[int]) -> tuple[PartSizes, ...]:
        pairs = zip(self.named_sizes, choices, strict=True)
        return self._grouped(size.options[choice] for (_, size), choice in pairs)

    def _grouped(self, values: Iterable[Any]) -> tuple[PartSizes, ...]:
        """Group values, given in the order of the decisions, by stage."""
        taken, stages = iter(values), []
        for part in self.parts:
            own = tuple(next(taken) for _ in part.own)
            depth = next(taken)
            blocks = [tuple(next(taken) for _ in part.block) for _ in range(part.most_blocks)]
            stages.append(PartSizes(own, depth, tuple(blocks[: most(depth)])))
        return tuple(stages)

    def text(self, choices: Sequence[int]) -> str:
        """Return the string of an architecture, e.g. ``k7e6-k3e4|k5e3-k5e3-k3e6``."""
        pairs = zip(self.parts, self._sizes(choices), strict=True)
        return "|".join(part_text(part, sizes) for part, sizes in pairs)

    def parse(self, text: str) -> Architecture:
        """Parse the string of an architecture."""
        reader = ArchitectureReader(text.strip(), self.name)
        choices: list[int] = []
        for number, part in enumerate(self.parts):
            if number:
                reader.expect("|")
            choices += read_part(reader, part)
        reader.end()
        return self.architecture(choices)

    def enumerate(self) -> Iterator[Architecture]:
        """Yield all different architectures.

        Raises:
            ConfigurationError: if there are more than a million.
        """
        if self.size > MOST_ENUMERATED:
            yield from super().enumerate()  # refuses
        for stages in product(*(list(_choices(part)) for part in self.parts)):
            yield self.architecture([choice for stage in stages for choice in stage])

    @override
    def supernet(self, *, num_classes: int, in_channels: int = 3) -> nn.Module:
        choices = [ValueChoice(size.options, name) for name, size in self.named_sizes]
        shape = {"num_classes": num_classes, "in_channels": in_channels}
        network = self.network(self._grouped(choices), **shape)
        network.choices = choices
        return network

    @override
    def build(
        self, architecture: Architecture, *, num_classes: int, in_channels: int = 3
    ) -> nn.Module:
        shape = {"num_classes": num_classes, "in_channels": in_channels}
        return self.network(self.sizes(architecture), **shape)


class SizedNetwork(nn.Module):
    """Base of the networks of a space of sizes; subclasses define `logits`.

    Args:
        space: space of the network.
        num_classes: number of classes.
        in_channels: channels of the images.

    Attributes:
        choices: choices of the layers, in the order of the space's decisions; empty in a plain network.
    """

    def __init__(self, space: SizeSpace, num_classes: int, in_channels: int) -> None:
        super().__init__()
        self.space, self.num_classes, self.in_channels = space, num_classes, in_channels
        self.choices: list[ValueChoice] = []

    def forward(self, x: Tensor, architecture: Architecture | None = None) -> Tensor:
        """Return logits (B, num_classes); a supernet runs a sub-network, the largest if None."""
        if self.choices:
            chosen = self.space.largest if architecture is None else architecture
            self.space.check_own(chosen)
            for choice, index in zip(self.choices, chosen.choices, strict=True):
                choice.index = index
        return self.logits(x)

    @abstractmethod
    def logits(self, x: Tensor) -> Tensor:
        """Return logits (B, num_classes) under the current choices."""


def _shape(supernet: nn.Module) -> dict[str, int]:
    return {"num_classes": supernet.num_classes, "in_channels": supernet.in_channels}  # type: ignore[dict-item]


def _count(part: Part) -> int:
    own = math.prod(len(size.options) for size in part.own)
    block = math.prod(len(size.options) for size in part.block)
    return own * sum(int(block**depth) for depth in part.depth.options)


def _choices(part: Part) -> Iterator[tuple[int, ...]]:
    own = [range(len(size.options)) for size in part.own]
    block = [range(len(size.options)) for size in part.block]
    for number, depth in enumerate(map(int, part.depth.options)):
        idle = (0,) * ((part.most_blocks - depth) * len(block))
        for choices in product(*own, [number], *(block * depth)):
            yield (*choices, *idle)


def part_text(part: Part, chosen: PartSizes) -> str:
    """Return the string of the sizes of a part."""
    own = _sizes_text(part.own, chosen.own)
    blocks = "-".join(_sizes_text(part.block, block) for block in chosen.blocks)
    return f"{own}:{blocks}" if own else blocks


def _sizes_text(sizes: Sequence[NamedSize], numbers: Sequence[Number]) -> str:
    pairs = zip(sizes, numbers, strict=True)
    return "".join(f"{size.letter}{number:g}" for size, number in pairs)


def read_part(reader: ArchitectureReader, part: Part) -> list[int]:
    """Read a part of a string; return the choices of all decisions of the part."""
    own = [_read_size(reader, part.name, size) for size in part.own]
    if own:
        reader.expect(":")
    blocks = [_read_block(reader, part)]
    while len(blocks) < part.most_blocks and reader.text.startswith("-", reader.place):
        reader.expect("-")
        blocks.append(_read_block(reader, part))
    depths = list(part.depth.options)
    if len(blocks) not in depths:
        allowed = ", ".join(map(str, depths))
        reader.refuse(f"{part.name} has {len(blocks)} blocks so far; allowed: {allowed}")
    idle = [0] * ((part.most_blocks - len(blocks)) * len(part.block))
    return [*own, depths.index(len(blocks)), *(c for block in blocks for c in block), *idle]


def _read_block(reader: ArchitectureReader, part: Part) -> list[int]:
    return [_read_size(reader, part.name, size) for size in part.block]


def _read_size(reader: ArchitectureReader, part: str, size: NamedSize) -> int:
    """Read a letter and a number; return the index of the option."""
    reader.expect(size.letter)
    options = [f"{option:g}" for option in size.options]
    return reader.option(options, f"{size.name} of a block of {part}")


def finish_settings(space: SearchSpace) -> None:
    """Check that all numbers in the settings of a space are above 0, and convert lists to tuples.

    Args:
        space: frozen dataclass whose fields are numbers and lists of numbers, e.g. from YAML.

    Raises:
        ConfigurationError: for a number that is not above 0.

    Example:
        >>> from fl_lightning.nas.spaces.resnet import ResNet
        >>> ResNet(widths=[0.5, 1]).widths
        (0.5, 1)
        >>> ResNet(stem=0)
        Traceback (most recent call last):
        ...
        fl_lightning.core.errors.ConfigurationError: resnet: numbers in stem must be above 0, got 0
    """
    for field in fields(space):  # type: ignore[arg-type]
        value = _frozen(getattr(space, field.name))
        if any(not 0 < number < math.inf for number in _numbers(value)):
            raise ConfigurationError(
                f"{space.name}: numbers in {field.name} must be above 0, got {value}"
            )
        object.__setattr__(space, field.name, value)


def _frozen(value: Any) -> Any:
    return tuple(_frozen(one) for one in value) if isinstance(value, list | tuple) else value


def _numbers(value: Any) -> Iterator[Number]:
    for one in value if isinstance(value, tuple) else (value,):
        if isinstance(one, tuple):
            yield from _numbers(one)
        elif not isinstance(one, bool):
            yield one
