"""Check of the classes that a configuration from the server may import and build at a site.

The command line imports every class that a configuration names, and to import a module is to run it. So
all names are checked first, as text, and one that is not allowed refuses the whole configuration before
anything is imported. Then the allowed names are looked up, because an allowed package has other names
too: `torch.nn.modules.module.functools`, functions that write files, a command line.

A pattern allows

- ``my_project.models.*``: the PyTorch modules, Lightning modules, metrics, optimizers and
  learning-rate schedules that are defined below this package, and of fl_lightning what it exports;
- ``my_project.models.Net``: exactly this, whatever it is.

Any text in a configuration may be a class path, or contain YAML with one. So every dotted name in a text
counts as a class path if its first part is a module that is installed at the site.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator, Sequence
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import yaml
from lightning.pytorch import LightningDataModule

from fl_lightning.core.errors import ConfigurationError
from fl_lightning.core.plain_json import shown
from fl_lightning.core.public_names import public_paths
from fl_lightning.core.yaml_files import load

DEFAULT = (
    "fl_lightning.*",
    "torch.nn.*",
    "torch.optim.*",
    "torchmetrics.*",
    "torchvision.models.*",
    "timm.models.*",
    "timm.optim.*",
)
# packages whose classes download models by name: allowed only by their exact path
_FETCHES = tuple(f"torchmetrics.{each}." for each in ("audio", "image", "multimodal", "text"))
_NO_OPTIONS = ("FederatedCLI",)  # it runs a command line
# further classes and functions that options of exported classes accept
_OWN_EXTRA = (
    "fl_lightning.secure.protocol.session.SparseGraph",
    "fl_lightning.sparsity.sensitivity.scoring.Scoring",
    "fl_lightning.sparsity.sensitivity.protocol.batch_labels",
    "fl_lightning.sparsity.sensitivity.protocol.module_logits",
    "fl_lightning.sparsity.log_probabilities",
    "fl_lightning.sparsity.raw_logits",
)
MOST_CHARACTERS = 10_000
MOST_DEPTH = 64
_NAME = re.compile(r"(?<![\w.])[^\W\d]\w*(?:\.\w+)+")
_ELSEWHERE = re.compile(
    r"[\w+-]+://|(?:hf[-_]hub|local-dir|file):|[/~\\]|(?:.*[/\\])?\.\.(?:[/\\]|$)", re.DOTALL
)
_FILE = re.compile(
    r"\.(?:ya?ml|json|jsonnet|toml|pth?|ckpt|safetensors|bin|np[yz]|pkl|h5|onnx|zip|t?gz|tar|txt|csv)$",
    re.IGNORECASE,
)
# options whose text is a place: a file, a folder, an address, a repository of a hub
_PLACE = re.compile(
    r"(?:^|_)(?:path|file|dir|directory|folder|root|url|uri|hub|checkpoint|ckpt|weights)(?:_|$)"
)
_METRIC = "monitor"  # the one option whose text may have a slash
FROM_SERVER = "from the server"  # stands for a file there
Place = tuple[str, ...]


class Refused(ConfigurationError):  # noqa: N818 - says what happened
    """Raised if a site's policy forbids what the server asks for; nothing of it is imported, built or run."""


def checked(configuration: Any, patterns: Sequence[str]) -> Any:
    """Return a configuration with full class paths; raise if the site does not allow one of its classes.

    Args:
        configuration: nested dicts, lists and values, as read from YAML.
        patterns: patterns of the class paths that are allowed.

    Raises:
        Refused: naming the first class that is not allowed.

    Example:
        >>> checked({"federation": {"aggregator": {"class_path": "Krum"}}}, DEFAULT)
        {'federation': {'aggregator': {'class_path': 'fl_lightning.server.Krum'}}}
        >>> checked({"model": {"class_path": "os.system"}}, DEFAULT)
        Traceback (most recent call last):
        ...
        fl_lightning.flower.class_paths.Refused: model.class_path: 'os.system' is not allowed at this \
site. Add it to classes in site.yaml if you trust it, or leave it out.
    """
    found: list[tuple[Place, str]] = []
    full = _with_full_paths(configuration, (), found)
    unique = list(dict.fromkeys(found))
    for place, path in unique:
        if not _matches(path, patterns):
            raise Refused(
                f"{'.'.join(place)}: {shown(path)} is not allowed at this site. Add it to classes in "
                "site.yaml if you trust it, or leave it out."
            )
    for place, path in unique:
        if path not in patterns and not _is_known_kind(path, patterns):
            raise Refused(
                f"{'.'.join(place)}: {path!r} is no class that a configuration may build: a module, "
                "metric, optimizer or schedule, or what fl_lightning exports. Add exactly this path "
                "to classes in site.yaml if you trust it, or leave it out."
            )
    return full


def named(configuration: Any) -> list[str]:
    """Return all class paths in a configuration, also those inside longer texts; nothing is imported.

    Raises:
        Refused: if the configuration is nested too deeply, or has a path, an address or another forbidden value.

    Example:
        >>> named({"model": {"class_path": "my.Net"}, "federation": {"aggregator": "Krum"}})
        ['my.Net', 'fl_lightning.server.Krum']
    """
    found: list[tuple[Place, str]] = []
    _with_full_paths(configuration, (), found)
    return list(dict.fromkeys(path for _, path in found))


def _with_full_paths(value: Any, place: Place, named: list[tuple[Place, str]]) -> Any:
    """Return part of a configuration with full paths instead of short class names; refuse forbidden values.

    Args:
        value: part of the configuration.
        place: names of the options above it.
        named: gets each class path, and each part of a text that may be one, with its place.
    """
    if len(place) > MOST_DEPTH:
        raise Refused(
            f"{'.'.join(place[:3])}… has more than {MOST_DEPTH} nested levels: write a flatter configuration"
        )
    is_path = place[-1:] == ("class_path",)
    if is_path and value is not None:
        value = _full_path(value, place)
    elif place[:1] == ("federation",) and type(value) is str and value in own_names():
        is_path, value = True, own_names()[value]  # the parser would look in everything imported
    if type(value) is dict:
        return {
            _key(name, place): _with_full_paths(inner, (*place, str(name)), named)
            for name, inner in value.items()
        }
    if type(value) is list:
        return [_with_full_paths(v, (*place, str(at)), named) for at, v in enumerate(value)]
    if type(value) is str:
        named += [(place, path) for path in ([value] if is_path else _in_text(value, place))]
    elif value is not None and type(value) not in (bool, int, float):
        raise Refused(
            f"{'.'.join(place)}: a value of type {type(value).__name__} is not allowed: use texts, numbers, "
            "lists and mappings"
        )
    return value


def _key(name: Any, place: Place) -> Any:
    if type(name) is int:
        return name
    if type(name) is not str or ("class_path" in name and name != "class_path"):
        raise Refused(
            f"{'.'.join([*place, str(name)[:99]])}: write nested options, with class_path as a "
            "key of its own, instead of a dotted name"
        )
    return name


def _full_path(path: Any, place: Place) -> str:
    if type(path) is str and _NAME.fullmatch(path):
        return path
    if type(path) is str and path in own_names():
        return own_names()[path]
    raise Refused(
        f"{'.'.join(place)}: {shown(path)} is neither a full class path nor the name of a class that "
        "fl_lightning exports. Write the full path."
    )


@cache
def own_names() -> dict[str, str]:
    """Return the paths of the classes that fl_lightning exports, by their short names."""
    return {name: path for name, path in public_paths().items() if _is_option(name, path)}


def _is_option(name: str, path: str) -> bool:
    found = _look_up(path)  # None for a class that needs an extra
    is_data = inspect.isclass(found) and issubclass(
        found, LightningDataModule
    )  # a site's are its own
    return inspect.isclass(found) and not is_data and name not in _NO_OPTIONS


def _in_text(text: str, place: Place) -> Iterator[str]:
    """Yield words of an option's text that may be class paths; refuse a text with a file path, a URL or YAML."""
    where = ".".join(place)
    if len(text) > MOST_CHARACTERS:
        raise Refused(f"{where} has {len(text)} characters, at most {MOST_CHARACTERS} are allowed")
    option = next((each for each in reversed(place) if not each.isdigit()), "")
    is_place = _PLACE.search(option) or ("/" in text and option != _METRIC)
    if text != FROM_SERVER and (
        is_place or _ELSEWHERE.match(text.strip()) or _FILE.search(text.strip())
    ):
        raise Refused(
            f"{where}: {shown(text)} is a path or an internet address, which the server may not "
            "choose: leave it out, and set it in the site's own.yaml if it is needed"
        )
    read = _read(text)
    if isinstance(read, dict | list):
        raise Refused(f"{where}: {shown(text)} is YAML inside a text: write it as nested options")
    texts = {text, read} if isinstance(read, str) else {text}
    for each in sorted(texts):
        for match in _NAME.finditer(each):
            if _exists(match[0].partition(".")[0]):
                yield match[0]


def _read(text: str) -> Any:
    """Return the value that YAML reads from a text; None if the text is not YAML."""
    try:
        return load(text)
    except yaml.YAMLError:
        return None
    except ConfigurationError:
        return []  # YAML, though none that may be read


@cache
def _exists(module: str) -> bool:
    """True if a module is installed, which is found out without importing it."""
    try:
        return find_spec(module) is not None
    except (ImportError, ValueError):
        return True  # __main__ and others without a file


def _matches(path: str, patterns: Sequence[str]) -> bool:
    """True if the allowed patterns contain this class path itself or, if no name in it is private, its package."""
    if path in patterns:
        return True
    is_public = not any(part.startswith("_") for part in path.split("."))
    return is_public and _is_below(path, patterns)


def _is_below(path: str, patterns: Sequence[str]) -> bool:
    return any(p.endswith(".*") and path.startswith(p.removesuffix("*")) for p in patterns)


def _is_known_kind(path: str, patterns: Sequence[str]) -> bool:
    """True if a path names a PyTorch module, metric, optimizer or schedule class, or one that fl_lightning exports.

    Only allowed modules are imported. A class must be defined below an allowed package: an allowed module
    also has names that it has imported from elsewhere.
    """
    found = _look_up(path)
    if inspect.isfunction(found):
        return found in _own()
    if not inspect.isclass(found):
        return False
    if found in _own():
        return True
    defined = f"{found.__module__}.{found.__qualname__}"
    if defined.startswith(("fl_lightning.", *_FETCHES)):
        return False
    return _is_below(defined, patterns) and issubclass(found, _kinds())


@cache
def _own() -> frozenset[Any]:
    return frozenset(_look_up(path) for path in (*own_names().values(), *_OWN_EXTRA)) - {None}


@cache
def _kinds() -> tuple[type, ...]:
    from torch import nn
    from torch.optim import Optimizer
    from torch.optim.lr_scheduler import LRScheduler

    return nn.Module, Optimizer, LRScheduler


def _look_up(path: str) -> Any:
    """Import the module of a dotted path, and return the object there; None if there is none."""
    module, _, name = path.rpartition(".")
    try:
        return getattr(import_module(module), name, None)
    except ImportError:
        return None
