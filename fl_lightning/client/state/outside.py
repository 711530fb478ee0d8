"""Watches what a module's code reads besides its attributes: globals, closures and class attributes.

A step that changes one does other things the next time, and nothing restores it between clients.
"""

from __future__ import annotations

import copy
import gc
import random
import sys
import types
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from functools import cache, partial
from typing import Any

import numpy as np
from torch import nn

from fl_lightning.client.state.attributes import may_change, same_value

# Packages whose code is not searched.
_LIBRARIES = (sys.stdlib_module_names - {"__main__"}) | {"fl_lightning", "torch", "lightning"}
# The path of a value, for messages, and what reads it.
_Place = tuple[str, Callable[[], Any]]
_GENERATORS: dict[str, Callable[[], Any]] = {
    "Python's random": random.getstate,
    "NumPy's random": np.random.get_state,
}


class Outside:
    """Records globals, closures and class attributes that a module's code reads.

    Values that cannot be copied are not watched, nor the contents of modules and data sets.

    Args:
        module: the module.
        generators: watch the global generators of Python and NumPy as well.

    Example:
        >>> outside = Outside(nn.Linear(1, 1), generators=True)
        >>> _ = random.random()
        >>> outside.changes()
        ["Python's random"]
    """

    def __init__(self, module: nn.Module, *, generators: bool = False) -> None:
        self._met: dict[int, Any] = {}  # kept alive
        self._code: list[Any] = []
        self._memo = {id(part): part for part in (*module.modules(), *module.parameters())}
        for part in module.modules():
            for value in (part, *vars(part).values()):
                self._meet(value)
        self._before: list[tuple[str, Callable[[], Any], Any]] = []
        if generators:
            self._record(_GENERATORS.items())
        for code in self._code:  # code that values lead to is appended
            self._record(_read_by(code))

    def _record(self, places: Iterable[_Place]) -> None:
        for path, read in places:
            value = read()
            self._meet(value)
            with suppress(Exception):  # a user's class may raise anything
                before = copy.deepcopy(value, dict(self._memo)) if may_change(value) else value
                self._before.append((path, read, before))

    def _meet(self, value: Any) -> None:
        """Add the code that a value is or holds, and the code of its classes."""
        if isinstance(value, (property, staticmethod, classmethod)):
            for function in gc.get_referents(value):
                self._meet(function)
        for each in (value, *(value if isinstance(value, type) else type(value)).__mro__):
            if id(each) not in self._met and isinstance(each, (type, types.FunctionType)):
                self._met[id(each)] = each
                self._code.append(each)

    def changes(self) -> list[str]:
        """Return the paths of the values that have changed."""
        found = [path for path, read, before in self._before if not same_value(read(), before)]
        return [*dict.fromkeys(found)]


def _read_by(code: Any) -> Iterator[_Place]:
    """Find what a user's function reads from closures and globals, or the attributes of a user's class."""
    if not _is_users(code.__module__) or hasattr(code, "__members__"):  # no enum
        return
    if isinstance(code, type):
        own = vars(code)
        for name in own:
            if not name.startswith(("__", "_abc_impl")):
                yield f"class {code.__name__}.{name}", partial(own.get, name)
        return
    cells = zip(code.__code__.co_freevars, code.__closure__ or (), strict=True)
    for name, cell in cells:
        yield f"{name} around {code.__qualname__}", partial(getattr, cell, "cell_contents", None)
    yield from _globals_of(code)


def _globals_of(code: types.FunctionType) -> Iterator[_Place]:
    spaces, names = [code.__globals__], _names_in(code.__code__)
    for space in spaces:  # the user's modules are appended
        for name in names & space.keys():
            value = space[name]
            if not isinstance(value, types.ModuleType):
                yield f"global {name} of {space.get('__name__')}", partial(space.get, name)
            elif _is_users(value.__name__) and all(vars(value) is not s for s in spaces):
                spaces.append(vars(value))


def _names_in(code: types.CodeType) -> set[str]:
    inner = (_names_in(each) for each in code.co_consts if isinstance(each, types.CodeType))
    return {*code.co_names}.union(*inner)


@cache
def _is_users(module_name: str | None) -> bool:
    file = getattr(sys.modules.get(module_name or ""), "__file__", None) or ""
    is_library = (module_name or "torch").partition(".")[0] in _LIBRARIES
    return not is_library and "site-packages" not in file and "dist-packages" not in file
