"""The state of a client: what it begins with, whoever trained before it in the same module.

*Tensors and attributes of the module are the client's, everything else is yours.*

Attributes are those of the module and its parts, with all that they hold: lists, dicts, objects,
tensors, arrays, generators of random numbers; not metrics, data sets, loaders and objects of torch and
Lightning. They are noted once per round and put back before every client, in place: a hook that
appends to a list of the module's goes on with the same list.

Global names, closures and attributes of classes are never put back. `Attributes.changes` can name those
that a step writes.
"""

from __future__ import annotations

import copy
import copyreg
import random
import sys
import types
import warnings
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator
from functools import cache, partial
from itertools import chain, islice
from operator import is_
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.utils.data import DataLoader, Dataset
from torchmetrics import Metric, MetricCollection

from fl_lightning.client.state.places import MISSING, Place, Value
from fl_lightning.core.errors import ConfigurationError

# What torch keeps of a module; hooks are not what a step computes.
_TORCHS = frozenset(vars(nn.Module())) - {"training"}
_ATOMS = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, torch.Size)
_CLOSED = (Metric, MetricCollection, Dataset, DataLoader, types.ModuleType)
_LIBRARIES = frozenset(
    [
        "fl_lightning",
        "jsonargparse",
        "lightning",
        "lightning_fabric",
        "matplotlib",
        "mlflow",
        "numpy",
        "pandas",
        "PIL",
        "pytorch_lightning",
        "scipy",
        "sklearn",
        "tensorboard",
        "torch",
        "torchmetrics",
        "torchvision",
        "tqdm",
        "wandb",
        *(sys.stdlib_module_names - {"__main__"}),
    ]
)
# of which objects hold what the user keeps in them
_BAGS = ("types.Simple", "argparse.Name", "torch.amp.grad_scaler", "torch.distributions")
_GENERATORS: tuple[tuple[type, Any, Any], ...] = (
    (random.Random, random.Random.getstate, random.Random.setstate),
    (np.random.RandomState, lambda g: g.get_state(legacy=False), np.random.RandomState.set_state),
    (torch.Generator, torch.Generator.get_state, torch.Generator.set_state),
    (
        np.random.Generator,
        lambda g: g.bit_generator.state,
        lambda g, state: setattr(g.bit_generator, "state", state),
    ),
)
# What lists got, by the number of their place.
Growth = list[tuple[int, Any]]


class Attributes:
    """A snapshot of the attributes of a module and its parts.

    Args:
        module: whose attributes.
        ignore: names of attributes of the module, and of parts of its kind, that are no concern of
            the user's, e.g. Lightning's ``_trainer``.
        outside: find other changes as well: flags of parameters, Python's and NumPy's generators, and
            globals, closures and class attributes that methods name, which are never put back.

    Example:
        >>> module = nn.Linear(1, 1)
        >>> module.n, module.outputs = 0, []
        >>> state = Attributes(module)
        >>> module.n += 1
        >>> module.outputs.append(1.5)
        >>> state.changes()
        ['self.n (0 -> 1)', 'self.outputs (0 -> 1 items)']
        >>> state.put_back()
        >>> module.n, module.outputs, state.changes()
        (0, [], [])
    """

    def __init__(
        self, module: nn.Module, *, ignore: Collection[str] = (), outside: bool = False
    ) -> None:
        self._module, self._ignore, self._outside = module, frozenset(ignore), outside
        self._kinds = tuple(kind for kind in type(module).__mro__ if _is_lightnings(kind))
        self._places, self._values = list[Place](), list[Value]()
        tensors = [*module.parameters(), *module.buffers()]
        self._seen: dict[int, Any] = {id(tensor): tensor for tensor in tensors}  # kept alive
        self._memory = {_memory(tensor) for tensor in tensors} - {0}
        # what is the module's comes first: it is put back, whoever else holds it
        self._waiting = deque[tuple[str, Any]](), deque[tuple[str, Any]]()
        self._later("self", module)
        while waiting := self._waiting[0] or self._waiting[1]:
            self._look_at(*waiting.popleft(), waiting is self._waiting[1])
        if outside:
            for name, param in module.named_parameters():
                read = partial(getattr, param, "requires_grad")
                self._add(f"self.{name}.requires_grad", read, param.requires_grad_)
            self._add("Python's random", random.getstate, random.setstate)
            read_numpy = partial(np.random.get_state, legacy=False)
            self._add("NumPy's random", read_numpy, np.random.set_state)
        # one pass in C over the entries of all containers tells that nothing has changed
        self._odd = [place for place in self._places if place.ignore]
        self._held = [place.held for place in self._places if not place.ignore]
        self._sizes = [*map(len, self._held)]
        # names of attributes do not change alone
        keyed = [p.held for p in self._places if not p.has_attributes]
        dicts = [held.values() for held in self._held if isinstance(held, dict)]
        self._views = [*dicts, *keyed]
        self._lists = [(i, p) for i, p in enumerate(self._places) if not p.has_attributes]
        self._entries = [*chain.from_iterable(self._views)]

    def _has_same_entries(self) -> bool:
        return (
            [*map(len, self._held)] == self._sizes
            and all(map(is_, chain.from_iterable(self._views), self._entries))
            and all(place.is_same() for place in self._odd)
        )

    def is_same(self) -> bool:
        """True if every object is the very same, not only equal."""
        return self._has_same_entries() and all(value.is_same() for value in self._values)

    def changes(self) -> list[str]:
        """Descriptions of what differs now; [] if nothing does."""
        kept: list[Place | Value] = [*self._places, *self._values]
        return [words for each in kept if not each.is_same() for words in each.differences()]

    def changes_outside(self) -> list[str]:
        """Those of `changes` that are never put back: globals, closures, class attributes."""
        kept: list[Place | Value] = [place for place in self._places if place.is_users]
        kept += [value for value in self._values if value.write is None]
        return [words for each in kept if not each.is_same() for words in each.differences()]

    def put_back(self) -> None:
        """Put everything back in place, which costs next to nothing if nothing has changed.

        Raises:
            ConfigurationError: if an iterator has gone on, which cannot be wound back.
        """
        for value in self._values:
            if value.write is not None and not value.is_same():
                value.write(value.before)
        if not self._has_same_entries():
            for place in reversed(self._places):  # what is inside first
                if not place.is_users and not place.is_same():
                    place.put_back()

    def growth(self) -> Growth:
        """Items appended to lists that begin as they did, and lists under new keys."""
        return [
            (index, added)
            for index, place in self._lists
            if len(place.held) > len(place.before)
            and not place.is_users
            and (added := place.growth())
        ]

    def grow(self, growth: Growth) -> None:
        """Append to lists what `growth` returned, perhaps several times."""
        for index, added in growth:
            self._places[index].grow(added)

    def _later(self, path: str, value: Any, is_users: bool = False) -> None:
        if type(value) not in _ATOMS and value is not MISSING:
            self._waiting[is_users].append((path, value))

    def _add(self, path: str, read: Any, write: Any, before: Any = MISSING) -> None:
        self._values.append(Value(path, read, write, read() if before is MISSING else before))

    def _add_place(self, place: Place, names: Collection[str] = ()) -> None:
        self._places.append(place)
        is_dict = isinstance(place.before, dict)
        for key, value in place.before.items() if is_dict else enumerate(place.before):
            if not is_dict or key not in names:
                self._later(f"{place.path}.{key}", value, place.is_users)

    def _look_at(self, path: str, value: Any, is_users: bool) -> None:
        if id(value) in self._seen or isinstance(value, _CLOSED):
            return
        self._seen[id(value)] = value
        look = next((look for kinds, look in _LOOKS if isinstance(value, kinds)), "object")
        getattr(self, f"_look_at_{look}")(path, value, is_users)

    def _look_at_tensor(self, path: str, tensor: Tensor, is_users: bool) -> None:
        if _memory(tensor) in self._memory:
            return  # a parameter or buffer, seen another way
        before = tensor.detach().clone().requires_grad_(tensor.requires_grad)
        write = None if is_users else partial(_write_tensor, tensor)
        self._add(path, lambda: tensor, write, before)
        if tensor.is_leaf:
            write = None if is_users else partial(setattr, tensor, "grad")
            self._add(f"{path}.grad", lambda: tensor.grad, write)

    def _look_at_array(self, path: str, array: Any, is_users: bool) -> None:
        if array.flags.writeable:
            write = partial(array.__class__.__setitem__, array, ...)
            self._add(path, lambda: array, None if is_users else write, array.copy())

    def _look_at_scripted(self, path: str, module: Any, is_users: bool) -> None:
        """A scripted module keeps attributes where Python cannot look."""
        own = {name for name, _ in (*module.named_parameters(), *module.named_buffers())}
        for name in module._concrete_type.get_attributes().keys() - own:
            before = copy.deepcopy(module._c.getattr(name))
            write = partial(module._c.setattr, name)
            self._add(f"{path}.{name}", partial(module._c.getattr, name), write, before)
        for name, part in module.named_children():
            self._later(f"{path}.{name}", part)

    def _look_at_module(self, path: str, module: nn.Module, is_users: bool) -> None:
        hooks = module._forward_pre_hooks.values()
        torchs = [hook for hook in hooks if type(hook).__module__.startswith("torch.nn.utils.")]
        # the older weight norm and pruning set an attribute in every forward, as they need it
        ignore = {getattr(h, "name", getattr(h, "_tensor_name", "")) for h in torchs}
        if module is self._module or isinstance(module, self._kinds):
            ignore |= self._ignore
        own = vars(module)
        ignore |= _TORCHS if ignore else set()  # which are the same objects for ever
        self._add_place(Place(path, own, is_users, ignore, has_attributes=True), _TORCHS)
        for members in (own["_parameters"], own["_buffers"], own["_modules"]):
            self._add_place(Place(path, members, is_users, has_attributes=True))
        self._look_at_kinds(type(module))

    def _look_at_container(self, path: str, held: Any, is_users: bool) -> None:
        self._add_place(Place(path, held, is_users))
        if type(held).__module__ != "collections":
            self._look_at_object(path, held, is_users)

    def _look_at_fixed(self, path: str, items: Iterable[Any], is_users: bool) -> None:
        for index, item in enumerate(items):
            self._later(f"{path}[{index}]", item, is_users)

    def _look_at_bound(self, path: str, bound: Any, is_users: bool) -> None:
        parts = (bound.func, bound.args, bound.keywords) if isinstance(bound, partial) else ()
        self._look_at_fixed(path, parts or (bound.__self__, bound.__func__), is_users)

    def _look_at_iterator(self, path: str, iterator: Any, is_users: bool) -> None:
        if type(iterator).__module__ in ("builtins", "itertools"):  # not a loader's
            refuse = partial(_refuse_iterator, path)
            self._add(path, partial(_ahead, iterator), None if is_users else refuse)

    def _look_at_object(self, path: str, value: Any, is_users: bool) -> None:
        for kinds, read, write in _GENERATORS:
            if isinstance(value, kinds) and not isinstance(value, random.SystemRandom):
                writes = None if is_users else partial(write, value)
                self._add(path, partial(read, value), writes)
                return
        kind = type(value)
        is_bag = f"{kind.__module__}.{kind.__name__}".startswith(_BAGS)
        is_librarys = kind.__module__.partition(".")[0] in _LIBRARIES and not is_bag
        if is_librarys or any(map(_is_lightnings, kind.__mro__)):
            return
        for name in copyreg._slotnames(kind) or ():  # type: ignore[attr-defined]
            read = partial(getattr, value, name, MISSING)
            writes = None if is_users else partial(_write_slot, value, name)
            self._add(f"{path}.{name}", read, writes)
            self._later(f"{path}.{name}", read(), is_users)
        if type(getattr(value, "__dict__", None)) is dict:
            self._add_place(Place(path, vars(value), is_users, has_attributes=True))
        self._look_at_kinds(kind)

    # What is outside of the attributes: changes are found, and never put back.

    def _look_at_kinds(self, kind: type) -> None:
        for each in kind.__mro__ if self._outside else ():
            self._later(each.__name__, each, is_users=True)

    def _look_at_class(self, path: str, kind: type, is_users: bool) -> None:
        if not self._outside or not _is_users_code(kind.__module__) or hasattr(kind, "__members__"):
            return
        own = vars(kind)
        hidden = {name for name in own if name.startswith("__") or name == "_abc_impl"}
        place = Place(f"class {kind.__name__}", own, True, hidden, has_attributes=True)
        self._add_place(place)
        for value in own.values():
            for way in ("__func__", "fget", "__wrapped__"):
                value = getattr(value, way, value)
            if isinstance(value, types.FunctionType):
                self._later(value.__name__, value, is_users=True)

    def _look_at_function(self, path: str, function: types.FunctionType, is_users: bool) -> None:
        if not self._outside or not _is_users_code(function.__module__):
            return
        cells = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
        for name, cell in cells:
            self._add_named(f"{name} around {function.__qualname__}", partial(_content, cell))
        defaults = (*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values())
        self._look_at_fixed(f"defaults of {function.__qualname__}", defaults, is_users=True)
        self._look_at_globals(function.__globals__, _names_in(function.__code__))

    def _look_at_globals(self, held: dict[str, Any], names: Collection[str]) -> None:
        for name in names:
            value = held.get(name, MISSING)
            if not isinstance(value, types.ModuleType):
                path = f"global {name} of {held.get('__name__')}"
                self._add_named(path, partial(held.get, name, MISSING))
            elif _is_users_code(value.__name__) and id(value) not in self._seen:
                self._seen[id(value)] = value
                self._look_at_globals(vars(value), names)

    def _add_named(self, path: str, read: Callable[[], Any]) -> None:
        if not isinstance(read(), (types.FunctionType, type)):
            self._add(path, read, None)
        self._later(path, read(), is_users=True)


# What is looked at in which way; anything else is an object.
_LOOKS: tuple[tuple[Any, str], ...] = (
    (Tensor, "tensor"),
    (np.ndarray, "array"),
    (torch.jit.ScriptModule, "scripted"),
    (nn.Module, "module"),
    ((dict, list, deque, set), "container"),
    ((tuple, frozenset), "fixed"),
    ((types.MethodType, partial), "bound"),
    (types.FunctionType, "function"),
    (type, "class"),
    (Iterator, "iterator"),
)


def _memory(tensor: Tensor) -> int:
    is_plain = tensor.layout == torch.strided and not tensor.is_meta and not is_lazy(tensor)
    return tensor.untyped_storage().data_ptr() if is_plain else 0


def _write_tensor(tensor: Tensor, before: Tensor) -> None:
    with torch.no_grad():
        if tensor.shape == before.shape and tensor.dtype == before.dtype:
            tensor.copy_(before)
        else:
            tensor.data = before.detach().clone()
    if tensor.is_leaf:
        tensor.requires_grad_(before.requires_grad)


def _write_slot(owner: Any, name: str, value: Any) -> None:
    if value is MISSING:
        object.__delattr__(owner, name)
    else:
        object.__setattr__(owner, name, value)


def _ahead(iterator: Any) -> Any:
    """The next items of an iterator, or where a generator is."""
    if isinstance(iterator, types.GeneratorType):
        frame = iterator.gi_frame
        return None if frame is None else (frame.f_lasti, dict(frame.f_locals))
    with warnings.catch_warnings():  # Python 3.12 and 3.13 say that 3.14 will not
        warnings.simplefilter("ignore", DeprecationWarning)
        try:
            return [*islice(copy.deepcopy(iterator), 64)]
        except TypeError:
            return repr(iterator)


def _refuse_iterator(path: str, before: Any) -> None:
    raise ConfigurationError(
        f"{path} is an iterator that the training step advances, and cannot be wound back for the "
        "next client: keep a list and a position on the module instead"
    )


def _content(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # not set yet
        return MISSING


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
