"""What a class of a user's own lacks, to be taken for an option.

The parser asks protocols for methods of the same names and annotations, and bases for nothing abstract.
Of a class that is refused it says neither which method is missing nor how it must be written.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from importlib import import_module
from typing import Any, get_type_hints

from typing_extensions import get_protocol_members, is_protocol

# the parser leaves out a path that is the whole value
_UNLIKE = re.compile(
    r"(?:\"(?P<path>[\w.]+)\" is not a subclass or implementer of|does not implement) "
    r"protocol \{?(?P<protocols>[\w,]+)"
)
_ABSTRACT = "Expected an instantiatable class, but "
# of a value: a class's path, or a mapping that names it
_GIVEN = re.compile(r"(?:.*class_path['\"]?[=:] ?['\"])?(?P<path>[\w.]+)")
# where protocols that users write classes for are exported
_PACKAGES = ("fl_lightning.data", "fl_lightning.sparsity", "fl_lightning.updates")


def what_is_missing(reason: str, given: str) -> str | None:
    """Return what a class lacks; None if that is not the matter.

    A class without a single method of the protocol was not meant to be one.

    Args:
        reason: what the parser says.
        given: the value that it says it of.

    Example:
        >>> said = "Import path fl_lightning.Mean does not implement protocol Partition"
        >>> what_is_missing(said, "fl_lightning.Mean") is None
        True
    """
    unlike, named = _UNLIKE.search(reason), _GIVEN.match(given)
    path = (unlike and unlike["path"]) or (named and named["path"])
    own = _imported(path or "")
    if own is None:
        return None
    if reason.startswith(_ABSTRACT) and inspect.isabstract(own):
        names = ", ".join(sorted(own.__abstractmethods__))
        return f"{path} is unfinished, it lacks {names}: write a class that has it"
    for name in unlike["protocols"].split(",") if unlike else ():
        protocol = _protocol(name)
        if protocol is None or not any(hasattr(own, member) for member in _members(protocol)):
            continue
        if written := "; ".join(_unlike(own, protocol)):
            return f"{path} is a {name} once it has, annotations and all: {written}"
    return None


def _imported(path: str) -> Any:
    module, _, name = path.rpartition(".")
    try:
        return getattr(import_module(module), name, None)
    except (ImportError, ValueError):
        return None


def _protocol(name: str) -> type | None:
    for package in _PACKAGES:
        found: Any = getattr(import_module(package), name, None)
        if inspect.isclass(found) and is_protocol(found):
            return found
    return None


def _members(protocol: type) -> list[str]:
    """Return a protocol's members in the order in which they are written."""
    members = get_protocol_members(protocol)
    return [name for name in vars(protocol) if name in members]


def _unlike(own: Any, protocol: type) -> Iterator[str]:
    """Yield the protocol's members that a class has not, or writes otherwise."""
    for name in _members(protocol):
        wanted, has = getattr(protocol, name), getattr(own, name, None)
        if isinstance(wanted, property):
            if has is None:
                yield f"a property {name}"
        elif not inspect.isfunction(has) or not _is_like(has, wanted):
            yield f"{name}{inspect.signature(wanted)}".replace("'", "")


def _is_like(own: Any, wanted: Any) -> bool:
    try:
        hints, known = get_type_hints(own), get_type_hints(wanted)
    except NameError:
        return False
    names = list(inspect.signature(own).parameters), list(inspect.signature(wanted).parameters)
    return names[0] == names[1] and all(
        hint == Any or hints.get(name) == hint for name, hint in known.items()
    )
