"""A space of architectures: decisions, for each of them some options, and how their strings are read.

An architecture is one option for every decision. It is a value: two of the same choices are equal,
its string tells them all, and the space's `parse` reads it back, piece by piece; what it cannot read is refused
with the place where the string stops making sense.
"""

from __future__ import annotations

import math
import re
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from typing import ClassVar, NoReturn

import torch

from fl_lightning.core.errors import ConfigurationError

# Architectures that `enumerate` gives: beyond, a walk over all of them would not end.
MOST_ENUMERATED = 1_000_000


@dataclass(frozen=True)
class Decision:
    """A decision and its options, in the order of their numbers.

    Attributes:
        name: of what is decided, e.g. ``"0→1"`` for an edge or ``"stage 2 depth"``.
        options: their names, at least one.
    """

    name: str
    options: tuple[str, ...]


@dataclass(frozen=True)
class Architecture:
    """A member of a space; ``str`` of it is its canonical string.

    Attributes:
        space: it is a member of.
        choices: the number of the option taken at every decision.

    Raises:
        ConfigurationError: if there is not one option of the space for each of its decisions.
    """

    space: SearchSpace
    choices: tuple[int, ...]

    def __post_init__(self) -> None:
        decisions = self.space.decisions
        if len(self.choices) != len(decisions):
            raise ConfigurationError(
                f"an architecture of {self.space.name} has {len(decisions)} choices, "
                f"got {len(self.choices)}"
            )
        for choice, decision in zip(self.choices, decisions, strict=True):
            if not 0 <= choice < len(decision.options):
                raise ConfigurationError(
                    f"{decision.name} has the options 0 to {len(decision.options) - 1}, got {choice}"
                )

    @property
    def options(self) -> tuple[str, ...]:
        """The names of the options taken."""
        pairs = zip(self.choices, self.space.decisions, strict=True)
        return tuple(decision.options[choice] for choice, decision in pairs)

    def __str__(self) -> str:
        return self.space.text(self.choices)


class SearchSpace(ABC):
    """Architectures to choose from; a frozen dataclass, so that equal spaces are equal.

    A member writes `decisions`, `text` and `parse`; the rest follows.
    """

    name: ClassVar[str]

    @property
    @abstractmethod
    def decisions(self) -> tuple[Decision, ...]:
        """Decisions, in the order of an architecture's choices."""

    @abstractmethod
    def text(self, choices: Sequence[int]) -> str:
        """Return the canonical string of these choices."""

    @abstractmethod
    def parse(self, text: str) -> Architecture:
        """Return the architecture that a string tells.

        Raises:
            ConfigurationError: if it tells none; the message says where it stops making sense.
        """

    def architecture(self, choices: Sequence[int]) -> Architecture:
        """Return the architecture of these choices."""
        return Architecture(self, tuple(int(choice) for choice in choices))

    @property
    def size(self) -> int:
        """How many architectures there are; different ones may compute the same."""
        return math.prod(len(decision.options) for decision in self.decisions)

    def sample(self, generator: torch.Generator) -> Architecture:
        """Return an architecture of which every choice is drawn uniformly."""
        return self.architecture(
            [
                int(torch.randint(len(decision.options), (), generator=generator))
                for decision in self.decisions
            ]
        )

    def enumerate(self) -> Iterator[Architecture]:
        """Yield all architectures, the last decision's options first.

        Raises:
            ConfigurationError: if there are more than a million.
        """
        size = self.size
        if size > MOST_ENUMERATED:
            raise ConfigurationError(
                f"{self.name} has {size:.3g} architectures: too many to go through one by one "
                f"(at most {MOST_ENUMERATED:,}). Sample, or search with evolution"
            )
        options = (range(len(decision.options)) for decision in self.decisions)
        return (self.architecture(choices) for choices in product(*options))


class ArchitectureReader:
    """A string and a place in it.

    Args:
        text: the string.
        space: the name of the space that it should be of.

    Example:
        >>> reader = ArchitectureReader("|skip~0|", "cells")
        >>> reader.expect("|")
        >>> reader.word(["conv", "pool"], "operation")
        Traceback (most recent call last):
        ...
        fl_lightning.core.errors.ConfigurationError: not an architecture of cells: after '|' character 2 \
is 'skip'; expected an operation: conv, pool
    """

    def __init__(self, text: str, space: str) -> None:
        self.text = text
        self.space = space
        self.place = 0

    def expect(self, piece: str) -> None:
        """Pass a piece.

        Raises:
            ConfigurationError: if something else stands there.
        """
        if not self.text.startswith(piece, self.place):
            self.refuse(f"expected {piece!r}")
        self.place += len(piece)

    def word(self, words: Sequence[str], what: str) -> int:
        """Pass one of these words; return its number.

        Raises:
            ConfigurationError: if there is none of them.
        """
        found = self._match(r"\w*")
        if found not in words:
            article = "an" if what[0] in "aeiou" else "a"
            self.refuse(f"expected {article} {what}: {', '.join(words)}")
        self.place += len(found)
        return words.index(found)

    def number(self, allowed: Sequence[int], what: str) -> int:
        """Pass one of these numbers; return it.

        Raises:
            ConfigurationError: if there is none of them.
        """
        found = self._match(r"\d*")
        if not found or int(found) not in allowed:
            self.refuse(f"expected {what}: {', '.join(map(str, allowed))}")
        self.place += len(found)
        return int(found)

    def end(self) -> None:
        """Refuse what follows.

        Raises:
            ConfigurationError: if anything does.
        """
        if self.place < len(self.text):
            self.refuse("expected its end")

    def refuse(self, reason: str) -> NoReturn:
        """Say what is wrong, and where.

        Raises:
            ConfigurationError: always.
        """
        found = self._match(r"\w+|.")
        where = f"character {self.place + 1} is {found!r}" if found else "it ends there"
        before = self.text[: self.place]
        passed = f"after {before[-40:]!r} " if before else ""
        raise ConfigurationError(f"not an architecture of {self.space}: {passed}{where}; {reason}")

    def _match(self, pattern: str) -> str:
        match = re.compile(pattern, re.DOTALL | re.ASCII).match(self.text, self.place)
        return match[0] if match else ""
