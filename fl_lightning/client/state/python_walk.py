"""The walk through everything that Python holds and a training step may write.

It begins at the module and goes on to what is kept in it, in the classes of its parts, and in the
closures and global variables of their methods. What is Python's, torch's, Lightning's, torchmetrics'
or this package's own is not gone into; neither are data sets and loaders, nor optimizers.
"""

from __future__ import annotations

import random
import types
from collections import deque
from collections.abc import Callable, Collection, Iterable
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset
from torchmetrics import Metric, MetricCollection

from fl_lightning.client.state.python_code import is_library, is_users, names_in
from fl_lightning.client.state.python_iterators import IteratorValue, is_iterator
from fl_lightning.client.state.python_names import closure_cells, global_names, slot_values
from fl_lightning.client.state.python_places import Entries, Items, Members, Place
from fl_lightning.client.state.python_values import ArrayValue, GeneratorState, TensorValue
from fl_lightning.client.state.same_values import MISSING

# What torch keeps of a module. Hooks are not what a step computes; tensors and parts are looked at
# apart.
_TORCH = frozenset(vars(nn.Module())) - {"training"}
_MEMBERS = ("_parameters", "_buffers", "_modules")
_PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, torch.Size)
_CLOSED = (Metric, MetricCollection, torch.jit.ScriptModule, Dataset, DataLoader)
_WRAPPERS = ("__wrapped__", "__func__", "fget", "fset", "func")


class Walk:
    """Finds the places.

    Args:
        module: where to begin.
        ignore: names of attributes of the module, and of parts of the same kind, that are no
            concern of the user's.

    Attributes:
        places: what was found, what holds before what is held.
    """

    def __init__(self, module: nn.Module, ignore: Collection[str] = ()) -> None:
        self.places: list[Place] = []
        self._root, self._ignore = module, frozenset(ignore)
        self._kinds = tuple(c for c in type(module).__mro__ if _is_lightning(c))
        values = {id(tensor) for tensor in (*module.parameters(), *module.buffers())}
        self._seen: dict[int, Any] = {}  # keeps alive what it tells by its number
        self._elsewhere = values  # whose numbers are looked after elsewhere
        self._names: set[tuple[int, str]] = set()
        self._iterators: dict[int, IteratorValue] = {}
        self._waiting: deque[tuple[str, Any, Any]] = deque([("self", module, None)])
        while self._waiting:
            self._look_at(*self._waiting.popleft())

    def _later(self, path: str, value: Any, holder: Any = None) -> None:
        if type(value) not in _PLAIN and value is not MISSING:
            self._waiting.append((path, value, holder))

    def _look_at(self, path: str, value: Any, holder: Any) -> None:
        if id(value) in self._elsewhere:
            return
        if is_iterator(value):
            self._look_at_iterator(path, value, holder)
            return
        if id(value) in self._seen:
            return
        self._seen[id(value)] = value
        for kinds, look in self._looks():
            if isinstance(value, kinds):
                look(path, value)
                return
        self._look_at_object(path, value)

    def _looks(self) -> tuple[tuple[Any, Callable[[str, Any], None]], ...]:
        return (
            (_CLOSED, lambda path, value: None),
            (Tensor, lambda path, value: self.places.append(TensorValue(path, value))),
            (nn.Module, self._look_at_module),
            (dict, self._look_at_dict),
            ((list, deque), self._look_at_items),
            ((tuple, frozenset), self._look_at_fixed),
            (set, self._look_at_set),
            (np.ndarray, self._look_at_array),
            (types.FunctionType, self._look_at_function),
            (types.MethodType, self._look_at_method),
            (partial, self._look_at_partial),
            (types.ModuleType, lambda path, value: None),
            (type, self._look_at_class),
        )

    def _look_at_iterator(self, path: str, value: Any, holder: Any) -> None:
        place = self._iterators.get(id(value))
        if place is None:
            place = self._iterators[id(value)] = IteratorValue(path, value)
            self._seen[id(value)] = value
            self.places.append(place)
        if holder is not None:
            place.holders.append(holder)

    def _look_at_module(self, path: str, module: nn.Module) -> None:
        is_compiled = type(module).__module__.startswith("torch._dynamo")
        if not is_compiled:
            self._look_at_entries(
                Entries(path, vars(module), ignore=self._ignored(module), are_attributes=True)
            )
        for name in _MEMBERS:
            self._look_at_entries(Entries(path, vars(module)[name], are_attributes=True))
        self._look_at_classes(type(module))

    def _ignored(self, module: nn.Module) -> frozenset[str]:
        hooks = [hook for hook in module._forward_pre_hooks.values() if _is_torchs(hook)]
        # the older weight norm and pruning set an attribute in every forward, as they need it
        derived = {getattr(hook, "name", getattr(hook, "_tensor_name", "")) for hook in hooks}
        is_alike = module is self._root or isinstance(module, self._kinds)
        return _TORCH | derived | (self._ignore if is_alike else frozenset())

    def _look_at_entries(self, place: Entries) -> None:
        self.places.append(place)
        for key, value in place.before.items():
            self._later(place.path_of(key), value, place)

    def _look_at_dict(self, path: str, value: dict[Any, Any]) -> None:
        self._look_at_entries(Entries(path, value))
        for key in value:
            self._later(f"a key of {path}", key)
        if type(value).__module__ != "collections":
            self._look_at_object(path, value)

    def _look_at_items(self, path: str, value: Any) -> None:
        place = Items(path, value)
        self.places.append(place)
        for index, item in enumerate(place.before):
            self._later(place.path_of(index), item, place)

    def _look_at_fixed(self, path: str, value: Iterable[Any]) -> None:
        for index, item in enumerate(value):
            self._later(f"{path}[{index}]", item)

    def _look_at_set(self, path: str, value: set[Any]) -> None:
        self.places.append(Members(path, value))
        for item in value:
            self._later(f"a member of {path}", item)

    def _look_at_array(self, path: str, value: np.ndarray[Any, Any]) -> None:
        if value.flags.writeable:
            self.places.append(ArrayValue(path, value))

    def _look_at_method(self, path: str, method: types.MethodType) -> None:
        self._later(path, method.__self__)
        self._later(path, method.__func__)

    def _look_at_partial(self, path: str, bound: partial[Any]) -> None:
        self._later(path, bound.func)
        self._look_at_fixed(path, bound.args)
        self._later(path, bound.keywords)

    def _look_at_object(self, path: str, value: Any) -> None:
        generator = _generator_state(path, value)
        if generator is not None:
            self.places.append(generator)
            return
        for name in _WRAPPERS:  # a static method, a property, a cached function
            self._later(path, getattr(type(value), name, None) and _read(value, name))
        kind = type(value)
        if (is_library(kind.__module__) and not _is_a_bag(kind)) or _belongs_to_lightning(kind):
            return
        names = [n for c in kind.__mro__ for n in _slots_of(c)]
        if names:
            place = slot_values(path, value, names)
            self.places.append(place)
            for where, content in zip(place.paths, place.before, strict=True):
                self._later(where, content, place)
        attributes = _read(value, "__dict__")
        if type(attributes) is dict:
            self._look_at_entries(Entries(path, attributes, are_attributes=True))
        self._look_at_classes(kind)

    def _look_at_classes(self, kind: type) -> None:
        for parent in kind.__mro__:
            self._later(parent.__name__, parent)

    def _look_at_class(self, path: str, kind: type) -> None:
        if is_users(kind.__module__) and not hasattr(kind, "__members__"):  # no enumeration
            self._look_at_entries(Entries(f"class {kind.__name__}", vars(kind), owner=kind))
            for name in ("__init__", "__call__", "__iter__", "__next__", "__setattr__"):
                self._later(f"class {kind.__name__}.{name}", vars(kind).get(name))

    def _look_at_function(self, path: str, function: types.FunctionType) -> None:
        if not is_users(function.__module__ or ""):
            return
        code, where = function.__code__, f"{function.__qualname__}"
        cells = function.__closure__ or ()
        if cells:
            names = [f"{name} around {where}" for name in code.co_freevars]
            self._look_at_values(closure_cells(names, cells))
        self._look_at_fixed(f"a default of {where}", function.__defaults__ or ())
        for key, value in (function.__kwdefaults__ or {}).items():
            self._later(f"the default {key} of {where}", value)
        if vars(function):
            self._look_at_entries(Entries(where, vars(function), are_attributes=True))
        names_read, names_written = names_in(code)
        self._look_at_globals(function.__globals__, names_read, names_written)

    def _look_at_globals(
        self, held: dict[str, Any], names_read: Collection[str], names_written: Collection[str] = ()
    ) -> None:
        of = held.get("__name__", "a module")
        found = [n for n in names_read if n in held and (id(held), n) not in self._names]
        written = [n for n in names_written if n not in held]
        self._names |= {(id(held), name) for name in found}
        code = (types.ModuleType, types.FunctionType, type)
        values = [n for n in found if not isinstance(held[n], code)] + written
        if values:
            self._look_at_values(global_names(of, held, values))
        for name in set(found) - set(values):
            value = held[name]
            if not isinstance(value, types.ModuleType):
                self._later(name, value)
            elif is_users(value.__name__):
                self._look_at_globals(vars(value), names_read)

    def _look_at_values(self, place: Any) -> None:
        self.places.append(place)
        for path, value in zip(place.paths, place.before, strict=True):
            self._later(path, value, place)


def _read(value: Any, name: str) -> Any:
    try:
        return object.__getattribute__(value, name)
    except AttributeError:
        return None


def _slots_of(kind: type) -> list[str]:
    if is_library(kind.__module__):
        return []
    slots = vars(kind).get("__slots__", ())
    names = [slots] if isinstance(slots, str) else [*slots]
    hidden = [n for n in names if n.startswith("__") and not n.endswith("__")]
    mangled = {n: f"_{kind.__name__.lstrip('_')}{n}" for n in hidden}
    return [mangled.get(n, n) for n in names if n not in ("__dict__", "__weakref__")]


def _is_lightning(kind: type) -> bool:
    return kind.__module__.partition(".")[0] in ("lightning", "pytorch_lightning")


def _belongs_to_lightning(kind: type) -> bool:
    return any(map(_is_lightning, kind.__mro__))


def _is_torchs(hook: object) -> bool:
    return type(hook).__module__.startswith("torch.nn.utils.")


def _is_a_bag(kind: type) -> bool:
    """Return whether objects of a library's class hold what the user keeps in them."""
    name = f"{kind.__module__}.{kind.__name__}"
    return name in ("types.SimpleNamespace", "argparse.Namespace") or name.startswith(
        ("torch.amp.grad_scaler.", "torch.cuda.amp.grad_scaler.", "torch.distributions.")
    )


def _generator_state(path: str, value: Any) -> GeneratorState | None:
    if isinstance(value, random.Random) and not isinstance(value, random.SystemRandom):
        return GeneratorState(path, value.getstate, value.setstate)
    if isinstance(value, np.random.Generator):
        bits = value.bit_generator
        return GeneratorState(path, lambda: bits.state, lambda s: setattr(bits, "state", s))
    if isinstance(value, np.random.RandomState):
        return GeneratorState(path, lambda: value.get_state(legacy=False), value.set_state)
    if isinstance(value, torch.Generator):
        return GeneratorState(path, value.get_state, value.set_state)
    return None
