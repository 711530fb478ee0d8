"""Copy of a module's Python attributes, so that every client starts with those of the round's start.

*Tensors and attributes of the module are the client's, everything else is yours.*

The attributes of the module and its parts are copied once per round, together, by `copy.deepcopy`, and a
copy of this copy is put back before a client. Parts, parameters and buffers of the module stay
themselves in it, as do metrics, data sets, loaders and objects of torch and Lightning. What cannot be
copied is left as it is, and a warning names it once. An iterator is refused.

So the lists and objects of a module are equal after a client, not the same ones: hooks are to read
``module.outputs`` rather than keep the list. Attributes of scripted modules, globals, closures and class
attributes are never restored; `Outside` names those that a step changes.
"""

from __future__ import annotations

import copy
import math
import random
import types
import warnings
from collections import deque
from collections.abc import Collection, Iterator
from itertools import chain
from operator import is_
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.utils.data import DataLoader, Dataset
from torchmetrics import Metric, MetricCollection

from fl_lightning.core.errors import ConfigurationError

# Attributes that torch gives every module, such as hooks; a step does not compute them.
_TORCHS = frozenset(vars(nn.Module()))
# Types of values that cannot change inside, or that are no client's.
_FIXED = (
    *(bool, int, float, complex, str, bytes, type(None), type),
    *(types.FunctionType, types.ModuleType, nn.Module, Dataset, DataLoader),
)
_GENERATORS = (torch.Generator, random.Random, np.random.Generator, np.random.RandomState)
_COPIED = (Tensor, dict, torch.Generator, torch.amp.GradScaler, torch.distributions.Distribution)
# Packages whose objects are no client's, except those of `_COPIED`.
_LIBRARIES = ("fl_lightning", "torch", "lightning", "pytorch_lightning", "torchmetrics")
_METRICS = (Metric, MetricCollection)
_MISSING = object()
# Appended items: (attributes of a part, name, the list's new items or a dict of them by key).
Growth = list[tuple[dict[str, Any], str, Any]]
_warned: set[str] = set()


class _Owner:
    """A part's dict of attributes, parameters, buffers or parts, and what it held.

    Args:
        path: path of the part, for messages.
        held: the dict.
        ignored: keys that are not the user's.
    """

    def __init__(self, path: str, held: dict[str, Any], ignored: Collection[str] = ()) -> None:
        self.path, self.held, self.ignored = path, held, ignored
        self.before = self.now()

    def now(self) -> dict[str, Any]:
        held, ignored = self.held, self.ignored
        return {n: v for n, v in held.items() if n not in ignored} if ignored else dict(held)

    def is_same(self) -> bool:
        held, before = self.held, self.before
        names = held.keys() - self.ignored if self.ignored else held.keys()
        return names == before.keys() and all(map(is_, map(held.get, before), before.values()))

    def changes(self) -> Iterator[str]:
        now, before = self.now(), self.before
        for name in {**before, **now}:
            if not same_value(now.get(name, _MISSING), before.get(name, _MISSING)):
                yield f"{self.path}.{name}"

    def put_back(self) -> None:
        for name in self.now():
            del self.held[name]
        self.held.update(self.before)  # in the same order


class Attributes:
    """A copy of the attributes of a module and its parts.

    Args:
        module: the module.
        ignore: attributes that are not the user's, e.g. ``_trainer``, of the module and of parts that
            are LightningModules.
        generators: restore random generators as well.

    Raises:
        ConfigurationError: if an attribute is an iterator.

    Example:
        >>> module = nn.Linear(1, 1)
        >>> module.n, module.outputs = 0, []
        >>> state = Attributes(module)
        >>> module.n += 1
        >>> module.outputs.append(1.5)
        >>> state.changes()
        ['self.n', 'self.outputs']
        >>> growth = state.put_back()
        >>> module.n, module.outputs, state.changes()
        (0, [], [])
        >>> append(growth)
        >>> module.outputs
        [1.5]
    """

    def __init__(
        self, module: nn.Module, *, ignore: Collection[str] = (), generators: bool = True
    ) -> None:
        self._owners: list[_Owner] = []
        self._kept: dict[Any, Any] = {id(v): v for n, v in vars(module).items() if n in ignore}
        self._fixed: tuple[type, ...] = () if generators else _GENERATORS
        # attributes whose values may change inside
        self._entries: list[tuple[_Owner, str]] = []
        own = chain(module.named_modules(), module.named_parameters(), module.named_buffers())
        self._kept |= {id(value): value for _, value in own}
        self._kept["torch"] = _memory(module)
        for path, part in _parts("self", module):
            ignored = _ignored(part)
            if part is module or _is_of(type(part).__mro__, ("lightning", "pytorch_lightning")):
                ignored |= {*ignore}
            attributes = _Owner(path, vars(part), ignored)
            members = part._parameters, part._buffers, part._modules
            self._owners += [attributes, *(_Owner(path, held) for held in members)]
            self._entries += [(attributes, name) for name in self._changeable(attributes)]
        try:
            self._copies = self._copied_entries()
        except Exception:  # noqa: BLE001 - a user's class may raise anything
            self._entries = [entry for entry in self._entries if self._can_copy(*entry)]
            self._copies = self._copied_entries()
        self._note_start()

    def _changeable(self, owner: _Owner) -> Iterator[str]:
        for name, value in owner.before.items():
            if name in _TORCHS or isinstance(value, self._fixed) or not may_change(value):
                continue
            if isinstance(value, Iterator):
                raise ConfigurationError(
                    f"{owner.path}.{name} is an iterator, which cannot be rewound for the next client: "
                    "keep a list and a position on the module instead"
                )
            yield name

    def _can_copy(self, owner: _Owner, name: str) -> bool:
        path = f"{owner.path}.{name}"
        try:
            self._copy(owner.held[name])
        except Exception as error:  # noqa: BLE001 - a user's class may raise anything
            if path not in _warned:
                warnings.warn(
                    f"state: {path} cannot be copied ({type(error).__name__}: {error}), so that clients "
                    "share it: each finds there what those before it left",
                    stacklevel=2,
                )
            _warned.add(path)
            return False
        return True

    def _copy(self, value: Any) -> Any:
        memo = {**self._kept, "torch": dict(self._kept["torch"])}
        with torch.inference_mode(False):  # copies are also written outside of inference mode
            return copy.deepcopy(value, memo)

    def _copied_entries(self) -> list[Any]:
        """Copy the values that may change inside together, so that what they share stays shared."""
        copies: list[Any] = self._copy([owner.held[name] for owner, name in self._entries])
        return copies

    def _note_start(self) -> None:
        """Record which objects attributes hold, for a comparison in C, and what lists hold."""
        self._filtered = [owner for owner in self._owners if owner.ignored]
        self._views = [owner.held.values() for owner in self._owners if not owner.ignored]
        self._sizes, self._held = [*map(len, self._views)], [*chain.from_iterable(self._views)]
        self._lists: dict[int, tuple[_Owner, str, Any, Any]] = {}
        for owner, name in self._entries:
            value = owner.held[name]
            if isinstance(value, (list, dict)):
                self._lists[id(value)] = owner, name, value, _copied(value)

    def is_same(self) -> bool:
        """Return whether nothing has changed; an attribute that was set to an equal value has."""
        pairs = zip(self._entries, self._copies, strict=True)
        return (
            [*map(len, self._views)] == self._sizes
            and all(map(is_, chain.from_iterable(self._views), self._held))
            and all(owner.is_same() for owner in self._filtered)
            and all(same_value(owner.held[name], value) for (owner, name), value in pairs)
        )

    def changes(self) -> list[str]:
        """Return the paths of attributes that have changed."""
        inside = {f"{owner.path}.{name}" for owner, name in self._entries}
        found = [p for owner in self._owners for p in owner.changes() if p not in inside]
        pairs = zip(self._entries, self._copies, strict=True)
        return found + [
            f"{owner.path}.{name}"
            for (owner, name), value in pairs
            if not same_value(owner.held.get(name, _MISSING), value)
        ]

    def put_back(self) -> Growth:
        """Restore all attributes, and return the items that were appended to lists."""
        if self.is_same():
            return []
        grown = [
            (owner.held, name, added)
            for owner, name, value, before in self._lists.values()
            if owner.held.get(name) is value and (added := _added(value, before))
        ]
        for owner in self._owners:
            if not owner.is_same():
                owner.put_back()
        for (owner, name), value in zip(self._entries, self._copy(self._copies), strict=True):
            owner.held[name] = owner.before[name] = value
        self._note_start()
        return grown


def may_change(value: Any) -> bool:
    """Return whether a value may change inside and belongs to the user, so that it is copied."""
    if isinstance(value, types.MethodType):
        return may_change(value.__self__)
    is_librarys = _is_of([type(value)], _LIBRARIES) and not isinstance(value, _COPIED)
    has_graph = isinstance(value, Tensor) and not value.is_leaf
    return not (isinstance(value, _FIXED) or is_librarys or has_graph)


def _parts(path: str, module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Find a module and its parts, but for metrics."""
    yield path, module
    for name, child in module._modules.items():
        if child is not None and not isinstance(child, _METRICS):
            yield from _parts(f"{path}.{name}", child)


def _ignored(part: nn.Module) -> set[str]:
    # torch's older weight norm and pruning set an attribute in every forward pass
    hooks = part._forward_pre_hooks.values()
    torchs = [hook for hook in hooks if type(hook).__module__.startswith("torch.nn.utils.")]
    return {getattr(hook, "name", getattr(hook, "_tensor_name", "")) for hook in torchs}


def _memory(module: nn.Module) -> dict[Any, Any]:
    """Memory of parameters and buffers, which copies of their views are to share."""
    tensors = chain(module.parameters(), module.buffers())
    plain = (t for t in tensors if t.layout == torch.strided and not t.is_meta and not is_lazy(t))
    storages = [tensor.untyped_storage() for tensor in plain]
    return {storage._cdata: storage for storage in storages}


def _is_of(kinds: Collection[type], packages: Collection[str]) -> bool:
    return any(kind.__module__.partition(".")[0] in packages for kind in kinds)


def _copied(value: Any) -> Any:
    if isinstance(value, list):
        return [*value]
    return {key: [*items] for key, items in value.items() if type(items) is list}


def _added(value: Any, before: Any) -> Any:
    """Return the items appended to a list, or those of a dict's lists by key."""
    if isinstance(value, list):
        return value[len(before) :] if all(map(is_, value, before)) else []
    now = {key: _added(items, before.get(key, [])) for key, items in _copied(value).items()}
    return {key: added for key, added in now.items() if added}


def append(growth: Growth) -> None:
    """Append the items that `Attributes.put_back` returned, of one or several clients, to their lists."""
    for held, name, added in growth:
        value = held.get(name)
        if isinstance(value, list):
            list.extend(value, added)
        elif isinstance(value, dict):
            for key, items in added.items():
                dict.setdefault(value, key, []).extend(items)


def same_value(now: Any, before: Any) -> bool:
    """Return whether two values are equal in type and content; NaN equals NaN.

    Example:
        >>> same_value([1, float("nan"), torch.ones(2)], [1, float("nan"), torch.ones(2)])
        True
        >>> same_value(1, True), same_value(torch.ones(2), torch.ones(2, dtype=torch.float64))
        (False, False)
    """
    if now is before:
        return True
    if isinstance(now, Tensor) and isinstance(
        before, Tensor
    ):  # the copy of a Parameter is a Tensor
        kinds = [(t.dtype, t.shape, t.device, t.layout, t.requires_grad) for t in (now, before)]
        return kinds[0] == kinds[1] and same_numbers(now, before)
    if type(now) is not type(before):
        return False
    try:
        if isinstance(now, dict):
            return [*now] == [*before] and same_value([*now.values()], [*before.values()])
        if isinstance(now, (list, tuple, deque)):
            return len(now) == len(before) and all(map(same_value, now, before))
        if isinstance(now, np.ndarray):
            alike = now.dtype == before.dtype and now.shape == before.shape
            return alike and np.array_equal(now, before, equal_nan=now.dtype.kind in "fc")
        return _equal(now, before)
    except Exception:  # noqa: BLE001 - a user's class may raise anything if it cannot compare
        return False


def _equal(now: Any, before: Any) -> bool:
    compares_identities = type(now).__eq__ is object.__eq__
    if compares_identities or isinstance(now, types.MethodType):
        return same_value(now.__reduce_ex__(4)[1:3], before.__reduce_ex__(4)[1:3])
    is_nan = isinstance(now, float) and math.isnan(now) and math.isnan(before)
    return is_nan or (now == before) is True


def same_numbers(now: Tensor, before: Tensor) -> bool:
    """Return whether two tensors of one shape and dtype hold equal numbers; NaN equals NaN."""
    if now.device.type == "meta":
        return True
    try:
        with torch.no_grad():
            if now.layout != torch.strided:
                now, before = now.to_dense(), before.to_dense()
            if torch.equal(now, before) or not (now.is_floating_point() or now.is_complex()):
                return torch.equal(now, before)
            return bool(((now == before) | (now.isnan() & before.isnan())).all())
    except RuntimeError:  # a tensor that has outlived the transform that made it, e.g. vmap
        return False
