"""Containers and values that clients leave as they found them: noted, compared, put back.

Entries of containers are compared by identity, which costs next to nothing; values by what they hold.
"""

from __future__ import annotations

import math
import types
from collections import OrderedDict, deque
from collections.abc import Callable, Collection
from dataclasses import dataclass
from operator import is_
from typing import Any

import numpy as np
import torch
from torch import Tensor

MISSING = object()


@dataclass
class Place:
    """A container whose entries are compared by identity: a dict, list, deque or set.

    Attributes:
        path: where it is.
        held: the container.
        is_users: never put back.
        ignore: keys that are somebody else's.
        has_attributes: whether it is the dict of an object's attributes.
        before: what it held.
    """

    path: str
    held: Any
    is_users: bool = False
    ignore: Collection[str] = ()
    has_attributes: bool = False

    def __post_init__(self) -> None:
        self.before = self.now()

    def now(self) -> Any:
        """Copy of the present entries, without ignored keys."""
        if isinstance(self.held, (dict, types.MappingProxyType)):
            return {key: value for key, value in self.held.items() if key not in self.ignore}
        return set(self.held) if isinstance(self.held, set) else list(self.held)

    def is_same(self) -> bool:
        """True if the entries are the very same objects."""
        if self.has_attributes:  # names do not change alone
            held, ignore = self.held, self.ignore
            values = [v for k, v in held.items() if k not in ignore] if ignore else held.values()
            if len(values) == len(self.before) and all(map(is_, values, self.before.values())):
                return True
        now, before = self.now(), self.before
        if isinstance(before, set) or len(now) != len(before):
            return isinstance(before, set) and bool(now == before)
        if isinstance(before, dict):
            now = {key: now[key] for key in before if key in now} if self.has_attributes else now
            return [*now] == [*before] and all(map(is_, now.values(), before.values()))
        return all(map(is_, now, before))

    def differences(self) -> list[str]:
        """Descriptions of the entries that differ."""
        now, before = self.now(), self.before
        if not self.has_attributes:
            return [] if same_value(now, before) else [described(self.path, before, now)]
        pairs = ((k, before.get(k, MISSING), now.get(k, MISSING)) for k in {**before, **now})
        return [described(f"{self.path}.{k}", b, n) for k, b, n in pairs if not same_value(n, b)]

    def put_back(self) -> None:
        """Give the container its noted entries, in place."""
        held, before = self.held, self.before
        if isinstance(held, list):
            list.__setitem__(held, slice(None), before)
        elif isinstance(held, (deque, set)):
            held.clear()
            (held.update if isinstance(held, set) else held.extend)(before)
        else:  # not by the class's own methods, which may do more than to set an entry
            kind: Any = OrderedDict if isinstance(held, OrderedDict) else dict
            now = self.now()
            is_ordered = [key for key in now if key in before] == [*before]
            for key in now.keys() - before.keys() if is_ordered else now:
                kind.__delitem__(held, key)
            for key, value in before.items():
                if held.get(key, MISSING) is not value:
                    kind.__setitem__(held, key, value)

    def growth(self) -> Any:
        """Items appended to a list, or lists under new keys of a dict, if nothing else changed."""
        held, before = self.held, self.before
        if not isinstance(held, (list, dict)):
            return None
        if isinstance(held, list):
            return held[len(before) :] if all(map(is_, held, before)) else None
        new = {key: value for key, value in held.items() if key not in before}
        kept = all(held.get(key, MISSING) is value for key, value in before.items())
        return new if kept and all(type(value) is list for value in new.values()) else None

    def grow(self, added: Any) -> None:
        """Append what `growth` returned."""
        if isinstance(self.held, list):
            list.extend(self.held, added)
        else:
            for key, items in added.items():
                dict.__setitem__(self.held, key, [*self.held.get(key, ()), *items])


@dataclass
class Value:
    """A value that is read and written as a whole; one without ``write`` is never put back."""

    path: str
    read: Callable[[], Any]
    write: Callable[[Any], object] | None
    before: Any

    def is_same(self) -> bool:
        """True if the value equals the noted one."""
        return same_value(self.read(), self.before)

    def differences(self) -> list[str]:
        """Description of the change."""
        return [described(self.path, self.before, self.read())]


def same_value(now: Any, before: Any) -> bool:
    """Return whether one value may stand for the other, NaN for NaN.

    Example:
        >>> same_value([1, float("nan"), torch.ones(2)], [1, float("nan"), torch.ones(2)])
        True
        >>> same_value(1, True), same_value(torch.ones(2), torch.ones(2, dtype=torch.float64))
        (False, False)
    """
    if now is before or type(now) is not type(before):
        return now is before
    if isinstance(now, Tensor):
        kinds = [(t.dtype, t.shape, t.device, t.layout, t.requires_grad) for t in (now, before)]
        return kinds[0] == kinds[1] and same_numbers(now, before)
    try:
        if isinstance(now, dict):
            return [*now] == [*before] and same_value([*now.values()], [*before.values()])
        if isinstance(now, (list, tuple, deque)):
            return len(now) == len(before) and all(map(same_value, now, before))
        if isinstance(now, np.ndarray):
            alike = now.dtype == before.dtype and now.shape == before.shape
            return alike and np.array_equal(now, before, equal_nan=now.dtype.kind in "fc")
        is_nan = isinstance(now, float) and math.isnan(now) and math.isnan(before)
        return is_nan or (now == before) is True
    except Exception:  # noqa: BLE001 - whatever a class of the user's raises if it cannot compare
        return False


def same_numbers(now: Tensor, before: Tensor) -> bool:
    """Return whether two tensors of one shape and type hold the same numbers, NaN for NaN."""
    if now.device.type == "meta":
        return True
    try:
        with torch.no_grad():
            if now.layout != torch.strided:
                now, before = now.to_dense(), before.to_dense()
            if torch.equal(now, before) or not (now.is_floating_point() or now.is_complex()):
                return torch.equal(now, before)
            return bool(((now == before) | (now.isnan() & before.isnan())).all())
    except RuntimeError:  # one that has outlived the transform that made it, e.g. vmap
        return False


def described(path: str, before: Any, now: Any) -> str:
    """Return a change in words, with the values where they are short."""
    if now is MISSING or before is MISSING:
        return f"{path} ({'removed' if now is MISSING else 'new'})"
    plain = (int, float, str, type(None))
    if isinstance(before, plain) and isinstance(now, plain) and len(f"{before}{now}") < 48:
        return f"{path} ({before!r} -> {now!r})"
    sized = (list, tuple, dict, set, deque)
    if isinstance(before, sized) and isinstance(now, sized) and len(before) != len(now):
        return f"{path} ({len(before)} -> {len(now)} items)"
    return path
