"""Settings of a space: lists of a YAML file become tuples, and what is no size is refused.

A setting is what the annotation of its field says: whole numbers are sizes or counts, from 1; other
numbers are above 0; or it is a list of these, or of lists.
"""

from __future__ import annotations

import math
from dataclasses import fields
from numbers import Integral, Real
from typing import Any, get_args, get_origin, get_type_hints

from fl_lightning.core.errors import ConfigurationError
from fl_lightning.nas.spaces.space import SearchSpace

# in the singular, in the plural
_WORDS = {
    int: ("a whole number of at least 1", "whole numbers of at least 1"),
    float: ("a number above 0", "numbers above 0"),
    bool: ("true or false", "true or false"),
}


def settle(space: SearchSpace) -> None:
    """Make the settings of a space, a frozen dataclass, what its annotations say.

    Args:
        space: whose fields are of ``int``, ``float``, ``bool`` and tuples of them.

    Raises:
        ConfigurationError: for a setting that is something else.

    Example:
        >>> from fl_lightning.nas.spaces.resnet import ResNet
        >>> ResNet(widths=[0.5, 1]).widths
        (0.5, 1)
        >>> ResNet(stem="eight")
        Traceback (most recent call last):
        ...
        fl_lightning.core.errors.ConfigurationError: resnet: stem must be a whole number of at \
least 1, got 'eight'
    """
    kinds: dict[str, Any] = get_type_hints(type(space))
    for field in fields(space):  # type: ignore[arg-type]
        given, kind = getattr(space, field.name), kinds[field.name]
        value = _frozen(given)
        if not _is_of(value, kind):
            raise ConfigurationError(
                f"{space.name}: {field.name} must be {_words(kind)[0]}, got {given!r}"
            )
        object.__setattr__(space, field.name, value)


def _frozen(value: Any) -> Any:
    return tuple(_frozen(one) for one in value) if isinstance(value, list | tuple) else value


def _is_of(value: Any, kind: Any) -> bool:
    if get_origin(kind) is tuple:
        inside = get_args(kind)
        if not isinstance(value, tuple):
            return False
        if inside[-1] is Ellipsis:
            return all(_is_of(one, inside[0]) for one in value)
        return len(value) == len(inside) and all(map(_is_of, value, inside))
    if kind is bool or isinstance(value, bool):
        return kind is bool and isinstance(value, bool)
    if kind is int:
        return isinstance(value, Integral) and int(value) >= 1
    return isinstance(value, Real) and 0 < float(value) < math.inf


def _words(kind: Any) -> tuple[str, str]:
    if get_origin(kind) is not tuple:
        return _WORDS[kind]
    inside = get_args(kind)
    number = "" if inside[-1] is Ellipsis else f"{len(inside)} "
    entries = _words(inside[0])[1]
    return f"a list of {number}{entries}", f"lists of {number}{entries}"
