"""Snapshot of a module's Python attributes, which is restored before every client of a round.

*Tensors and attributes of the module are the client's, everything else is yours.*

A snapshot covers the attributes of the module and its parts with all their contents: lists, dicts,
objects, tensors, arrays, random generators; not metrics, data sets, loaders and objects of torch and
Lightning. It is taken once per round and restored in place before every client: a hook that holds one
of the module's lists keeps the same list. An iterator cannot be rewound and is refused.

Globals, closures and class attributes are never restored; a rehearsal names those that a step changes.
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

from fl_lightning.client.state.tensors import same_value
from fl_lightning.core.errors import ConfigurationError

# Attributes that torch gives every module, such as hooks; a step does not compute them.
_MEMBERS = "_parameters", "_buffers", "_modules"
_TORCHS = frozenset(vars(nn.Module())) - {"training", *_MEMBERS}
_ATOMS = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, torch.Size)
_CLOSED = (Metric, MetricCollection, Dataset, DataLoader, types.ModuleType, random.SystemRandom)
_CODE = (types.FunctionType, type)
# Packages whose objects are not searched, except those of `_BAGS`.
_LIBRARIES = (sys.stdlib_module_names - {"__main__"}) | {
    *(
        "fl_lightning",
        "jsonargparse",
        "lightning",
        "lightning_fabric",
        "pytorch_lightning",
        "torch",
    ),
    *("torchmetrics", "torchvision", "numpy", "scipy", "pandas", "sklearn", "matplotlib", "PIL"),
    *("mlflow", "tensorboard", "wandb", "tqdm"),
}
_BAGS = ("types.Simple", "argparse.Name", "torch.amp.grad_scaler", "torch.distributions")
# Immutable types that hold other objects.
_FIXED = (tuple, frozenset, partial, types.MethodType, property, staticmethod, classmethod)
_MISSING = object()
# Appended items: (list, its new items), or (dict, its new lists by key).
Appended = list[tuple[Any, Any]]
_Inside = Iterable[tuple[Any, Any]]


class _Noted:
    """A mutable object and its recorded content.

    Args:
        path: path from the module, for messages.
        value: the object.
        read: returns the object's content.
        write: restores a content; None for an object that is only watched.
        has_entries: compare entries by identity; otherwise by value.
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
        """Return the paths of changed or reordered values."""
        now, before = self.read(self.value), self.before
        if same_value(now, before):
            return []
        names = {**before, **now} if isinstance(before, dict) else {}
        pairs = ((name, before.get(name, _MISSING), now.get(name, _MISSING)) for name in names)
        paths = [_joined(self.path, name) for name, b, n in pairs if not same_value(n, b)]
        return paths or [self.path]

    def appended(self) -> Any:
        """Return the items appended to a list, or the lists under new keys of a dict; else None or {}."""
        now, before = self.value, self.before
        if isinstance(now, list):
            return now[len(before) :] if all(map(is_, now, before)) else None
        new = now.items() if self.write is _refill_dict else ()
        return {key: items for key, items in new if key not in before and type(items) is list}


class Attributes:
    """A snapshot of the attributes of a module and its parts.

    Args:
        module: the module.
        ignore: attributes that are not the user's, e.g. ``_trainer``, of the module and of parts that
            are LightningModules.
        tensors: record parameters and buffers as well, with copies on the CPU: an accelerator may have
            no room for a second model.
        outside: watch more: ``requires_grad``, the generators of Python and NumPy, and globals,
            closures and class attributes that functions name, which are never restored.

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
        self._memory = {_memory(tensor) for tensor in own.values()} - {0}
        self._noted: list[_Noted] = []
        self._code: list[Any] = []
        for name, tensor in own.items() if tensors else ():
            if not tensor.is_meta and not is_lazy(tensor):
                self._note_tensor(f"self.{name}", tensor, device="cpu")
        self._walk([("self", module)])
        if outside:
            self._note_outside()
        # `is_same` compares the entries of all containers in one pass in C
        whole = [each for each in self._noted if isinstance(each.read, type)]
        self._rest = [each for each in self._noted if not isinstance(each.read, type)]
        self._views = [n.value.values() if isinstance(n.value, dict) else n.value for n in whole]
        # names of attributes and of a module's parts do not change alone
        dicts = (n for n in whole if n.write is _refill_dict and not n.path.endswith(_MEMBERS))
        self._views += [n.value for n in dicts]
        self._sizes, self._entries = [*map(len, self._views)], [*chain.from_iterable(self._views)]

    def is_same(self) -> bool:
        """Return whether all recorded objects still hold identical objects, not only equal ones."""
        return (
            [*map(len, self._views)] == self._sizes
            and all(map(is_, chain.from_iterable(self._views), self._entries))
            and all(each.is_same() for each in self._rest)
        )

    def changes(self) -> list[str]:
        """Return the paths of values that have changed."""
        return _differences(self._noted)

    def changes_outside(self) -> list[str]:
        """Return the paths of changed globals, closures and class attributes, which are never restored."""
        return _differences(each for each in self._noted if each.write is None)

    def put_back(self, *, generators: bool = True) -> Appended:
        """Restore all attributes in place, and return the items that were appended to lists.

        Without ``generators`` random generators keep their states.
        """
        appended: Appended = []
        for each in self._noted:
            if not generators and isinstance(each.value, _GENERATORS):
                continue
            if each.write is not None and not each.is_same():
                if each.has_entries and (added := each.appended()):
                    appended.append((each.value, added))
                each.write(each.value, each.before)
        return appended

    def _walk(self, waiting: list[tuple[str, Any]], *, enters_code: bool = False) -> None:
        """Record the objects inside these values, at any depth."""
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
        """Record a value's content, and return its parts, which may be mutable as well."""
        if isinstance(value, Tensor):
            if _memory(value) not in self._memory:  # else a view of a parameter or buffer
                self._note_tensor(path, value)
            return ()
        for kind, read, write in _KINDS:
            if isinstance(value, kind):
                self._note(path, value, read, write, has_entries=isinstance(read, type))
                break
        if isinstance(value, nn.Module) and not isinstance(value, torch.jit.ScriptModule):
            return self._look_at_module(path, value)
        if isinstance(value, Iterator) and type(value).__module__ in ("builtins", "itertools"):
            raise ConfigurationError(
                f"{path} is an iterator, which cannot be rewound for the next client: keep a list "
                "and a position on the module instead"
            )
        return [*_inside(value), *self._look_at_object(path, value)]

    def _look_at_module(self, path: str, module: nn.Module) -> _Inside:
        # torch's older weight norm and pruning set an attribute in every forward pass
        hooks = module._forward_pre_hooks.values()
        torchs = [hook for hook in hooks if type(hook).__module__.startswith("torch.nn.utils.")]
        ignored = {getattr(h, "name", getattr(h, "_tensor_name", "")) for h in torchs}
        if module is self._module or any(map(_is_lightnings, type(module).__mro__)):
            ignored |= self._ignore
        inside = self._note_attributes(path, module, ignored)
        return [(name, value) for name, value in inside if name not in _TORCHS]

    def _look_at_object(self, path: str, value: Any) -> _Inside:
        kind, inside = type(value), list[tuple[Any, Any]]()
        is_bag = f"{kind.__module__}.{kind.__name__}".startswith(_BAGS)
        is_librarys = kind.__module__.partition(".")[0] in _LIBRARIES and not is_bag
        if is_librarys or any(map(_is_lightnings, kind.__mro__)):
            return ()
        if copyreg._slotnames(kind):  # type: ignore[attr-defined]
            inside += self._note(path, value, _read_slots, _write_slots).items()
        if type(getattr(value, "__dict__", None)) is dict:
            inside += self._note_attributes(path, value)
        return inside

    def _note(
        self, path: str, value: Any, read: Any, write: Any, *, has_entries: bool = True
    ) -> Any:
        self._noted.append(_Noted(path, value, read, write, has_entries=has_entries))
        return self._noted[-1].before

    def _note_attributes(self, path: str, owner: Any, ignored: Collection[str] = ()) -> _Inside:
        """Record an object's attributes, except ignored ones."""
        read, write = partial(_without, ignored) if ignored else dict, partial(_rewrite, ignored)
        return self._note(path, vars(owner), read, write).items()  # type: ignore[no-any-return]

    def _note_tensor(self, path: str, tensor: Tensor, device: str | None = None) -> None:
        with torch.inference_mode(False):  # the copy is also compared outside of inference mode
            write = partial(_write_tensor, memory=tensor.detach())
            self._note(path, tensor, partial(_read_tensor, device), write, has_entries=False)
            numbers, *others = self._noted[-1].before
            self._noted[-1].before = [numbers.clone(), *others]

    def _note_outside(self) -> None:
        """Record generators of Python and NumPy, and the globals and closures of the functions found."""
        read, write = attrgetter("requires_grad"), nn.Parameter.requires_grad_
        for name, param in self._module.named_parameters():
            self._note(f"self.{name}.requires_grad", param, read, write, has_entries=False)
        of_python, of_numpy = random.getstate.__self__, np.random.get_state.__self__  # type: ignore[attr-defined]
        self._walk([("Python's random", of_python), ("NumPy's random", of_numpy)])
        num_own, kinds = len(self._noted), map(type, [*self._seen.values()])
        self._walk([("", code) for code in (*self._code, *kinds)], enters_code=True)
        for each in self._noted[num_own:]:
            each.write = None

    def _look_at_code(self, code: Any) -> _Inside:
        """Record globals and closures of a user's function, or attributes of a user's class."""
        if not _is_users_code(code.__module__) or hasattr(code, "__members__"):  # no enum
            return ()
        if isinstance(code, types.FunctionType):
            return self._note("", code, _named_by, None).items()  # type: ignore[no-any-return]
        ignored = {name for name in vars(code) if name.startswith(("__", "_abc_impl"))}
        own = self._note(f"class {code.__name__}", vars(code), partial(_without, ignored), None)
        inside = ((f"class {code.__name__}.{name}", value) for name, value in own.items())
        return [*inside, *(("", base) for base in code.__bases__)]


def append(appended: Appended) -> None:
    """Append the items that `Attributes.put_back` returned for one or several clients to the lists of the module."""
    for held, added in appended:
        if isinstance(held, list):
            list.extend(held, added)
        else:
            for key, items in added.items():
                dict.__setitem__(held, key, [*held.get(key, ()), *items])


def _inside(value: Any) -> _Inside:
    """Contents of a container, by key or number."""
    if isinstance(value, dict):
        return value.items()
    if isinstance(value, torch.jit.ScriptModule):
        return value.named_children()
    holds = isinstance(value, (list, deque, set, *_FIXED))
    return enumerate(gc.get_referents(value)) if holds else ()


def _differences(noted: Iterable[_Noted]) -> list[str]:
    return [path for each in noted if not each.is_same() for path in each.differences()]


def _joined(path: str, name: object) -> str:
    return f"{path}.{name}" if path else str(name)


def _memory(tensor: Tensor) -> int:
    is_plain = tensor.layout == torch.strided and not tensor.is_meta and not is_lazy(tensor)
    return tensor.untyped_storage().data_ptr() if is_plain else 0


def _read_tensor(device: str | None, tensor: Tensor) -> list[Any]:
    grad = tensor.grad if tensor.is_leaf else None
    return [tensor.detach().to(device or tensor.device), tensor.requires_grad, grad]


def _write_tensor(tensor: Tensor, before: list[Any], memory: Tensor) -> None:
    with torch.no_grad():
        tensor.data = memory
        tensor.copy_(before[0])
    if tensor.is_leaf:
        tensor.requires_grad_(before[1]).grad = before[2]


def _read_scripted(module: Any) -> dict[str, Any]:
    """Attributes of a scripted module, which are not in its ``__dict__``."""
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


def _without(ignored: Collection[str], own: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in own.items() if name not in ignored}


def _rewrite(ignored: Collection[str], own: dict[str, Any], before: dict[str, Any]) -> None:
    for name in _without(ignored, own):
        del own[name]
    own.update(before)  # in the same order


def _refill(kind: Any) -> Callable[[Any, Any], None]:
    """Return a function that replaces a container's content by methods of the built-in class."""
    fill = kind.extend if kind in (list, deque) else kind.update

    def write(held: Any, before: Any) -> None:
        kind.clear(held)
        fill(held, before)

    return write


_refill_dict = _refill(dict)
# Mutable types, each with a function that reads its content and one that writes it.
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
    """Values that a user's function reads from closures and globals, by name and place."""
    cells = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
    found = {f"{name} around {function.__qualname__}": _content(cell) for name, cell in cells}
    waiting, names = [function.__globals__], _names_in(function.__code__)
    for held in waiting:  # the user's modules are appended
        for name in names & held.keys():
            if not isinstance(value := held[name], types.ModuleType):
                found[f"global {name} of {held.get('__name__')}"] = value
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
