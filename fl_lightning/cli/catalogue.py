"""What there is for an option of the ``federation`` block: ``--federation.correction.help``.

The option's types say it: classes that are exported and either have a protocol's methods or are
derived from a class, but for bases. With a class's name after it, the parser shows that class's own
options; the class may be anybody's.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator, Sequence
from importlib import import_module
from typing import Any, get_args, get_type_hints

from typing_extensions import get_protocol_members, is_protocol

from fl_lightning.federation.federation import Federation
from fl_lightning.sparsity.optimizers.masked_optimizer import MaskedOptimizer

# The shorter a name, the better: a class is listed under the first of these that exports it.
_PACKAGES = (
    "fl_lightning",
    "fl_lightning.client",
    "fl_lightning.data",
    "fl_lightning.server",
    "fl_lightning.secure",
    "fl_lightning.updates",
)
_ASKED = re.compile(r"--federation\.(?P<option>\w+)\.help")


def asked_for(words: Sequence[str]) -> str | None:
    """Return the option whose classes a command line asks for, without naming one of them.

    Example:
        >>> asked_for(["fit", "--federation.correction.help"])
        'correction'
        >>> asked_for(["fit", "--federation.correction.help", "fl_lightning.Scaffold"]) is None
        True
    """
    for word, following in zip(words, [*words[1:], "--"], strict=False):
        asked = _ASKED.fullmatch(word)
        if asked and following.startswith("--") and _kinds(asked["option"]):
            return asked["option"]
    return None


def catalogue(option: str) -> str:
    """Return a line for each class that an option of the block takes.

    Example:
        >>> print(catalogue("asynchronous"))  # doctest: +ELLIPSIS
        federation.asynchronous takes one of
        <BLANKLINE>
          fl_lightning.server.FedAsync  The server mixes every client's model in as it arrives.
          fl_lightning.server.FedBuff   The server steps whenever a buffer of updates is full.
        <BLANKLINE>
        ...
    """
    lines, example = _lines(option), next(iter(_classes(option).values()), "CLASS_PATH")
    if not lines:
        bases = " or ".join(kind.__name__ for kind in _kinds(option))
        lines = [f"  a class of your own that derives from {bases}: see docs/extending.md"]
    return "\n".join(
        [
            f"federation.{option} takes one of",
            "",
            *lines,
            "",
            f"The options of one: --federation.{option}.help {example}",
        ]
    )


def _lines(option: str) -> list[str]:
    names = {path: _first_line(found) for found, path in _classes(option).items()}
    width = max(map(len, names), default=0)
    theirs = [kind for kind in _kinds(option) if kind.__module__.startswith("torch.")]
    return [
        *(f"  {path.ljust(width)}  {first}" for path, first in names.items()),
        *(f"  any {kind.__name__} of {kind.__module__.rpartition('.')[0]}" for kind in theirs),
    ]


def _kinds(option: str) -> list[type]:
    return [*_members(get_type_hints(Federation.__init__).get(option))]


def _classes(option: str) -> dict[type, str]:
    """Return the exported classes that an option takes, and their paths."""
    kinds = _kinds(option)
    found: dict[type, str] = {}
    for package in _PACKAGES:
        try:
            module = import_module(package)
        except ImportError:  # needs an extra
            continue
        for name in module.__all__:
            exported = getattr(module, name)
            if not inspect.isclass(exported) or exported in kinds or inspect.isabstract(exported):
                continue  # a base is nobody's option
            if any(_is_a(exported, kind) for kind in kinds):
                found.setdefault(exported, f"{package}.{name}")
    return found


def _members(hint: Any) -> Iterator[type]:
    """Yield the classes in a union, and in what it is made of."""
    if inspect.isclass(hint) and hint.__module__ != "builtins":
        yield hint
    for part in get_args(hint):
        yield from _members(part)


def _is_a(found: type, kind: type) -> bool:
    if not is_protocol(kind):
        return issubclass(found, kind) and not issubclass(found, MaskedOptimizer)  # a client's
    methods = [m for m in get_protocol_members(kind) if callable(getattr(kind, m, None))]
    return not is_protocol(found) and all(callable(getattr(found, m, None)) for m in methods)


def _first_line(found: type) -> str:
    return (inspect.getdoc(found) or "").split("\n\n")[0].replace("\n", " ")
