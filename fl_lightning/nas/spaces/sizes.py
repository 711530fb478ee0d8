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
    """Base of the search spaces of layer sizes (width, depth, kernel, …); subclasses define `network`.

    A supernet is a network whose sizes are choices; ``forward(x, architecture=None)`` runs a sub-network.
    """

    @abstractmethod
    def network(self, **shape: int) -> SizedNetwork:
        """Construct the space's network; its sizes are choices, or numbers if a single architecture is built."""

    @cached_property
    def found(self) -> Building:
        """Choices in the network by label, each with the repeated blocks that contain it."""
        with torch.device("meta"), Building() as found:
            self.network(num_classes=10, in_channels=3)
        return found

    @cached_property
    def decisions(self) -> tuple[Decision, ...]:
        """Decisions of the space: one per label of a choice."""
        return tuple(Decision(label, choice.names) for label, choice in self.found.choices.items())

    @cached_property
    def kinds(self) -> tuple[str, ...]:
        """Kind of size that each decision sets, e.g. ``"kernel"``: the last word of its label."""
        return tuple(label.split()[-1] for label in self.found.choices)

    @cached_property
    def most_options(self) -> dict[str, int]:
        """Largest number of options that a decision has, by kind of size."""
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
        """Smallest architecture: the first option of every decision."""
        return self.architecture([0] * len(self.decisions))

    @property
    def largest(self) -> Architecture:
        """Largest architecture: the last option of every decision."""
        return self.architecture([len(decision.options) - 1 for decision in self.decisions])

    def architecture(self, choices: Sequence[int]) -> Architecture:
        """Return the architecture with the given choices; choices without effect are set to 0."""
        checked = Architecture(self, tuple(int(choice) for choice in choices))
        active = self.active(checked.choices)
        pairs = zip(checked.choices, active, strict=True)
        return Architecture(self, tuple(choice if on else 0 for choice, on in pairs))

    @cached_property
    def size(self) -> int:
        """Number of different architectures in the space."""
        return self._count(())

    def _count(self, inside: tuple[tuple[str, int], ...]) -> int:
        """Count different settings of the choices in one block; in the whole network if `inside` is empty."""
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
        """Return the context in which the space builds the network of one architecture."""
        self.check_own(architecture)
        return Building(dict(zip(self.found.choices, architecture.choices, strict=True)))

    def supernet(self, *, num_classes: int, in_channels: int = 3) -> SizedNetwork:
        """Build a new supernet: the largest network of the space, which can run every sub-network."""
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
        """Copy a sub-network out of a supernet: return a plain network with its weights and thus its outputs."""
        part = self.build(architecture, **supernet.shape)
        return subnetwork.copy(supernet, part)

    def held(self, supernet: SizedNetwork, architecture: Architecture) -> dict[str, Tensor]:
        """Return masks of the supernet's coordinates that a sub-network uses, bool by parameter name.

        These are exactly the coordinates that can get a gradient from the sub-network.
        """
        return subnetwork.held(supernet, lambda: self.build(architecture, **supernet.shape))


class SizedNetwork(nn.Sequential):
    """Network of a space of sizes, plain or a supernet: a sequence of named modules.

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
        """Return logits (B, num_classes); a supernet runs the given sub-network, by default the largest."""
        if self.choices:
            chosen = self.space.largest if architecture is None else architecture
            self.space.check_own(chosen)
            for choice, index in zip(self.choices, chosen.choices, strict=True):
                choice.index = index
        return super().forward(x)  # type: ignore[no-any-return,no-untyped-call]

    def get_classifier(self) -> nn.Module:
        """Return the classifier, which is the last layer."""
        return self[-1][-1] if isinstance(self[-1], nn.Sequential) else self[-1]
