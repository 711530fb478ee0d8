"""Spaces whose decisions are sizes: how wide, how deep, which kernel.

A network is made of parts (stages). A part has sizes of its own, a depth, and sizes for each of its
blocks. What is decided for blocks beyond the depth has no effect: those choices are 0, so that equal
networks are equal architectures, and so that `size` counts each once.
Strings are told in `fl_lightning.nas.spaces.parts`.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Iterator, Sequence
from functools import cached_property
from itertools import product

from torch import Tensor, nn

from fl_lightning.core.errors import ConfigurationError
from fl_lightning.nas.cost.count import Cost
from fl_lightning.nas.elastic import subnetwork
from fl_lightning.nas.spaces.parts import (
    Part,
    PartSizes,
    Size,
    depths_of,
    most_blocks,
    part_text,
    read_part,
)
from fl_lightning.nas.spaces.reader import Reader
from fl_lightning.nas.spaces.space import MOST_ENUMERATED, Architecture, Decision, SearchSpace


class SizeSpace(SearchSpace):
    """A space of sizes.

    A member writes `parts`, `network` and `cost`; the rest follows. A supernet is the network of the
    largest architecture with elastic layers; its ``forward(x, architecture=None)`` runs a part of it.
    """

    @property
    @abstractmethod
    def parts(self) -> tuple[Part, ...]:
        """The stages."""

    @abstractmethod
    def network(
        self, architecture: Architecture, *, num_classes: int, in_channels: int, elastic: bool
    ) -> nn.Module:
        """Return the network of an architecture, of plain layers or of elastic ones."""

    @abstractmethod
    def cost(
        self,
        architecture: Architecture,
        *,
        side: int = 32,
        in_channels: int = 3,
        num_classes: int = 10,
    ) -> Cost:
        """Return what one image costs the network of an architecture, by formulas, exactly.

        Args:
            architecture: of this space.
            side: of the images, in pixels.
            in_channels: of the images.
            num_classes: of the classifier.
        """

    @cached_property
    def named_sizes(self) -> tuple[tuple[str, Size], ...]:
        """What there is to choose, in the order of the decisions."""
        return tuple(named for part in self.parts for named in part.sizes)

    @cached_property
    def decisions(self) -> tuple[Decision, ...]:
        """A decision for every size."""
        return tuple(
            Decision(name, tuple(f"{option:g}" for option in size.options))
            for name, size in self.named_sizes
        )

    @property
    def smallest(self) -> Architecture:
        """The first option of everything."""
        return self.architecture([0] * len(self.decisions))

    @property
    def largest(self) -> Architecture:
        """The last option of everything."""
        return self.architecture([len(decision.options) - 1 for decision in self.decisions])

    @cached_property
    def size(self) -> int:
        """How many different networks there are."""
        return math.prod(_count(part) for part in self.parts)

    def architecture(self, choices: Sequence[int]) -> Architecture:
        """Return the architecture of these choices; those without effect become 0."""
        checked = Architecture(self, tuple(int(choice) for choice in choices))
        active = self.active(checked.choices)
        pairs = zip(checked.choices, active, strict=True)
        return Architecture(self, tuple(choice if on else 0 for choice, on in pairs))

    def active(self, choices: Sequence[int]) -> tuple[bool, ...]:
        """Return which choices have an effect: those of blocks that there are."""
        active: list[bool] = []
        for part in self.parts:
            depth = int(part.depth.options[choices[len(active) + len(part.own)]])
            last = len(active) + len(part.own) + 1 + depth * len(part.block)
            end = len(active) + len(part.sizes)
            active += [index < last for index in range(len(active), end)]
        return tuple(active)

    def sizes(self, architecture: Architecture) -> tuple[PartSizes, ...]:
        """Return the sizes of every stage.

        Raises:
            ConfigurationError: if the architecture is of another space.
        """
        if architecture.space is not self and architecture.space != self:
            raise ConfigurationError(
                f"{self.name} cannot use an architecture of another space ({architecture.space.name})"
            )
        return self._sizes(architecture.choices)

    def _sizes(self, choices: Sequence[int]) -> tuple[PartSizes, ...]:
        taken = (
            size.options[choice]
            for (_, size), choice in zip(self.named_sizes, choices, strict=True)
        )
        stages = []
        for part in self.parts:
            own = tuple(next(taken) for _ in part.own)
            depth = int(next(taken))
            blocks = [tuple(next(taken) for _ in part.block) for _ in range(most_blocks(part))]
            stages.append(PartSizes(own, tuple(blocks[:depth])))
        return tuple(stages)

    def text(self, choices: Sequence[int]) -> str:
        """Return the string, e.g. ``k7e6-k3e4|k5e3-k5e3-k3e6``."""
        pairs = zip(self.parts, self._sizes(choices), strict=True)
        return "|".join(part_text(part, sizes) for part, sizes in pairs)

    def parse(self, text: str) -> Architecture:
        """Return the architecture of a string."""
        reader = Reader(text.strip(), self.name)
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

    def supernet(self, *, num_classes: int, in_channels: int = 3) -> nn.Module:
        """Return the largest network; its ``forward(x, architecture=None)`` runs any of the space."""
        return self.network(
            self.largest, num_classes=num_classes, in_channels=in_channels, elastic=True
        )

    def build(
        self, architecture: Architecture, *, num_classes: int, in_channels: int = 3
    ) -> nn.Module:
        """Return the network of an architecture, of PyTorch's layers, freshly drawn."""
        self.sizes(architecture)  # refuses one of another space
        return self.network(
            architecture, num_classes=num_classes, in_channels=in_channels, elastic=False
        )

    def extract(self, supernet: nn.Module, architecture: Architecture) -> nn.Module:
        """Return the network of an architecture with the supernet's weights: the same outputs."""
        part = self.build(architecture, **_shape(supernet))
        return subnetwork.copy(supernet, part)

    def held(self, supernet: nn.Module, architecture: Architecture) -> dict[str, Tensor]:
        """Return which coordinates of the supernet's parameters a sub-network holds.

        Returns:
            A mask for every parameter by name, bool, of the parameter's shape. All coordinates that
            a step of the sub-network can move are in it, and no other.
        """
        return subnetwork.held(supernet, lambda: self.build(architecture, **_shape(supernet)))


def _shape(supernet: nn.Module) -> dict[str, int]:
    return {"num_classes": supernet.num_classes, "in_channels": supernet.in_channels}  # type: ignore[dict-item]


def _count(part: Part) -> int:
    own = math.prod(len(size.options) for size in part.own)
    block = math.prod(len(size.options) for size in part.block)
    return own * sum(int(block**depth) for depth in depths_of(part))


def _choices(part: Part) -> Iterator[tuple[int, ...]]:
    own = [range(len(size.options)) for size in part.own]
    block = [range(len(size.options)) for size in part.block]
    for number, depth in enumerate(depths_of(part)):
        idle = (0,) * ((most_blocks(part) - depth) * len(block))
        for choices in product(*own, [number], *(block * depth)):
            yield (*choices, *idle)
