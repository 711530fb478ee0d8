"""Reads an architecture's string piece by piece, and says where it stops making sense."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import NoReturn

from fl_lightning.core.errors import ConfigurationError


class Reader:
    """A string and a place in it.

    Args:
        text: the string.
        space: the name of the space that it should be of.

    Example:
        >>> reader = Reader("|skip~0|", "cells")
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
