"""Snapshot of a module's Python attributes, which is restored before every client of a round.

*Tensors and attributes of the module are the client's, everything else is yours.*

A snapshot covers the attributes of the module and its parts at any depth: lists, dicts, objects, tensors,
arrays, random generators, optimizers and schedules; not metrics, data sets, loaders and other objects of
torch and Lightning. It is taken once per round and restored in place before every client, so a list stays
the same list for a hook that refers to it. An iterator cannot be rewound and is refused.

Globals, closures and class attributes are never restored. The log names one that a step changes.
"""

from __future__ import annotations

import copy
import copyreg
import gc
import random
import sys
import types
from collections import OrderedDict, deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from functools import cache, partial
from itertools import chain
from operator import attrgetter, is_, setitem
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.utils.data import DataLoader, Dataset
from torchmetrics import Metric, MetricCollection

from fl_lightning.client.state.tensors import read_tensor, same_value, storage_of, write_tensor
from fl_lightning.core.errors import ConfigurationError

# Attributes of every `nn.Module`, such as hooks, which a training step does not change.
_MEMBERS = "_parameters", "_buffers", "_modules"
_TORCHS = frozenset(vars(nn.Module())) - {"training", *_MEMBERS}
_ATOMS = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, torch.Size)
_CLOSED = (Metric, MetricCollection, Dataset, DataLoader, types.ModuleType, random.SystemRandom)
_CODE = (types.FunctionType, type)
# Packages whose objects have no state of the user's, except for the types in `_BAGS`.
_LIBRARIES = (sys.stdlib_module_names - {"__main__"}) | {
    *("fl_lightning", "jsonargparse", "lightning", "lightning_fabric", "pytorch_lightning"),
    *("torch", "torchmetrics", "torchvision", "numpy", "scipy", "pandas", "sklearn", "matplotlib"),
    *("PIL", "mlflow", "tensorboard", "wandb", "tqdm"),
}
_BAGS = ("types.Simple", "argparse.Name", "torch.amp.grad", "torch.distributions", "torch.optim")
# Immutable types that contain other objects.
_FIXED = (tuple, frozenset, partial, types.MethodType, property, staticmethod, classmethod)
_MISSING = object()  # stands for a value that does not exist
# Items that clients appended: (list, its new items), or (dict, its new lists by key).
Appended = list[tuple[Any, Any]]
_Inside = Iterable[tuple[Any, Any]]  # the parts of an object, by name or number


class _Record:
    """A mutable object among a module's attributes, and its content when the snapshot was made.

    Args:
        path: path from the module, for messages.
        value: the object.
        read: returns the object's content.
        write: restores a content in place; None for an object that is never restored.
        has_entries: compare entries by identity; otherwise compare the content by value.
    """

    def __init__(
        self, path: str, value: Any, read: Any, write: Any, *, has_entries: bool = False
    ) -> None:
        self.path, self.value, self.read, self.write = path, value, read, write
        self.has_entries, self.before = has_entries, read(value)

    def is_same(self) -> bool:
        now, before = self.read(self.value), self.before
        if not self.has_entries or isinstance(before, set):
            return same_value(now, before)
        if isinstance(before, dict):
            if [*now] != [*before]:
                return False
            now, before = now.values(), before.values()
        return len(now) == len(before) and all(map(is_, now, before))

    def differences(self) -> list[str]:
        """Return the paths of the object's changed entries; its own path if entries have no names."""
        now, before = self.read(self.value), self.before
        if same_value(now, before):
            return []
        names = {**before, **now} if isinstance(before, dict) else {}
        pairs = ((name, before.get(name, _MISSING), now.get(name, _MISSING)) for name in names)
        paths = [_joined(self.path, name) for name, b, n in pairs if not same_value(n, b)]
        return paths or [self.path]

    def appended(self) -> Any:
        """Return what was added since the snapshot: a list's new items, or a dict's lists under new keys."""
        now, before = self.value, self.before
        if isinstance(now, list):
            return now[len(before) :] if all(map(is_, now, before)) else None
        new = now.items() if self.write is _refill_dict else ()
        return {key: items for key, items in new if key not in before and type(items) is list}


class Attributes:
    """A snapshot of the Python attributes of a module and its submodules, which it can restore.

    Args:
        module: the module.
        ignore: names of attributes to leave out, e.g. ``_trainer``, in the module and in parts that are
            LightningModules.
        tensors: record parameters and buffers as well. Their copies are on the CPU, because an
            accelerator may have no room for a second model.
        outside: record ``requires_grad`` and the generators of Python and NumPy as well, and watch globals,
            closures and class attributes that functions read; these are never restored.

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
        >>> appended = state.put_back()
        >>> module.n, module.outputs, state.changes()
        (0, [], [])
        >>> append(appended)
        >>> module.outputs
        [1.5]
    """

    def __init__(
        self,
        module: nn.Module,
        *,
        ignore: Collection[str] = (),
        tensors: bool = False,
        outside: bool = False,
    ) -> None:
        self._module, self._ignore = module, frozenset(ignore)
        own = dict(chain(module.named_parameters(), module.named_buffers()))
        self._seen: dict[int, Any] = {id(tensor): tensor for tensor in own.values()}  # kept alive
        self._memory = {storage_of(tensor) for tensor in own.values()} - {0}
        self._records: list[_Record] = []
        self._code: list[Any] = []
        for name, tensor in own.items() if tensors else ():
            if not tensor.is_meta and not is_lazy(tensor):
                self._record_tensor(f"self.{name}", tensor, device="cpu")
        self._walk([("self", module)])
        if outside:
            self._record_outside()
        # `is_same` compares the entries of all containers in one pass in C
        whole = [each for each in self._records if isinstance(each.read, type)]
        self._rest = [each for each in self._records if not isinstance(each.read, type)]
        self._views = [n.value.values() if isinstance(n.value, dict) else n.value for n in whole]
        # names of attributes and of a module's parts do not change alone
        dicts = (n for n in whole if n.write is _refill_dict and not n.path.endswith(_MEMBERS))
        self._views += [n.value for n in dicts]
        self._sizes, self._entries = [*map(len, self._views)], [*chain.from_iterable(self._views)]

    def is_same(self) -> bool:
        """Return whether nothing has changed since the snapshot; replacing an entry by an equal one is a change."""
        return (
            [*map(len, self._views)] == self._sizes
            and all(map(is_, chain.from_iterable(self._views), self._entries))
            and all(each.is_same() for each in self._rest)
        )

    def changes(self, *, outside: bool = False) -> list[str]:
        """Return the paths of values that changed since the snapshot; ``outside``: only of those never restored."""
        records = (each for each in self._records if each.write is None or not outside)
        return [path for each in records if not each.is_same() for path in each.differences()]

    def put_back(self, *, generators: bool = True) -> Appended:
        """Restore all attributes in place, and return the items that were appended to lists since the snapshot.

        Without ``generators`` random generators keep their states.
        """
        appended: Appended = []
        for each in self._records:
            if not generators and isinstance(each.value, _GENERATORS):
                continue
            if each.write is not None and not each.is_same():
                if each.has_entries and (added := each.appended()):
                    appended.append((each.value, added))
                each.write(each.value, each.before)
        return appended

    def _walk(self, waiting: list[tuple[str, Any]], *, enters_code: bool = False) -> None:
        """Record the mutable objects among these values, also nested ones, with their paths."""
        while waiting:
            path, value = waiting.pop()
            if type(value) in _ATOMS or id(value) in self._seen or isinstance(value, _CLOSED):
                continue
            if isinstance(value, _CODE) and not enters_code:
                self._code.append(value)
                continue
            self._seen[id(value)] = value
            if isinstance(value, _CODE):
                path, inside = "", self._look_at_code(value)
            else:
                inside = self._look(path, value)
            waiting += [(_joined(path, name), each) for name, each in reversed([*inside])]
            if enters_code:
                waiting.append(("", type(value)))

    def _look(self, path: str, value: Any) -> _Inside:
        """Record a value if it is mutable, and return the values inside it with their names."""
        if isinstance(value, Tensor):
            if storage_of(value) not in self._memory:  # else a view of a parameter or buffer
                self._record_tensor(path, value)
            return ()
        for kind, read, write in _KINDS:
            if isinstance(value, kind):
                self._record(path, value, read, write, has_entries=isinstance(read, type))
                break
        if isinstance(value, nn.Module) and not isinstance(value, torch.jit.ScriptModule):
            return self._look_at_module(path, value)
        if isinstance(value, Iterator) and type(value).__module__ in ("builtins", "itertools"):
            raise ConfigurationError(
                f"{path} is an iterator, which cannot be rewound for the next client: keep a list "
                "and a position on the module instead"
            )
        return [*_entries_of(value), *self._look_at_object(path, value)]

    def _look_at_module(self, path: str, module: nn.Module) -> _Inside:
        # torch's older weight norm and pruning set an attribute in every forward pass
        hooks = module._forward_pre_hooks.values()
        torchs = [hook for hook in hooks if type(hook).__module__.startswith("torch.nn.utils.")]
        ignored = {getattr(h, "name", getattr(h, "_tensor_name", "")) for h in torchs}
        if module is self._module or any(map(_is_lightnings, type(module).__mro__)):
            ignored |= self._ignore
        inside = self._record_attributes(path, module, ignored)
        return [(name, value) for name, value in inside if name not in _TORCHS]

    def _look_at_object(self, path: str, value: Any) -> _Inside:
        kind, inside = type(value), list[tuple[Any, Any]]()
        is_bag = f"{kind.__module__}.{kind.__name__}".startswith(_BAGS)
        is_librarys = kind.__module__.partition(".")[0] in _LIBRARIES and not is_bag
        if is_librarys or any(map(_is_lightnings, kind.__mro__)):
            return ()
        if copyreg._slotnames(kind):  # type: ignore[attr-defined]
            inside += self._record(path, value, _read_slots, _write_slots).items()
        if type(getattr(value, "__dict__", None)) is dict:
            inside += self._record_attributes(path, value)
        return inside

    def _record(
        self, path: str, value: Any, read: Any, write: Any, *, has_entries: bool = True
    ) -> Any:
        self._records.append(_Record(path, value, read, write, has_entries=has_entries))
        return self._records[-1].before

    def _record_attributes(self, path: str, owner: Any, ignored: Collection[str] = ()) -> _Inside:
        """Record an object's attributes, except those with ignored names."""
        read, write = partial(_without, ignored) if ignored else dict, partial(_rewrite, ignored)
        return self._record(path, vars(owner), read, write).items()  # type: ignore[no-any-return]

    def _record_tensor(self, path: str, tensor: Tensor, device: str | None = None) -> None:
        with torch.inference_mode(False):  # the copy is also compared outside of inference mode
            write = partial(write_tensor, memory=tensor.detach())
            self._record(path, tensor, partial(read_tensor, device), write, has_entries=False)
            numbers, *others = self._records[-1].before
            self._records[-1].before = [numbers.clone(), *others]

    def _record_outside(self) -> None:
        """Record ``requires_grad``, random generators, and the variables that functions and classes refer to."""
        read, write = attrgetter("requires_grad"), nn.Parameter.requires_grad_
        for name, param in self._module.named_parameters():
            self._record(f"self.{name}.requires_grad", param, read, write, has_entries=False)
        of_python, of_numpy = random.getstate.__self__, np.random.get_state.__self__  # type: ignore[attr-defined]
        self._walk([("Python's random", of_python), ("NumPy's random", of_numpy)])
        num_own, kinds = len(self._records), map(type, [*self._seen.values()])
        self._walk([("", code) for code in (*self._code, *kinds)], enters_code=True)
        for each in self._records[num_own:]:
            each.write = None

    def _look_at_code(self, code: Any) -> _Inside:
        """Record the globals and closure of a user's function, or the attributes of a user's class."""
        if not _is_users_code(code.__module__) or hasattr(code, "__members__"):  # no enum
            return ()
        if isinstance(code, types.FunctionType):
            return self._record("", code, _named_by, None).items()  # type: ignore[no-any-return]
        ignored = {name for name in vars(code) if name.startswith(("__", "_abc_impl"))}
        own = self._record(f"class {code.__name__}", vars(code), partial(_without, ignored), None)
        inside = ((f"class {code.__name__}.{name}", value) for name, value in own.items())
        return [*inside, *(("", base) for base in code.__bases__)]


def append(appended: Appended) -> None:
    """Append to the module's lists the items that `Attributes.put_back` had removed, also those of several clients."""
    for container, added in appended:
        if isinstance(container, list):
            list.extend(container, added)
        else:
            for key, items in added.items():
                dict.__setitem__(container, key, [*container.get(key, ()), *items])


def _joined(path: str, name: object) -> str:
    if isinstance(name, Tensor):  # in the state of an optimizer
        return path
    return f"{path}.{name}" if path else str(name)


def _entries_of(value: Any) -> Iterable[tuple[Any, Any]]:
    """Return the entries of a container by key or number; none for other objects."""
    if isinstance(value, dict):
        return value.items()
    if isinstance(value, torch.jit.ScriptModule):
        return value.named_children()
    is_container = isinstance(value, (list, deque, set, *_FIXED))
    return enumerate(gc.get_referents(value)) if is_container else ()


def _read_scripted(module: Any) -> dict[str, Any]:
    """Return the attributes of a TorchScript module, which are not in its ``__dict__``."""
    own = {name for name, _ in (*module.named_parameters(), *module.named_buffers())}
    names = module._concrete_type.get_attributes().keys() - own
    return {name: copy.deepcopy(module._c.getattr(name)) for name in sorted(names)}


def _write_scripted(module: Any, before: dict[str, Any]) -> None:
    for name, value in before.items():
        module._c.setattr(name, copy.deepcopy(value))


def _read_slots(owner: Any) -> dict[str, Any]:
    names = copyreg._slotnames(type(owner))  # type: ignore[attr-defined]
    return {name: getattr(owner, name) for name in names if hasattr(owner, name)}


def _write_slots(owner: Any, before: dict[str, Any]) -> None:
    for name in _read_slots(owner).keys() - before.keys():
        object.__delattr__(owner, name)
    for name, value in before.items():
        object.__setattr__(owner, name, value)


def _without(ignored: Collection[str], attributes: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in attributes.items() if name not in ignored}


def _rewrite(ignored: Collection[str], attributes: dict[str, Any], before: dict[str, Any]) -> None:
    for name in _without(ignored, attributes):
        del attributes[name]
    attributes.update(before)  # in the same order


def _refill(kind: Any) -> Callable[[Any, Any], None]:
    """Return a function that replaces a container's content, by methods of the built-in class ``kind``."""
    fill = kind.extend if kind in (list, deque) else kind.update

    def write(container: Any, before: Any) -> None:
        kind.clear(container)
        fill(container, before)

    return write


_refill_dict = _refill(dict)
# Mutable types, each with a function that reads its content and one that restores it.
_KINDS: tuple[tuple[type, Any, Any], ...] = (
    (OrderedDict, dict, _refill(OrderedDict)),
    (dict, dict, _refill_dict),
    *((kind, list, _refill(kind)) for kind in (list, deque)),
    (set, set, _refill(set)),
    (torch.jit.ScriptModule, _read_scripted, _write_scripted),
    (np.ndarray, copy.copy, lambda array, before: setitem(array, ..., before)),
    (random.Random, random.Random.getstate, random.Random.setstate),
    (np.random.RandomState, lambda g: g.get_state(legacy=False), np.random.RandomState.set_state),
    (torch.Generator, torch.Generator.get_state, torch.Generator.set_state),
    (
        np.random.Generator,
        lambda g: g.bit_generator.state,
        lambda g, state: setattr(g.bit_generator, "state", state),
    ),
)
_GENERATORS = random.Random, np.random.RandomState, torch.Generator, np.random.Generator


def _named_by(function: types.FunctionType) -> dict[str, Any]:
    """Return the values of the closure variables and globals that a function reads, by name and place."""
    cells = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
    found = {f"{name} around {function.__qualname__}": _content(cell) for name, cell in cells}
    waiting, names = [function.__globals__], _names_in(function.__code__)
    for scope in waiting:  # the user's modules are appended
        for name in names & scope.keys():
            if not isinstance(value := scope[name], types.ModuleType):
                found[f"global {name} of {scope.get('__name__')}"] = value
            elif _is_users_code(value.__name__) and vars(value) not in waiting:
                waiting.append(vars(value))
    return found


def _content(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # not set yet
        return _MISSING


def _names_in(code: types.CodeType) -> set[str]:
    inner = (_names_in(each) for each in code.co_consts if isinstance(each, types.CodeType))
    return {*code.co_names}.union(*inner)


def _is_lightnings(kind: type) -> bool:
    return kind.__module__.partition(".")[0] in ("lightning", "pytorch_lightning")


@cache
def _is_users_code(module_name: str | None) -> bool:
    file = getattr(sys.modules.get(module_name or ""), "__file__", None) or ""
    is_library = (module_name or "torch").partition(".")[0] in _LIBRARIES
    return not is_library and "site-packages" not in file and "dist-packages" not in file
