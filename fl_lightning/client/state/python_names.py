"""Places of values that are read and written one by one, by name.

Some of a Python module's global names, the cells of a closure, attributes in ``__slots__``, flags.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import repeat
from operator import is_
from types import CellType
from typing import Any

from torch import nn

from fl_lightning.client.state.same_values import MISSING, described, same_value


class NamedValues:
    """Values that are read and written one by one, such as some of a module's global names.

    Args:
        paths: where they are.
        read: returns them.
        write: sets the one of a number.
    """

    def __init__(
        self,
        paths: Sequence[str],
        read: Callable[[], list[Any]],
        write: Callable[[int, Any], None],
    ) -> None:
        self.paths, self._read, self._write = paths, read, write
        self.before = read()

    def replace(self, old: Any, new: Any) -> None:
        """Take an object for one that was there."""
        self.before = [new if value is old else value for value in self.before]

    def is_same(self) -> bool:
        """Return whether all are the same objects."""
        return all(map(is_, self._read(), self.before))

    def differences(self) -> list[str]:
        """Return those that differ."""
        trios = zip(self.paths, self.before, self._read(), strict=True)
        return [described(path, b, n) for path, b, n in trios if not same_value(n, b)]

    def put_back(self) -> None:
        """Set what differs."""
        for index, (before, now) in enumerate(zip(self.before, self._read(), strict=True)):
            if now is not before:
                self._write(index, before)


def global_names(of: str, held: dict[str, Any], names: Sequence[str]) -> NamedValues:
    """Return the place of some global names of a Python module."""

    def write(index: int, value: Any) -> None:
        if value is MISSING:
            del held[names[index]]
        else:
            held[names[index]] = value

    paths = [f"global {name} of {of}" for name in names]
    return NamedValues(paths, lambda: [*map(held.get, names, repeat(MISSING))], write)


def closure_cells(paths: Sequence[str], cells: Sequence[CellType]) -> NamedValues:
    """Return the place of variables that a function has from around it."""

    def write(index: int, value: Any) -> None:
        if value is MISSING:
            del cells[index].cell_contents
        else:
            cells[index].cell_contents = value

    return NamedValues(paths, lambda: [*map(_contents, cells)], write)


def _contents(cell: CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # not set yet
        return MISSING


def slot_values(path: str, owner: Any, names: Sequence[str]) -> NamedValues:
    """Return the place of attributes that an object has in ``__slots__``."""

    def write(index: int, value: Any) -> None:
        if value is MISSING:
            object.__delattr__(owner, names[index])
        else:
            object.__setattr__(owner, names[index], value)

    paths = [f"{path}.{name}" for name in names]
    return NamedValues(paths, lambda: [getattr(owner, name, MISSING) for name in names], write)


def trained_flags(paths: Sequence[str], params: Sequence[nn.Parameter]) -> NamedValues:
    """Return the place of parameters' ``requires_grad``."""

    def write(index: int, value: Any) -> None:
        params[index].requires_grad_(value)

    paths = [f"{path}.requires_grad" for path in paths]
    return NamedValues(paths, lambda: [param.requires_grad for param in params], write)
