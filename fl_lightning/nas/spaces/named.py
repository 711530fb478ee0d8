"""Search spaces by name, class path or YAML file, and their description in YAML."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping
from dataclasses import fields, is_dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

from fl_lightning.core.errors import ConfigurationError
from fl_lightning.core.yaml_files import read
from fl_lightning.nas.spaces.darts import DARTS
from fl_lightning.nas.spaces.mobilenet import MobileNet, small_mobilenet
from fl_lightning.nas.spaces.mobilenet_layers import MobileNetLayers
from fl_lightning.nas.spaces.nas_bench_201 import NASBench201
from fl_lightning.nas.spaces.resnet import ResNet, small_resnet
from fl_lightning.nas.spaces.space import SearchSpace
from fl_lightning.nas.spaces.vit import ViT, small_vit

NAMES: dict[str, Callable[[], SearchSpace]] = {
    "nas_bench_201": NASBench201,
    "darts": DARTS,
    "mobilenet": MobileNet,
    "small_mobilenet": small_mobilenet,
    "mobilenet_layers": MobileNetLayers,
    "resnet": ResNet,
    "small_resnet": small_resnet,
    "vit": ViT,
    "small_vit": small_vit,
}


def named_space(text: str) -> SearchSpace:
    """Build a search space from the text a user gives: a name, a class path or the path of a YAML file.

    Args:
        text: a name (`NAMES`), a class such as ``fl_lightning.nas.spaces.darts.DARTS``, or a YAML file with
            ``class_path`` and ``init_args`` at the top level, under ``space``, or under
            ``model.init_args.space`` as in the configuration of a run.

    Raises:
        ConfigurationError: if the text is none of these, or the file describes no space.

    Example:
        >>> named_space("nas_bench_201")
        NASBench201()
        >>> named_space("nas_bench_202")
        Traceback (most recent call last):
        ...
        fl_lightning.core.errors.ConfigurationError: space: there is no 'nas_bench_202'. Did you \
mean 'nas_bench_201'?
    """
    if text in NAMES:
        return NAMES[text]()
    if Path(text).suffix in (".yaml", ".yml", ".json"):
        return described_space(_read(Path(text)))
    if "." in text:
        return described_space({"class_path": text})
    close = difflib.get_close_matches(text, NAMES, n=1)
    advice = f"Did you mean {close[0]!r}?" if close else f"There are {', '.join(NAMES)}"
    raise ConfigurationError(f"space: there is no {text!r}. {advice}")


def described_space(description: Any) -> SearchSpace:
    """Build a search space from a configuration with ``class_path`` and ``init_args``.

    Raises:
        ConfigurationError: if the class is missing or no space, or the settings are invalid.
    """
    if not isinstance(description, Mapping) or "class_path" not in description:
        raise ConfigurationError(
            "space: expected a mapping with class_path and init_args, e.g. class_path: "
            f"fl_lightning.nas.NASBench201, got {str(description)[:80]}"
        )
    path = str(description["class_path"])
    module, _, name = path.rpartition(".")
    try:
        found = getattr(import_module(module), name)
    except (ImportError, AttributeError, ValueError):
        raise ConfigurationError(f"space: there is no class {path!r}") from None
    if not (isinstance(found, type) and issubclass(found, SearchSpace)):
        raise ConfigurationError(
            f"space: {path} is no search space: give a class of fl_lightning.nas such as MobileNet, or ModuleSpace "
            "for a module of yours"
        )
    given = description.get("init_args") or {}
    if not isinstance(given, Mapping):
        raise ConfigurationError(
            f"space: init_args of {path} must be settings by name, e.g. depths: [1, 2], got {given!r}"
        )
    settings = {str(key): _built(value) for key, value in given.items()}
    try:
        return found(**settings)
    except TypeError as error:
        raise ConfigurationError(f"space: {path}: {error}") from None


def description(space: SearchSpace) -> dict[str, Any]:
    """Describe a search space for YAML: ``class_path``, and ``init_args`` if it has settings.

    Example:
        >>> description(NASBench201())
        {'class_path': 'fl_lightning.nas.NASBench201'}
        >>> described_space(description(small_mobilenet())) == small_mobilenet()
        True
    """
    plain: dict[str, Any] = _plain(space)
    return plain


def _plain(value: Any) -> Any:
    if is_dataclass(value):
        kind = type(value)
        settings = {field.name: _plain(getattr(value, field.name)) for field in fields(value)}
        is_ours = kind.__module__.startswith("fl_lightning.nas.")
        module = "fl_lightning.nas" if is_ours else kind.__module__  # which exports it
        path = {"class_path": f"{module}.{kind.__qualname__}"}
        return {**path, "init_args": settings} if settings else path
    if isinstance(value, type):
        return f"{value.__module__}.{value.__qualname__}"
    return [_plain(one) for one in value] if isinstance(value, list | tuple) else value


def _built(value: Any) -> Any:
    if isinstance(value, Mapping) and "class_path" in value:
        return described_space(value)
    return tuple(_built(one) for one in value) if isinstance(value, list) else value


def _read(path: Path) -> Any:
    content: Any = read(path, "space: ")
    if isinstance(content.get("model"), dict):
        content = content["model"].get("init_args")
    return content["space"] if isinstance(content, dict) and "space" in content else content
