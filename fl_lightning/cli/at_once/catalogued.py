"""Writes the catalogue: the classes that options take, ``python -m fl_lightning.cli.at_once.catalogued``.

The option's types say it: classes that are exported and either have a protocol's methods or are
derived from a class, but for bases.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Iterator
from importlib import import_module
from typing import Any, get_args, get_type_hints

from docstring_parser import parse
from lightning.pytorch.cli import LightningCLI
from torch import nn
from typing_extensions import get_protocol_members, is_protocol

from fl_lightning.cli.at_once.catalogue import FILE
from fl_lightning.data.federated import FederatedDataModule
from fl_lightning.federation import Federation
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
_OWNERS = {"federation": Federation, "data": FederatedDataModule}


def catalogued() -> dict[str, dict[str, Any]]:
    """Return, by block, what its options say, and the classes that they take with a line each."""
    found: dict[str, dict[str, Any]] = {}
    for block, owner in _OWNERS.items():
        hints = get_type_hints(owner.__init__)  # type: ignore[misc]  # of the class itself
        kinds = {option: [*_members(hint)] for option, hint in hints.items()}
        classes = {
            option: _entry(theirs)
            for option, theirs in kinds.items()
            if any(_is_a_base(kind, theirs) for kind in theirs)
        }
        found[block] = {"options": _options(owner), "classes": classes}
    return found


def as_text() -> str:
    """Return the file's content."""
    return json.dumps(catalogued(), indent=1, ensure_ascii=False) + "\n"


def _options(owner: type) -> dict[str, dict[str, str]]:
    """Return what the docstring says of each option, and its default as YAML has it."""
    documented = f"{owner.__doc__}\n{inspect.cleandoc(owner.__init__.__doc__ or '')}"  # type: ignore[misc]
    texts = {p.arg_name: p.description or "" for p in parse(documented).params}
    parameters = inspect.signature(owner).parameters.values()
    return {
        parameter.name: {
            "help": " ".join(texts[parameter.name].split()),
            "default": json.dumps(parameter.default),
        }
        for parameter in parameters
        if parameter.default is not parameter.empty
    }


def _entry(kinds: list[type]) -> dict[str, Any]:
    theirs = [kind for kind in kinds if kind.__module__.startswith("torch.")]
    return {
        "classes": _classes(kinds),
        "any": [f"{kind.__name__} of {kind.__module__.rpartition('.')[0]}" for kind in theirs],
        "bases": [kind.__name__ for kind in kinds],
    }


def _classes(kinds: list[type]) -> dict[str, str]:
    """Return the paths of the exported classes that an option takes, and their first lines."""
    found: dict[type, str] = {}
    owners = _OWNERS.values()  # data around data
    for package in _PACKAGES:
        module = import_module(package)
        for name in module.__all__:
            exported = getattr(module, name)
            if not inspect.isclass(exported) or _is_a_base(exported, kinds) or exported in owners:
                continue
            if any(_is_a(exported, kind) for kind in kinds):
                found.setdefault(exported, f"{package}.{name}")
    return {path: _first_line(kind) for kind, path in found.items()}


def _is_a_base(found: type, kinds: list[type]) -> bool:
    """Whether others are derived from a class, which then is nobody's option."""
    if inspect.isabstract(found) or is_protocol(found):
        return True
    return found in kinds and (
        bool(found.__subclasses__()) or found.__module__.startswith("torch.")
    )


def _members(hint: Any) -> Iterator[type]:
    """Yield the classes in a union, and in what it is made of."""
    if inspect.isclass(hint) and hint.__module__ not in ("builtins", "typing"):
        yield hint
    for part in get_args(hint):
        yield from _members(part)


def _is_a(found: type, kind: type) -> bool:
    if not is_protocol(kind):
        return issubclass(found, kind) and not issubclass(found, MaskedOptimizer)  # a client's
    if issubclass(found, nn.Module | LightningCLI):  # whose methods have names of many protocols
        return False
    methods = [m for m in get_protocol_members(kind) if callable(getattr(kind, m, None))]
    return not is_protocol(found) and all(callable(getattr(found, m, None)) for m in methods)


def _first_line(found: type) -> str:
    return (inspect.getdoc(found) or "").split("\n\n")[0].replace("\n", " ")


if __name__ == "__main__":
    FILE.write_text(as_text(), encoding="utf-8")
