"""Spaces whose decisions are sizes: widths, depths, kernels.

A space of sizes is a network whose constructor makes choices (`ValueChoice`). Constructed with all options it is
the supernet; with the options of one architecture it is a plain network. Choices in blocks beyond the depth have
no effect and are always 0, so that equal networks are equal architectures.

Built-in spaces are in `stages`, modules of yours in `own`.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property

import torch
from torch import Tensor, nn
from typing_extensions import override

from fl_lightning.nas.spaces import subnetwork
from fl_lightning.nas.spaces.choices import Building, ValueChoice
from fl_lightning.nas.spaces.space import Architecture, Decision, SearchSpace


class SizeSpace(SearchSpace):
    """Base of the spaces of sizes; subclasses define `network`.

    A supernet is a network whose sizes are choices; ``forward(x, architecture=None)`` runs a sub-network.
    """

    @abstractmethod
    def network(self, **shape: int) -> SizedNetwork:
        """Construct a network (num_classes, in_channels) with the choices of the active `Building`."""

    @cached_property
    def found(self) -> Building:
        """Choices of the network, and the repeated blocks that contain each."""
        with torch.device("meta"), Building() as found:
            self.network(num_classes=10, in_channels=3)
        return found

    @cached_property
    def decisions(self) -> tuple[Decision, ...]:
        """One decision per label of a choice."""
        return tuple(Decision(label, choice.names) for label, choice in self.found.choices.items())

    @cached_property
    def kinds(self) -> tuple[str, ...]:
        """Kind of size of every decision, e.g. ``"kernel"``: the last word of the label."""
        return tuple(label.split()[-1] for label in self.found.choices)

    @cached_property
    def most_options(self) -> dict[str, int]:
        """Largest number of options of a decision, by kind of size."""
        most: dict[str, int] = {}
        for kind, decision in zip(self.kinds, self.decisions, strict=True):
            most[kind] = max(len(decision.options), most.get(kind, 0))
        return most

    @override
    def active(self, choices: Sequence[int]) -> tuple[bool, ...]:
        known = self.found.choices
        depths = {
            label: choice.options[number]
            for (label, choice), number in zip(known.items(), choices, strict=True)
        }
        needs = self.found.needs.values()
        return tuple(all(depths[depth] > block for depth, block in need) for need in needs)

    @property
    def smallest(self) -> Architecture:
        """Architecture with the first option of every decision."""
        return self.architecture([0] * len(self.decisions))

    @property
    def largest(self) -> Architecture:
        """Architecture with the last option of every decision."""
        return self.architecture([len(decision.options) - 1 for decision in self.decisions])

    def architecture(self, choices: Sequence[int]) -> Architecture:
        """Return the architecture with given choices, of which those without effect become 0."""
        checked = Architecture(self, tuple(int(choice) for choice in choices))
        active = self.active(checked.choices)
        pairs = zip(checked.choices, active, strict=True)
        return Architecture(self, tuple(choice if on else 0 for choice, on in pairs))

    @cached_property
    def size(self) -> int:
        """Number of different architectures."""
        return self._count(())

    def _count(self, inside: tuple[tuple[str, int], ...]) -> int:
        """Return the number of different choices in a block, or in the whole network if `inside` is empty."""
        found, counts = self.found, []
        depths = {depth for need in found.needs.values() for depth, _ in need}
        for label in (label for label, need in found.needs.items() if need == inside):
            options = found.choices[label].options
            if label not in depths:
                counts.append(len(options))
                continue
            of_block = [self._count((*inside, (label, n))) for n in range(int(options[-1]))]
            counts.append(sum(math.prod(of_block[: int(depth)]) for depth in options))
        return math.prod(counts)

    def enumerate(self) -> Iterator[Architecture]:
        """Yield all different architectures; raises ConfigurationError if there are more than a million."""
        return iter(dict.fromkeys(super().enumerate()))

    def chosen(self, architecture: Architecture) -> Building:
        """Return the `Building` of the network of one architecture."""
        self.check_own(architecture)
        return Building(dict(zip(self.found.choices, architecture.choices, strict=True)))

    def supernet(self, *, num_classes: int, in_channels: int = 3) -> SizedNetwork:
        """Return a new supernet of the space."""
        with Building() as found:
            network = self.network(num_classes=num_classes, in_channels=in_channels)
        network.choices = list(found.choices.values())
        return network

    @override
    def build(  # type: ignore[override]  # other options are unknown here
        self, architecture: Architecture, *, num_classes: int, in_channels: int = 3
    ) -> SizedNetwork:
        with self.chosen(architecture):
            return self.network(num_classes=num_classes, in_channels=in_channels)

    def extract(self, supernet: SizedNetwork, architecture: Architecture) -> nn.Module:
        """Return a plain network with the weights, and so the outputs, of a sub-network."""
        part = self.build(architecture, **supernet.shape)
        return subnetwork.copy(supernet, part)

    def held(self, supernet: SizedNetwork, architecture: Architecture) -> dict[str, Tensor]:
        """Return the mask of the coordinates that a sub-network uses, bool by parameter name.

        These are exactly the coordinates that can get a gradient from the sub-network.
        """
        return subnetwork.held(supernet, lambda: self.build(architecture, **supernet.shape))


class SizedNetwork(nn.Sequential):
    """Network of a space of sizes: named modules that run one after the other.

    Args:
        space: space of the network.
        shape: num_classes and in_channels.
        parts: modules by name, the classifier last.

    Attributes:
        choices: choices of the layers, in the order of the space's decisions; empty in a plain network.
    """

    def __init__(
        self, space: SizeSpace, shape: Mapping[str, int], parts: Mapping[str, nn.Module]
    ) -> None:
        super().__init__(OrderedDict(parts))
        self.space, self.shape = space, shape
        self.choices: list[ValueChoice] = []

    def forward(self, x: Tensor, architecture: Architecture | None = None) -> Tensor:
        """Return logits (B, num_classes); a supernet runs a sub-network, the largest one if None."""
        if self.choices:
            chosen = self.space.largest if architecture is None else architecture
            self.space.check_own(chosen)
            for choice, index in zip(self.choices, chosen.choices, strict=True):
                choice.index = index
        return super().forward(x)  # type: ignore[no-any-return,no-untyped-call]

    def get_classifier(self) -> nn.Module:
        """Return the last layer."""
        return self[-1][-1] if isinstance(self[-1], nn.Sequential) else self[-1]
