"""Base of the search spaces: decisions with options, architectures, and a parser for their strings.

An architecture has one option for every decision. Its string contains all of them, and `parse` of the space
reads it; errors name the position in the string.
"""

from __future__ import annotations

import math
import re
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import product
from typing import Any, ClassVar, NoReturn, final

import torch
from torch import Tensor, nn

from fl_lightning.core.errors import ConfigurationError, check_range
from fl_lightning.nas.cost.count import Cost, count

# largest number of architectures for `enumerate`: more would take too long
MOST_ENUMERATED = 1_000_000


@dataclass(frozen=True)
class Decision:
    """One decision of a search space: its name and its options.

    Attributes:
        name: name of the decision, e.g. ``"0→1"`` for an edge or ``"stage 2 depth"``.
        options: names of the options, at least one.
    """

    name: str
    options: tuple[str, ...]


@dataclass(frozen=True)
class Architecture:
    """One architecture of a search space; ``str(architecture)`` is a string that `parse` reads back.

    Attributes:
        space: space of the architecture.
        choices: index of the chosen option of every decision.

    Raises:
        ConfigurationError: if the number of choices, or an index, does not fit the space.
    """

    space: SearchSpace
    choices: tuple[int, ...]

    def __post_init__(self) -> None:
        decisions = self.space.decisions
        if len(self.choices) != len(decisions):
            raise ConfigurationError(
                f"an architecture of {self.space.name} has {len(decisions)} choices, one per decision, "
                f"got {len(self.choices)}"
            )
        for choice, decision in zip(self.choices, decisions, strict=True):
            if not 0 <= choice < len(decision.options):
                raise ConfigurationError(
                    f"{decision.name} has the options 0 to {len(decision.options) - 1}, got the index {choice}"
                )

    @property
    def options(self) -> tuple[str, ...]:
        """Names of the chosen options, one per decision."""
        pairs = zip(self.choices, self.space.decisions, strict=True)
        return tuple(decision.options[choice] for choice, decision in pairs)

    def __str__(self) -> str:
        return self.space.text(self.choices)


class SearchSpace(ABC):
    """Base of all search spaces; subclasses are frozen dataclasses and define `decisions`."""

    name: ClassVar[str]

    @property
    @abstractmethod
    def decisions(self) -> tuple[Decision, ...]:
        """Decisions of the space, in the order of `Architecture.choices`."""

    @property
    def separators(self) -> tuple[str, ...]:
        """Text around the options in an architecture string; by default that of ``name=option|…``."""
        names = [f"{decision.name}=" for decision in self.decisions]
        return (*names[:1], *(f"|{name}" for name in names[1:]), "")

    def text(self, choices: Sequence[int]) -> str:
        """Return the architecture string for given choices."""
        pairs = zip(self.decisions, choices, strict=True)
        options = [*(decision.options[choice] for decision, choice in pairs), ""]
        return "".join(map("".join, zip(self.separators, options, strict=True)))

    def parse(self, text: str) -> Architecture:
        """Parse an architecture string of this space.

        Raises:
            ConfigurationError: if the string is invalid; the message names the position.
        """
        reader, choices = ArchitectureReader(text.strip(), self.name), []
        *separators, last = self.separators
        for separator, decision in zip(separators, self.decisions, strict=True):
            reader.expect(separator)
            choices.append(reader.option(decision.options, f"option of {decision.name}"))
        reader.expect(last)
        reader.end()
        return self.architecture(choices)

    def architecture(self, choices: Sequence[int]) -> Architecture:
        """Return the architecture with the given choices: one option's index per decision."""
        return Architecture(self, tuple(int(choice) for choice in choices))

    def active(self, choices: Sequence[int]) -> tuple[bool, ...]:
        """Return, for each choice, whether it has an effect on the network; by default all do."""
        return (True,) * len(choices)

    @property
    def size(self) -> int:
        """Number of architectures in the space; some may compute the same function."""
        return math.prod(len(decision.options) for decision in self.decisions)

    def sample(self, generator: torch.Generator) -> Architecture:
        """Draw a random architecture: each decision draws its option uniformly."""
        return self.architecture(
            [
                int(torch.randint(len(decision.options), (), generator=generator))
                for decision in self.decisions
            ]
        )

    def enumerate(self) -> Iterator[Architecture]:
        """Yield all architectures of the space; the last decision varies fastest.

        Raises:
            ConfigurationError: if there are more than a million.
        """
        size = self.size
        if size > MOST_ENUMERATED:
            raise ConfigurationError(
                f"{self.name} has {size:.3g} architectures, too many to enumerate (at most {MOST_ENUMERATED:,}): draw "
                "some with `sample`, or search with --strategy evolution"
            )
        options = (range(len(decision.options)) for decision in self.decisions)
        return (self.architecture(choices) for choices in product(*options))

    def check_own(self, architecture: Architecture) -> None:
        """Raise ConfigurationError if an architecture belongs to another space."""
        if architecture.space is not self and architecture.space != self:
            raise ConfigurationError(
                f"{self.name} cannot use an architecture of another space ({architecture.space.name}) or of other "
                f"settings of the space: {architecture}"
            )

    @abstractmethod
    def build(self, architecture: Architecture, **shape: Any) -> nn.Module:
        """Build a new network of one architecture, from images to logits.

        Args:
            architecture: architecture of this space.
            shape: num_classes, and in_channels (3 by default); in a space of cells also channels (of the
                first cells) and cells (their number), with the defaults of the space.
        """

    @final
    def cost(self, architecture: Architecture, *, side: int = 32, **shape: int) -> Cost:
        """Return the exact cost of an architecture's network for one image.

        Args:
            architecture: architecture of this space.
            side: height and width of the images, in pixels.
            shape: options of `build`; by default 3 in_channels and 10 num_classes.

        Example:
            >>> from fl_lightning.nas.spaces.nas_bench_201 import NASBench201
            >>> space = NASBench201()
            >>> space.cost(space.architecture([3] * 6)).flops
            220119690
        """
        shape = {"in_channels": 3, "num_classes": 10, **shape}
        return Networks(self, side, shape).cost(architecture)

    def counted(self, architecture: Architecture, networks: Networks) -> Cost:
        """Count a network's cost on the meta device; subclasses may add up costs of known parts, which is faster."""
        return _counted(architecture, networks)


@lru_cache(maxsize=10_000)
def _counted(architecture: Architecture, networks: Networks) -> Cost:
    with torch.device("meta"):
        return count(networks.build(architecture), networks.images(1))


@dataclass(frozen=True)
class Networks:
    """All networks of a search space, for a given image size and number of classes.

    Attributes:
        space: space of the networks.
        side: height and width of the images, in pixels.
        shape: arguments of the space's `build`: num_classes, in_channels, of cells also channels and cells.
    """

    space: SearchSpace
    side: int
    shape: Mapping[str, int]

    def __hash__(self) -> int:
        return hash((self.space, self.side, *self.shape.items()))

    def build(self, architecture: Architecture) -> nn.Module:
        """Build a new network of one architecture."""
        return self.space.build(architecture, **self.shape)

    def images(self, count: int) -> Tensor:
        """Return a batch of images with uninitialised pixels, on PyTorch's current device."""
        return torch.empty(count, self.shape["in_channels"], self.side, self.side)

    def cost(self, architecture: Architecture) -> Cost:
        """Return the exact cost of an architecture's network for one image.

        Raises:
            ConfigurationError: if the architecture is of another space, or a number is below 1.
        """
        self.space.check_own(architecture)
        for name, number in {"side": self.side, **self.shape}.items():
            check_range(name, number, "at least 1")
        return self.space.counted(architecture, self)


class ArchitectureReader:
    """Parser of architecture strings; its error messages name the position in the string.

    Example:
        >>> reader = ArchitectureReader("|skip~0|", "cells")
        >>> reader.expect("|")
        >>> reader.option(["conv", "pool"], "operation")
        Traceback (most recent call last):
        ...
        fl_lightning.core.errors.ConfigurationError: not an architecture of cells: after '|' character 2 \
is 'skip'; expected the operation: conv, pool
    """

    def __init__(self, text: str, space: str) -> None:
        self.text = text
        self.space = space
        self.place = 0

    def expect(self, piece: str) -> None:
        """Read an expected piece of text; raise ConfigurationError if the string does not continue with it."""
        if not self.follows(piece):
            self.refuse(f"expected {piece!r}")

    def follows(self, piece: str) -> bool:
        """Read a piece of text if the string continues with it; return whether it did."""
        is_next = self.text.startswith(piece, self.place)
        self.place += len(piece) if is_next else 0
        return is_next

    def option(self, options: Sequence[str], what: str) -> int:
        """Read an option's name, the longest that matches (3.5 rather than 3), and return the option's index.

        Raises:
            ConfigurationError: if the string has none of the options here; the message names `what`.
        """
        for option in sorted(options, key=len, reverse=True):
            if self.follows(option):
                return options.index(option)
        return self.refuse(f"expected the {what}: {', '.join(options)}")

    def end(self) -> None:
        """Raise ConfigurationError unless the whole string has been read."""
        if self.place < len(self.text):
            self.refuse("expected its end")

    def refuse(self, reason: str) -> NoReturn:
        """Raise ConfigurationError with a reason and the current position in the string."""
        found = re.compile(r"\w+|.", re.DOTALL | re.ASCII).match(self.text, self.place)
        where = f"character {self.place + 1} is {found[0]!r}" if found else "it ends there"
        before = self.text[: self.place]
        passed = f"after {before[-40:]!r} " if before else ""
        raise ConfigurationError(f"not an architecture of {self.space}: {passed}{where}; {reason}")
