"""Type checks of constructor arguments against their annotations.

The command line turns ``correction: FedProx`` into an object; Python does not, and a value of the wrong
type would be found rounds later, or never. So constructors of exported classes check their arguments, see
`exports`. An object fits a class of ours if it has the abstract methods.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import is_dataclass
from functools import cache, wraps
from importlib import import_module
from itertools import islice
from numbers import Integral, Real
from pathlib import PurePath
from types import UnionType
from typing import Any, Literal, Union, cast, get_args, get_origin, get_type_hints

from typing_extensions import get_protocol_members, is_protocol

from fl_lightning.core.errors import ConfigurationError
from fl_lightning.core.public_names import exported, public_paths

# built-in types in a message
IN_WORDS: Mapping[Any, str] = {
    int: "a whole number",
    float: "a number",
    bool: "True or False",
    str: "a text",
    type(None): "None",
    list: "a list",
    tuple: "a list",
    dict: "a mapping",
}
# methods that a value of another type needs to stand for a built-in type; others are not checked
_METHODS: dict[Any, tuple[str, ...]] = {
    **dict.fromkeys((int, float, bool, str, type(None)), ("is an instance",)),
    **dict.fromkeys((list, tuple, Sequence), ("__len__", "__getitem__")),
    **dict.fromkeys((dict, Mapping), ("keys", "__getitem__")),
    Callable: ("__call__",),
}
_MOST_ENTRIES = 100  # checked entries of a list
_MOST_CHARACTERS = 100  # shown characters of a value in a message
_VARIADIC = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


def exports(file: str, module: Mapping[str, Any]) -> Iterator[str]:
    """Yield a package's exported names; its classes' constructors check argument types from then on.

    Args:
        file: path of the package's ``__init__``.
        module: namespace of the package.
    """
    for name in exported(file):
        with_checked_kinds(module[name])
        yield name


def with_checked_kinds(found: Any) -> Any:
    """Make the constructor of a class of this package check argument types, and return the class."""
    for owner in found.__mro__ if inspect.isclass(found) else ():
        build = vars(owner).get("__init__")
        if build is None or not owner.__module__.startswith("fl_lightning."):
            continue
        if not (is_protocol(owner) or hasattr(build, "checks_kinds")):
            setattr(owner, "__init__", _checked(build))  # noqa: B010 - mypy
        if all(each.kind not in _VARIADIC for each in inspect.signature(build).parameters.values()):
            break  # else a base's constructor gets the remaining arguments
    return found


def _checked(build: Callable[..., None]) -> Callable[..., None]:
    signature = inspect.signature(build)
    variadic = {name for name, each in signature.parameters.items() if each.kind in _VARIADIC}

    @wraps(build)
    def build_checked(self: Any, *args: Any, **options: Any) -> None:
        with suppress(TypeError):  # the constructor itself reports missing or unknown arguments
            given = signature.bind(self, *args, **options).arguments
            check_kinds(build, {name: given[name] for name in given.keys() - variadic})
        build(self, *args, **options)

    build_checked.checks_kinds = True  # type: ignore[attr-defined]
    return build_checked


def check_kinds(function: Callable[..., Any], arguments: Mapping[str, Any]) -> None:
    """Raise ConfigurationError if arguments do not have the types that a function's annotations name.

    Args:
        function: a function with annotations, such as a constructor.
        arguments: arguments by name; those without a readable annotation are not checked.

    Raises:
        ConfigurationError: naming every wrong argument, with the call to write.

    Example:
        >>> def fit(*, rounds: int | None = None, rate: float = 0.1) -> None: ...
        >>> check_kinds(fit, {"rounds": 3, "rate": 1})
        >>> check_kinds(fit, {"rounds": 3.0, "rate": "0.1"})
        Traceback (most recent call last):
        ...
        fl_lightning.core.errors.ConfigurationError: rounds must be a whole number or None, got 3.0: \
write rounds=3
        rate must be a number, got the text '0.1': write rate=0.1
    """
    allowed = _allowed(function)
    problems = [
        problem
        for name, value in arguments.items()
        if name in allowed and (problem := _problem(name, value, allowed[name]))
    ]
    if problems:
        raise ConfigurationError("\n".join(problems))


@cache
def _allowed(function: Callable[..., Any]) -> Mapping[str, tuple[Any, ...]]:
    try:
        hints = get_type_hints(function)
    except NameError:  # of a type that only type checkers import
        return {}
    return {name: tuple(alternatives(hint)) for name, hint in hints.items()}


def alternatives(hint: Any) -> Iterator[Any]:
    """Yield the members of a union type, also of nested unions."""
    if get_origin(hint) not in (Union, UnionType):
        yield hint
        return
    for part in get_args(hint):
        yield from alternatives(part)


def _problem(name: str, value: Any, allowed: Sequence[Any]) -> str | None:
    if any(_fits(value, each) for each in allowed):
        return None
    words = list(dict.fromkeys(map(in_words, allowed)))
    got = _shown(value)
    if got == _of_class(value):  # else the value itself tells why
        lacks = (n for kind in allowed for n in _methods(get_origin(kind) or kind))
        missing = [n for n in dict.fromkeys(lacks) if n.isidentifier() and not hasattr(value, n)]
        got += f", which lacks {', '.join(missing)}" if missing else ""
    return f"{name} must be {' or '.join(words)}, got {got}{_instead(name, value, allowed)}"


def _fits(value: Any, hint: Any) -> bool:
    """Return whether a value fits a type; for base classes of this package, having the abstract methods is enough."""
    plain = get_origin(hint) or hint
    if get_origin(hint) is Literal:
        return value in get_args(hint)
    if not inspect.isclass(plain) or plain in (Any, object):  # a type variable, say
        return True
    if inspect.isclass(value):  # for a function, a class does
        is_abstract = inspect.isabstract(plain) or is_protocol(plain)
        return plain is type or ("__call__" in vars(plain) and is_abstract)
    for kinds, fits in _PLAIN_VALUES:
        if isinstance(value, kinds):
            return fits(type(value), plain)
    if isinstance(value, (list, tuple)) and (inner := entries(hint)):
        some = islice(value, _MOST_ENTRIES)
        return all(any(_fits(each, one) for one in alternatives(inner[0])) for each in some)
    if not is_protocol(plain) and isinstance(value, plain):
        return True
    # for a class of another package, only built-in containers are known not to fit
    needed = _methods(cast(Hashable, plain))
    is_pythons = type(value) in (list, tuple, set, object, complex)
    return all(hasattr(value, name) for name in needed) and not (is_pythons and not needed)


def entries(hint: Any) -> tuple[Any, ...]:
    """Return the type of a list's or sequence's elements, in a tuple; empty for other types."""
    is_list = get_origin(hint) in (list, Sequence) or get_args(hint)[1:] == (...,)
    return get_args(hint) if is_list else ()


@cache
def _methods(kind: type) -> tuple[str, ...]:
    """Return the methods by which an object is accepted as a type; if only instances are, a name that no object has."""
    if is_protocol(kind):
        return tuple(get_protocol_members(kind))
    if kind.__module__.startswith("fl_lightning."):
        has_more = is_dataclass(kind) or hasattr(kind, "is_nominal")  # than methods
        abstract = () if has_more else tuple(getattr(kind, "__abstractmethods__", ()))
        return abstract or ("is an instance",)
    return _METHODS.get(kind, ())


# for plain values, by type: whether the value's type fits the annotated type; the first match counts
_PLAIN_VALUES: tuple[tuple[Any, Callable[[type, type], bool]], ...] = (
    ((bool, type(None)), lambda own, plain: plain is own),
    (Integral, lambda own, plain: plain in (int, float, complex)),
    (Real, lambda own, plain: plain is float),
    # a dict of options stands for an object only if the class has `from_options`
    (dict, lambda own, plain: issubclass(own, plain) or getattr(plain, "from_options", False)),
    ((str, bytes), lambda own, plain: plain is own or issubclass(plain, PurePath)),
)


def in_words(hint: Any, words: Mapping[Any, str] = IN_WORDS) -> str:
    """Describe a type in words for a message, e.g. ``a list (each entry a whole number)``.

    Args:
        hint: the type.
        words: descriptions of single types; others are described by their name.
    """
    if get_origin(hint) is Literal:
        return f"one of {', '.join(map(repr, get_args(hint)))}"
    plain = get_origin(hint) or hint
    if inner := entries(hint):
        each = dict.fromkeys(in_words(one, words) for one in alternatives(inner[0]))
        return f"a list (each entry {' or '.join(each)})"
    name = getattr(plain, "__name__", str(plain))
    return words.get(plain, f"{'an' if name[0] in 'AEIO' else 'a'} {name}")


def _shown(value: Any) -> str:
    if inspect.isclass(value):
        return f"the class {value.__name__}"
    shown = f"the text {value!r}" if isinstance(value, str) else repr(value)
    if " object at 0x" in shown:
        return _of_class(value)
    return shown if len(shown) <= _MOST_CHARACTERS else f"{shown[:_MOST_CHARACTERS]}…"


def _of_class(value: Any) -> str:
    return f"an object of the class {type(value).__name__}"


def is_accepted(name: str, allowed: Sequence[Any]) -> bool:
    """Return whether objects of an exported class may fit one of the types, judged by the class's bases."""
    package, _, name = public_paths()[name].rpartition(".")
    found = getattr(import_module(package), name)
    inner = [one for kind in allowed for entry in entries(kind) for one in alternatives(entry)]
    kinds = [get_origin(kind) or kind for kind in (*allowed, *inner)]
    bases = [kind for kind in kinds if inspect.isclass(kind) and kind not in IN_WORDS]
    are_classes = inspect.isclass(found) and not any(map(is_protocol, bases))
    return not are_classes or any(issubclass(found, base) for base in bases)


def _instead(name: str, value: Any, allowed: Sequence[Any]) -> str:
    """Return advice for a wrong argument: the correct call to write; empty if unknown."""
    if inspect.isclass(value):
        return f": write {name}={value.__name__}(…)"
    is_list = any(map(entries, allowed))
    if isinstance(value, str) and value in public_paths() and is_accepted(value, allowed):
        package = public_paths()[value].rpartition(".")[0]
        made = f"[{value}(…)]" if is_list else f"{value}(…)"
        return f": write {name}={made}, from {package} import {value}"
    if isinstance(value, str) and is_list:
        return f": write {name}=[{value!r}]"
    is_whole = isinstance(value, float) and value.is_integer()
    if int in allowed and (is_whole or (isinstance(value, str) and value.lstrip("-").isdigit())):
        return f": write {name}={int(value)}"
    if float in allowed and isinstance(value, str) and value.replace(".", "", 1).isdigit():
        return f": write {name}={value}"
    return ""
