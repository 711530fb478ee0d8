"""The attributes of a client's state, which every client finds as the round began, whoever trained before it.

*Tensors and attributes of the module are the client's, everything else is yours.*

Attributes are those of the module and its parts, with all that they hold: lists, dicts, objects, tensors,
arrays, generators of random numbers; not metrics, data sets, loaders and objects of torch and Lightning.
They are noted once per round and put back before every client, in place: whoever else holds a list of the
module's, such as a hook, goes on with the same list. An iterator cannot be wound back and is refused.

Global names, closures and attributes of classes are never put back; a rehearsal tells which a step writes.
"""

from __future__ import annotations

import copy
import copyreg
import random
import sys
import types
from collections import OrderedDict, deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache, partial
from itertools import chain
from operator import is_
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.utils.data import DataLoader, Dataset
from torchmetrics import Metric, MetricCollection

from fl_lightning.client.state.tensors import same_value
from fl_lightning.core.errors import ConfigurationError

# What torch keeps of a module; hooks are not what a step computes.
_TORCHS = frozenset(vars(nn.Module())) - {"training", "_parameters", "_buffers", "_modules"}
_ATOMS = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, torch.Size)
_CLOSED = (Metric, MetricCollection, Dataset, DataLoader, types.ModuleType, type)
# Whose objects hold nothing of the user's, but for some.
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
_MISSING = object()
# What lists got, by the number of their place.
Growth = list[tuple[int, Any]]
_Inside = Iterable[tuple[Any, Any]]


@dataclass
class _Noted:
    """Something that changes in place, and what it held.

    Attributes:
        path: where it is.
        read: returns what it holds now.
        write: puts back what it held; None for what is outside of the attributes.
        before: what it held.
        held: a container, whose entries are compared by identity; None for a value, which is compared as
            a whole.
        has_names: whether its keys are names of attributes, whose order does not matter.
        ignored: names of attributes that are somebody else's.
    """

    path: str
    read: Callable[[], Any]
    write: Callable[[Any], object] | None
    before: Any = _MISSING
    held: Any = None
    has_names: bool = False
    ignored: Collection[str] = frozenset()

    def __post_init__(self) -> None:
        self.before = self.read() if self.before is _MISSING else self.before

    def is_same(self) -> bool:
        """True if a container holds the very same objects, or a value is equal."""
        held, before = self.held, self.before
        if self.has_names:
            if held.keys() - self.ignored != before.keys():
                return False
            return all(map(is_, map(held.__getitem__, before), before.values()))
        now = self.read()
        if held is None or isinstance(before, set):
            return same_value(now, before)
        if isinstance(before, dict):
            if [*now] != [*before]:
                return False
            now, before = now.values(), before.values()
        return len(now) == len(before) and all(map(is_, now, before))

    def differences(self) -> list[str]:
        now, before = self.read(), self.before
        if not self.has_names:
            return [] if same_value(now, before) else [_described(self.path, before, now)]
        pairs = ((k, before.get(k, _MISSING), now.get(k, _MISSING)) for k in {**before, **now})
        return [_described(f"{self.path}.{k}", b, n) for k, b, n in pairs if not same_value(n, b)]

    def growth(self) -> Any:
        """Items appended to a list, or lists under new keys of a dict, if nothing else changed."""
        now, before = self.read(), self.before
        if isinstance(self.held, list):
            return now[len(before) :] if all(map(is_, now, before)) else None
        if not isinstance(self.held, dict) or self.has_names:
            return None
        new = {key: value for key, value in now.items() if key not in before}
        kept = all(now.get(key, _MISSING) is value for key, value in before.items())
        return new if kept and all(type(value) is list for value in new.values()) else None

    def grow(self, added: Any) -> None:
        """Append what `growth` returned."""
        if isinstance(self.held, list):
            list.extend(self.held, added)
        else:
            for key, items in added.items():
                dict.__setitem__(self.held, key, [*self.held.get(key, ()), *items])


class Attributes:
    """A snapshot of the attributes of a module and its parts.

    Args:
        module: whose attributes.
        ignore: names of attributes of the module, and of parts of its kind, that are no concern of
            the user's, e.g. Lightning's ``_trainer``.
        outside: find other changes as well: which parameters train, Python's and NumPy's generators,
            and globals, closures and class attributes that functions name, which are never put back.

    Raises:
        ConfigurationError: if an attribute is an iterator.

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
        self._ignore = frozenset(ignore)
        self._kinds = (type(module), *filter(_is_lightnings, type(module).__mro__))
        tensors = [*module.parameters(), *module.buffers()]
        self._seen: dict[int, Any] = {id(tensor): tensor for tensor in tensors}  # kept alive
        self._memory = {_memory(tensor) for tensor in tensors} - {0}
        self._noted: list[_Noted] = []
        self._walk([("self", module)])
        if outside:
            self._note_generators(module)
            self._note_outside()
        # one pass in C over the entries of all containers tells that nothing has changed
        self._rest = [each for each in self._noted if each.held is None or each.ignored]
        whole = [each for each in self._noted if each.held is not None and not each.ignored]
        self._views = [n.held.values() if isinstance(n.held, dict) else n.held for n in whole]
        # names of attributes do not change alone
        self._views += [n.held for n in whole if isinstance(n.held, dict) and not n.has_names]
        self._sizes, self._entries = [*map(len, self._views)], [*chain.from_iterable(self._views)]

    def is_same(self) -> bool:
        """True if every object is the very same, not only equal."""
        return (
            [*map(len, self._views)] == self._sizes
            and all(map(is_, chain.from_iterable(self._views), self._entries))
            and all(each.is_same() for each in self._rest)
        )

    def changes(self) -> list[str]:
        """Descriptions of what differs now; [] if nothing does."""
        return _differences(self._noted)

    def changes_outside(self) -> list[str]:
        """Those of `changes` that are never put back: globals, closures, class attributes."""
        return _differences(each for each in self._noted if each.write is None)

    def put_back(self) -> None:
        """Put everything back in place; `is_same` tells at next to no cost whether there is anything."""
        for each in self._noted:
            if each.write is not None and not each.is_same():
                each.write(each.before)

    def growth(self) -> Growth:
        """Items appended to lists that begin as they did, and lists under new keys."""
        own = [(i, each) for i, each in enumerate(self._noted) if each.write is not None]
        return [(index, added) for index, each in own if (added := each.growth())]

    def grow(self, growth: Growth) -> None:
        """Append to lists what `growth` returned, perhaps several times."""
        for index, added in growth:
            self._noted[index].grow(added)

    def _walk(self, waiting: list[tuple[str, Any]]) -> None:
        """Note what some values hold, and what that holds in turn."""
        while waiting:
            path, value = waiting.pop()
            if type(value) in _ATOMS or id(value) in self._seen or isinstance(value, _CLOSED):
                continue
            self._seen[id(value)] = value
            looks = (look for kinds, look in _LOOKS if isinstance(value, kinds))
            inside = next(looks, Attributes._look_at_object)(self, path, value)
            waiting += [(f"{path}.{name}", each) for name, each in reversed([*inside])]

    def _note(self, path: str, read: Any, write: Any, **more: Any) -> _Noted:
        self._noted.append(_Noted(path, read, write, **more))
        return self._noted[-1]

    def _look_at_tensor(self, path: str, tensor: Tensor) -> _Inside:
        if _memory(tensor) in self._memory:
            return ()  # a parameter or buffer, seen another way
        with torch.inference_mode(False):  # what is noted is compared outside as well
            before = tensor.detach().clone().requires_grad_(tensor.requires_grad)
        self._note(path, lambda: tensor, partial(_write_tensor, tensor), before=before)
        if tensor.is_leaf:
            self._note(f"{path}.grad", lambda: tensor.grad, partial(setattr, tensor, "grad"))
        return ()

    def _look_at_array(self, path: str, array: Any) -> _Inside:
        if array.flags.writeable:
            write = partial(array.__class__.__setitem__, array, ...)
            self._note(path, lambda: array, write, before=array.copy())
        return ()

    def _look_at_scripted(self, path: str, module: Any) -> _Inside:
        """A scripted module keeps attributes where Python cannot look."""
        own = {name for name, _ in (*module.named_parameters(), *module.named_buffers())}
        for name in module._concrete_type.get_attributes().keys() - own:
            read, write = partial(module._c.getattr, name), partial(module._c.setattr, name)
            self._note(f"{path}.{name}", read, write, before=copy.deepcopy(read()))
        return module.named_children()  # type: ignore[no-any-return]

    def _look_at_module(self, path: str, module: nn.Module) -> _Inside:
        # the older weight norm and pruning set an attribute in every forward, as they need it
        hooks = module._forward_pre_hooks.values()
        torchs = [hook for hook in hooks if type(hook).__module__.startswith("torch.nn.utils.")]
        ignore = {getattr(h, "name", getattr(h, "_tensor_name", "")) for h in torchs}
        ignore |= self._ignore if isinstance(module, self._kinds) else set()
        inside = self._note_attributes(path, vars(module), ignore)
        return [(name, value) for name, value in inside if name not in _TORCHS]

    def _look_at_container(self, path: str, held: Any) -> _Inside:
        """Not by the class's own methods, which may do more than to set an entry."""
        kind: Any = next(kind for kind in _CONTAINERS if isinstance(held, kind))
        read, write = _CONTAINERS[kind]
        self._note(path, partial(read, held), partial(write, held), held=held)
        inside = [*(held.items() if isinstance(held, dict) else enumerate(held))]
        is_users = type(held).__module__ not in ("builtins", "collections")
        return [*inside, *(self._look_at_object(path, held) if is_users else ())]

    def _look_at_iterator(self, path: str, iterator: Any) -> _Inside:
        if type(iterator).__module__ in ("builtins", "itertools"):  # not a loader's
            raise ConfigurationError(
                f"{path} is an iterator, which cannot be wound back for the next client: keep a list "
                "and a position on the module instead"
            )
        return self._look_at_object(path, iterator)

    def _look_at_object(self, path: str, value: Any) -> _Inside:
        for kinds, read, write in _GENERATORS:
            if isinstance(value, kinds) and not isinstance(value, random.SystemRandom):
                self._note(path, partial(read, value), partial(write, value))
                return ()
        kind, inside = type(value), list[tuple[Any, Any]]()
        is_bag = f"{kind.__module__}.{kind.__name__}".startswith(_BAGS)
        is_librarys = kind.__module__.partition(".")[0] in _LIBRARIES and not is_bag
        if is_librarys or any(map(_is_lightnings, kind.__mro__)):
            return ()
        for name in copyreg._slotnames(kind) or ():  # type: ignore[attr-defined]
            read = partial(getattr, value, name, _MISSING)
            noted = self._note(f"{path}.{name}", read, partial(_write_slot, value, name))
            inside.append((name, noted.before))
        if type(getattr(value, "__dict__", None)) is dict:
            inside += self._note_attributes(path, vars(value))
        return inside

    def _note_attributes(
        self, path: str, own: dict[str, Any], ignore: Collection[str] = frozenset()
    ) -> _Inside:
        """Note an object's attributes, but for those that are somebody else's."""
        read = partial(_attributes, own, ignore)

        def write(before: dict[str, Any]) -> None:
            for name in read():
                del own[name]
            own.update(before)  # in the same order

        noted = self._note(path, read, write, held=own, has_names=True, ignored=ignore)
        return noted.before.items()  # type: ignore[no-any-return]

    # What is outside of the attributes: changes are found, and never put back.

    def _note_generators(self, module: nn.Module) -> None:
        for name, param in module.named_parameters():
            read = partial(getattr, param, "requires_grad")
            self._note(f"self.{name}.requires_grad", read, param.requires_grad_)
        read_numpy = partial(np.random.get_state, legacy=False)
        self._note("Python's random", random.getstate, random.setstate)
        self._note("NumPy's random", read_numpy, np.random.set_state)

    def _note_outside(self) -> None:
        """Note attributes of the classes met, and what the functions met find in globals and closures."""
        num_own = len(self._noted)
        met = [*self._seen.values()]
        functions: list[Any] = [each for each in met if isinstance(each, types.FunctionType)]
        for kind in dict.fromkeys(kind for each in met for kind in type(each).__mro__):
            if _is_users_code(kind.__module__) and not hasattr(kind, "__members__"):  # no enum
                own, path = vars(kind), f"class {kind.__name__}"
                ignored = {name for name in own if name.startswith(("__", "_abc_impl"))}
                read = partial(_attributes, own, ignored)
                noted = self._note(path, read, None, held=own, has_names=True, ignored=ignored)
                self._walk([(f"{path}.{name}", value) for name, value in noted.before.items()])
                functions += map(_function_in, vars(kind).values())
        known = set[int]()
        for function in functions:  # grows meanwhile
            if not isinstance(function, types.FunctionType) or id(function) in known:
                continue
            known.add(id(function))
            for path, get in _named_by(function) if _is_users_code(function.__module__) else ():
                value = get()
                functions.append(value)
                if not isinstance(value, (types.FunctionType, type)):
                    self._note(path, get, None)
                    self._walk([(path, value)])
        for each in self._noted[num_own:]:
            each.write = None


# What is looked at in which way; anything else is an object.
_LOOKS: tuple[tuple[Any, Callable[[Attributes, str, Any], _Inside]], ...] = (
    (Tensor, Attributes._look_at_tensor),
    (np.ndarray, Attributes._look_at_array),
    (torch.jit.ScriptModule, Attributes._look_at_scripted),
    (nn.Module, Attributes._look_at_module),
    ((dict, list, deque, set), Attributes._look_at_container),
    ((tuple, frozenset), lambda _, path, items: enumerate(items)),
    (partial, lambda _, path, made: enumerate((made.func, made.args, made.keywords))),
    (types.MethodType, lambda _, path, method: enumerate((method.__self__, method.__func__))),
    (types.FunctionType, lambda *_: ()),
    (Iterator, Attributes._look_at_iterator),
)


def _filled(clear: Any, fill: Any) -> Callable[[Any, Any], None]:
    def write(held: Any, before: Any) -> None:
        clear(held)
        fill(held, before)

    return write


_CONTAINERS: dict[type, tuple[Any, Any]] = {
    OrderedDict: (dict, _filled(OrderedDict.clear, OrderedDict.update)),
    dict: (dict, _filled(dict.clear, dict.update)),
    list: (list, _filled(list.clear, list.extend)),
    deque: (list, _filled(deque.clear, deque.extend)),
    set: (set, _filled(set.clear, set.update)),
}


def _differences(noted: Iterable[_Noted]) -> list[str]:
    return [words for each in noted if not each.is_same() for words in each.differences()]


def _described(path: str, before: Any, now: Any) -> str:
    """Return a change in words, with the values where they are short."""
    if now is _MISSING or before is _MISSING:
        return f"{path} ({'removed' if now is _MISSING else 'new'})"
    plain = (int, float, str, type(None))
    if isinstance(before, plain) and isinstance(now, plain) and len(f"{before}{now}") < 48:
        return f"{path} ({before!r} -> {now!r})"
    sized = (list, tuple, dict, set, deque)
    if isinstance(before, sized) and isinstance(now, sized) and len(before) != len(now):
        return f"{path} ({len(before)} -> {len(now)} items)"
    return path


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
    if value is _MISSING:
        object.__delattr__(owner, name)
    else:
        object.__setattr__(owner, name, value)


def _attributes(own: Mapping[str, Any], ignored: Collection[str]) -> dict[str, Any]:
    return {name: value for name, value in own.items() if name not in ignored}


def _function_in(value: Any) -> Any:
    """The function behind a method, property or decorated function; the value itself if there is none."""
    return next(
        (getattr(value, w) for w in ("__func__", "fget", "__wrapped__") if hasattr(value, w)), value
    )


def _named_by(function: types.FunctionType) -> Iterator[tuple[str, Callable[[], Any]]]:
    """Yield the values that a user's function reads from closures and globals: place and reader."""
    cells = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
    for name, cell in cells:
        yield f"{name} around {function.__qualname__}", partial(_content, cell)
    waiting, names = [function.__globals__], _names_in(function.__code__)
    for held in waiting:  # grows by the user's own modules
        for name in names & held.keys():
            if not isinstance(value := held[name], types.ModuleType):
                path = f"global {name} of {held.get('__name__')}"
                yield path, partial(held.get, name, _MISSING)
            elif _is_users_code(value.__name__) and vars(value) not in waiting:
                waiting.append(vars(value))


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
