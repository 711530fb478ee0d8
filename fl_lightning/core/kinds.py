"""A check of arguments' kinds from annotations: a text, a number or a class where an object belongs.

The command line turns ``correction: FedProx`` into an object; Python does not. A value of the wrong kind
would be found rounds later, or never. Objects are not looked at: whoever has the methods fits.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from numbers import Integral, Real
from pathlib import PurePath
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from typing_extensions import is_protocol

from fl_lightning.core.errors import ConfigurationError
from fl_lightning.core.public_names import public_paths

_IN_WORDS = {
    int: "a whole number",
    float: "a number",
    bool: "True or False",
    str: "a text",
    type(None): "None",
    list: "a list",
    dict: "a mapping",
}


def check_kinds(function: Callable[..., Any], arguments: Mapping[str, Any]) -> None:
    """Refuse arguments of another kind than a function's annotations say.

    Args:
        function: with annotations, such as a constructor.
        arguments: by name; those without an annotation that can be read here are not looked at.

    Raises:
        ConfigurationError: naming all of them, with the call to write.

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
    try:
        hints = get_type_hints(function)
    except NameError:  # of a type that only type checkers import
        return
    problems = [
        problem
        for name, value in arguments.items()
        if name in hints and (problem := _problem(name, value, [*_alternatives(hints[name])]))
    ]
    if problems:
        raise ConfigurationError("\n".join(problems))


def _alternatives(hint: Any) -> Iterator[Any]:
    """Yield the types of a union, one inside another as well."""
    if get_origin(hint) not in (Union, UnionType):
        yield hint
        return
    for part in get_args(hint):
        yield from _alternatives(part)


def _problem(name: str, value: Any, allowed: list[Any]) -> str | None:
    if any(_fits(value, each) for each in allowed):
        return None
    words = list(dict.fromkeys(map(_in_words, allowed)))
    return (
        f"{name} must be {' or '.join(words)}, got {_shown(value)}{_instead(name, value, allowed)}"
    )


def _fits(value: Any, hint: Any) -> bool:
    """Return whether a value may be of a type: any object that is no plain value and no class may."""
    plain = get_origin(hint) or hint
    if get_origin(hint) is Literal:
        return value in get_args(hint)
    if not inspect.isclass(plain) or plain in (Any, object):  # a type variable, say
        return True
    if inspect.isclass(value):  # for a function, a class does
        return plain is type or ("__call__" in vars(plain) and _is_abstract(plain))
    for kinds, fits in _PLAIN_VALUES:
        if isinstance(value, kinds):
            return fits(type(value), plain)
    return plain not in (int, float, bool, str, type(None))


# by type of a value, the first that it is: whether a type of the value may be one of an annotation
_PLAIN_VALUES: tuple[tuple[Any, Callable[[type, type], bool]], ...] = (
    ((bool, type(None)), lambda own, plain: plain is own),
    (Integral, lambda own, plain: plain in (int, float, complex)),
    (Real, lambda own, plain: plain is float),
    (dict, lambda own, plain: issubclass(plain, Mapping) or plain in Mapping.__mro__),
    ((str, bytes), lambda own, plain: plain is own or issubclass(plain, PurePath)),
)


def _is_abstract(kind: type) -> bool:
    return inspect.isabstract(kind) or is_protocol(kind)


def _in_words(hint: Any) -> str:
    if get_origin(hint) is Literal:
        return f"one of {', '.join(map(repr, get_args(hint)))}"
    plain = get_origin(hint) or hint
    name = getattr(plain, "__name__", str(plain))
    return _IN_WORDS.get(plain, f"{'an' if name[0] in 'AEIO' else 'a'} {name}")


def _shown(value: Any) -> str:
    if inspect.isclass(value):
        return f"the class {value.__name__}"
    return f"the text {value!r}" if isinstance(value, str) else repr(value)


def _instead(name: str, value: Any, allowed: list[Any]) -> str:
    """Return the call to write, if it can be told."""
    if inspect.isclass(value):
        return f": write {name}={value.__name__}(…)"
    if isinstance(value, str) and value in public_paths():
        package = public_paths()[value].rpartition(".")[0]
        return f": write {name}={value}(…), from {package} import {value}"
    is_whole = isinstance(value, float) and value.is_integer()
    if int in allowed and (is_whole or (isinstance(value, str) and value.lstrip("-").isdigit())):
        return f": write {name}={int(value)}"
    if float in allowed and isinstance(value, str) and value.replace(".", "", 1).isdigit():
        return f": write {name}={value}"
    return ""
