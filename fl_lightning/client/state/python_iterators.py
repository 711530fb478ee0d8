"""Iterators that a module keeps, such as ``itertools.count()``: where they were, and one like it.

An iterator cannot be wound back. It is taken apart as for pickling, and another one made from the
parts takes its place. Generators cannot be taken apart: that one was advanced is noticed, no more.
"""

from __future__ import annotations

import ast
import itertools
import re
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import FrameType, GeneratorType
from typing import Any, Protocol

from fl_lightning.client.state.same_values import same_value
from fl_lightning.core.errors import ConfigurationError

_COUNT = re.compile(r"count\((.*)\)")


class Holder(Protocol):
    """A place that an iterator is in."""

    def replace(self, old: Any, new: Any) -> None:
        """Take an object for one that was there."""

    def put_back(self) -> None:
        """Have it hold what it held."""


@dataclass(frozen=True)
class _Parts:
    make: Callable[..., Any]
    arguments: tuple[Any, ...]
    state: Any

    def same(self, other: _Parts) -> bool:
        if self.make is not other.make or len(self.arguments) != len(other.arguments):
            return False
        pairs = zip((*self.arguments, self.state), (*other.arguments, other.state), strict=True)
        return all(_same_part(one, two) for one, two in pairs)

    def put_together(self) -> Any:
        made = self.make(*map(_put_together, self.arguments))
        if self.state is not None:
            made.__setstate__(_put_together(self.state))
        return made


def _same_part(one: Any, two: Any) -> bool:
    if isinstance(one, _Parts) and isinstance(two, _Parts):
        return one.same(two)
    if isinstance(one, tuple) and isinstance(two, tuple) and len(one) == len(two):
        return all(map(_same_part, one, two))
    return same_value(one, two)


def _put_together(part: Any) -> Any:
    if isinstance(part, _Parts):
        return part.put_together()
    if isinstance(part, tuple):
        return tuple(map(_put_together, part))
    return [*part] if type(part) is list else part


def _taken_apart(part: Any, *, is_state: bool = False) -> Any:
    if is_iterator(part):
        if isinstance(part, itertools.count):  # which Python 3.14 no longer takes apart
            written = _COUNT.fullmatch(repr(part))
            if written is None:
                raise TypeError
            return _Parts(itertools.count, ast.literal_eval(f"({written[1]},)"), None)
        reduced: Any = part.__reduce__()
        make, arguments, *rest = reduced
        state = _taken_apart(rest[0], is_state=True) if rest else None
        return _Parts(make, tuple(map(_taken_apart, arguments)), state)
    if is_state and type(part) is list:  # one that the iterator fills
        return [*part]
    if type(part) is tuple:
        return tuple(_taken_apart(item, is_state=is_state) for item in part)
    return part


def is_iterator(value: Any) -> bool:
    """Return whether a value is one of Python's own iterators."""
    module = type(value).__module__
    return isinstance(value, Iterator) and module in ("builtins", "itertools", "collections")


class IteratorValue:
    """Where an iterator is.

    Args:
        path: where it is kept.
        iterator: the iterator.

    Attributes:
        holders: the places that it is in.
    """

    def __init__(self, path: str, iterator: Any) -> None:
        self.path, self.holders = path, list[Holder]()
        self._iterator, self._before = iterator, self._parts(iterator)

    def _parts(self, iterator: Any) -> Any:
        if isinstance(iterator, GeneratorType):
            frame: FrameType | None = iterator.gi_frame
            return None if frame is None else (frame.f_lasti, dict(frame.f_locals))
        with warnings.catch_warnings():  # Python 3.12 and 3.13 say that 3.14 will not
            warnings.simplefilter("ignore", DeprecationWarning)
            try:
                return _taken_apart(iterator)
            except (TypeError, ValueError):  # one that cannot be taken apart
                return None

    def is_same(self) -> bool:
        """Return whether it has not gone on, as far as can be seen."""
        return _same_part(self._parts(self._iterator), self._before)

    def differences(self) -> list[str]:
        """Return the iterator, if it has gone on."""
        return [] if self.is_same() else [self.path]

    def put_back(self) -> None:
        """Put another one that is where it was into its places.

        Raises:
            ConfigurationError: if it is a generator.
        """
        if self.is_same():
            return
        if not isinstance(self._before, _Parts):
            raise ConfigurationError(
                f"{self.path} is a generator that the training step advances, and cannot be wound "
                "back for the next client: keep a list and a position on the module instead"
            )
        new = self._before.put_together()
        for holder in self.holders:
            holder.replace(self._iterator, new)
            holder.put_back()
        self._iterator = new
