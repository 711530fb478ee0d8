"""Places where Python keeps something: what was there, whether it still is, and putting it back.

A place knows one object (a dict, a list, a tensor, a generator of random numbers) and a copy of what
it held. Copies are shallow: what is inside has a place of its own. Putting back changes the object
itself, so that whoever else holds it sees the same.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Collection, Sequence
from itertools import repeat
from operator import is_
from types import CellType
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor, nn

from fl_lightning.client.same_values import (
    MISSING,
    described,
    same_array,
    same_tensor,
    same_value,
)


class Place(Protocol):
    """One object whose contents may change."""

    def is_same(self) -> bool:
        """Return quickly whether nothing has changed; False may also mean: look closer."""

    def differences(self) -> list[str]:
        """Return in words what has changed."""

    def put_back(self) -> None:
        """Have the object hold what it held."""


class Entries:
    """The entries of a dict, of an object's attributes or of a class's.

    Args:
        path: where it is, e.g. ``self.counts``.
        held: the dict, or the ``__dict__``.
        ignore: keys that are somebody else's.
        owner: the class, if it is a class's.
        are_attributes: whether the keys are names that follow a dot.
    """

    def __init__(
        self,
        path: str,
        held: Any,
        *,
        ignore: Collection[str] = (),
        owner: type | None = None,
        are_attributes: bool = False,
    ) -> None:
        self.path, self._held, self._ignore, self._owner = path, held, ignore, owner
        self._are_attributes = are_attributes or owner is not None
        self._keys, self._values = [*held], [*held.values()]
        self.before = {key: value for key, value in held.items() if not self._is_ignored(key)}

    def _is_ignored(self, key: Any) -> bool:
        if self._owner is not None and isinstance(key, str):  # Python's own, ABC's cache
            return key.startswith("__") or key == "_abc_impl"
        return isinstance(key, str) and key in self._ignore

    def path_of(self, key: Any) -> str:
        """Return where one of the entries is."""
        return f"{self.path}.{key}" if self._are_attributes else f"{self.path}[{key!r}]"

    def replace(self, old: Any, new: Any) -> None:
        """Take an object for one that was there."""
        self.before = {k: new if v is old else v for k, v in self.before.items()}
        self._values = [new if value is old else value for value in self._values]

    def is_same(self) -> bool:
        """Return whether all entries are the same objects."""
        held = self._held
        same = len(held) == len(self._values) and all(map(is_, held.values(), self._values))
        return same and [*held] == self._keys

    def _present(self) -> dict[Any, Any]:
        return {key: value for key, value in self._held.items() if not self._is_ignored(key)}

    def differences(self) -> list[str]:
        """Return every entry that differs; of a dict that grew or shrank, its sizes."""
        now, before = self._present(), self.before
        if not self._are_attributes and len(now) != len(before):
            return [described(self.path, before, now)]
        keys = [*before, *(key for key in now if key not in before)]
        pairs = [(key, before.get(key, MISSING), now.get(key, MISSING)) for key in keys]
        found = [described(self.path_of(k), b, n) for k, b, n in pairs if not same_value(n, b)]
        if not found and not self._are_attributes and [*now] != [*before]:
            return [f"{self.path} (order)"]
        return found

    def put_back(self) -> None:
        """Set what differs and delete what is new."""
        now, before = self._present(), self.before
        for key in now.keys() - before.keys():
            self._delete(key)
        for key, value in before.items():
            if now.get(key, MISSING) is not value:
                self._set(key, value)
        if not self._are_attributes and [*self._held] != [*before]:
            self._reorder()

    def _reorder(self) -> None:
        for key, value in self.before.items():
            self._delete(key)
            self._set(key, value)

    def _set(self, key: Any, value: Any) -> None:
        if self._owner is not None:
            type.__setattr__(self._owner, key, value)
        else:
            _dict_type(self._held).__setitem__(self._held, key, value)

    def _delete(self, key: Any) -> None:
        if self._owner is not None:
            type.__delattr__(self._owner, key)
        else:
            _dict_type(self._held).__delitem__(self._held, key)

    @property
    def may_grow(self) -> bool:
        """Whether `growth` may find something."""
        return not self._are_attributes

    def growth(self) -> dict[Any, list[Any]] | None:
        """Return the lists that a dict got under new keys, if that is all that changed in it."""
        now, before = self._held, self.before
        if len(now) <= len(before):
            return None
        if any(now.get(key, MISSING) is not value for key, value in before.items()):
            return None
        new = {key: value for key, value in now.items() if key not in before}
        return new if all(type(value) is list for value in new.values()) else None

    def grow(self, growth: dict[Any, list[Any]]) -> None:
        """Add what `growth` returned to what is there now."""
        for key, items in growth.items():
            present = self._held.get(key)
            self._set(key, [*items] if present is None else [*present, *items])


def _dict_type(held: Any) -> Any:
    # not the class's own methods, which may do more than to set an entry
    return OrderedDict if isinstance(held, OrderedDict) else dict


class Items:
    """The items of a list or a deque."""

    def __init__(self, path: str, held: Any) -> None:
        self.path, self._held, self.before = path, held, [*held]

    def path_of(self, index: int) -> str:
        """Return where one of the items is."""
        return f"{self.path}[{index}]"

    def replace(self, old: Any, new: Any) -> None:
        """Take an object for one that was there."""
        self.before = [new if value is old else value for value in self.before]

    def is_same(self) -> bool:
        """Return whether all items are the same objects."""
        return len(self._held) == len(self.before) and all(map(is_, self._held, self.before))

    def differences(self) -> list[str]:
        """Return the sizes, if they differ, or the items that do."""
        if len(self._held) != len(self.before):
            return [described(self.path, self.before, [*self._held])]
        pairs = enumerate(zip(self.before, self._held, strict=True))
        return [described(self.path_of(i), b, n) for i, (b, n) in pairs if not same_value(n, b)]

    def put_back(self) -> None:
        """Have it hold the items that it held."""
        if self.is_same():
            return
        if isinstance(self._held, deque):
            self._held.clear()
            self._held.extend(self.before)
        else:
            list.__setitem__(self._held, slice(None), self.before)

    @property
    def may_grow(self) -> bool:
        """Whether `growth` may find something: in a list, not in a deque."""
        return isinstance(self._held, list)

    def growth(self) -> list[Any] | None:
        """Return what was appended to a list, if nothing else happened to it."""
        count = len(self.before)
        if len(self._held) <= count:
            return None
        return self._held[count:] if all(map(is_, self._held, self.before)) else None

    def grow(self, growth: list[Any]) -> None:
        """Append what `growth` returned."""
        list.extend(self._held, growth)


class Members:
    """The members of a set."""

    def __init__(self, path: str, held: set[Any]) -> None:
        self.path, self._held, self._before = path, held, set(held)

    def is_same(self) -> bool:
        """Return whether there are the same members."""
        return self._held == self._before

    def differences(self) -> list[str]:
        """Return the sizes, or that members differ."""
        return [] if self.is_same() else [described(self.path, self._before, set(self._held))]

    def put_back(self) -> None:
        """Have it hold the members that it held."""
        if not self.is_same():
            self._held.clear()
            self._held.update(self._before)


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


class TensorValue:
    """A tensor's numbers, ``requires_grad`` and gradient."""

    def __init__(self, path: str, tensor: Tensor) -> None:
        self.path, self._tensor = path, tensor
        self._before = tensor.detach().clone().requires_grad_(tensor.requires_grad)
        self._grad = tensor.grad if tensor.is_leaf else None

    def _has_its_gradient(self) -> bool:
        return not self._tensor.is_leaf or self._tensor.grad is self._grad

    def is_same(self) -> bool:
        """Return whether the numbers are the same; also what ``.data`` was used for is seen."""
        return same_tensor(self._tensor, self._before) and self._has_its_gradient()

    def differences(self) -> list[str]:
        """Return the tensor, or its gradient, if it differs."""
        if not same_tensor(self._tensor, self._before):
            return [self.path]
        return [] if self._has_its_gradient() else [f"{self.path}.grad"]

    def put_back(self) -> None:
        """Copy the numbers back, in place where the shape allows."""
        tensor, before = self._tensor, self._before
        if not self._has_its_gradient():
            tensor.grad = self._grad
        is_on_a_device = tensor.device.type != "cpu"  # where comparing waits for it to be done
        if not is_on_a_device and same_tensor(tensor, before):
            return
        with torch.no_grad():
            if tensor.shape == before.shape and tensor.dtype == before.dtype:
                tensor.copy_(before)
            else:
                tensor.data = before.detach().clone()
        if tensor.is_leaf and tensor.requires_grad != before.requires_grad:
            tensor.requires_grad_(before.requires_grad)


class ArrayValue:
    """A NumPy array's numbers."""

    def __init__(self, path: str, array: np.ndarray[Any, Any]) -> None:
        self.path, self._array, self._before = path, array, array.copy()

    def is_same(self) -> bool:
        """Return whether the numbers are the same."""
        return same_array(self._array, self._before)

    def differences(self) -> list[str]:
        """Return the array, if it differs."""
        return [] if self.is_same() else [self.path]

    def put_back(self) -> None:
        """Copy the numbers back."""
        if self.is_same():
            return
        if self._array.shape != self._before.shape:
            self._array.resize(self._before.shape, refcheck=False)
        self._array[...] = self._before


class GeneratorState:
    """The state of a generator of random numbers.

    Args:
        path: where it is.
        read: returns a copy of its state.
        write: sets it.
    """

    def __init__(self, path: str, read: Callable[[], Any], write: Callable[[Any], object]) -> None:
        self.path, self._read, self._write, self._before = path, read, write, read()

    def is_same(self) -> bool:
        """Return whether it would go on as it would have."""
        now, before = self._read(), self._before
        # Python's is a tuple of 625 numbers, to look at which one by one takes a hundred times longer
        return bool(now == before) if isinstance(now, tuple) else same_value(now, before)

    def differences(self) -> list[str]:
        """Return the generator, if numbers were drawn."""
        return [] if self.is_same() else [self.path]

    def put_back(self) -> None:
        """Have it go on from where it was."""
        if not self.is_same():
            self._write(self._before)
