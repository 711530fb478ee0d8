"""Places where Python keeps something: what was there, whether it still is, and putting it back.

A place knows one object (a dict, a list, a tensor, a generator of random numbers) and a copy of what
it held. Copies are shallow: what is inside has a place of its own. Putting back changes the object
itself, so that whoever else holds it sees the same.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Collection
from operator import is_
from typing import Any, Protocol

from fl_lightning.client.state.same_values import MISSING, described, same_value


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
