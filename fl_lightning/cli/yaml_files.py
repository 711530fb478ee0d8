"""Loaders of YAML for the parser: limited in size and depth, with short class names and ``${references}``.

The limits are those of `fl_lightning.core.yaml_files`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import yaml

from fl_lightning.cli.names import expanded, options_of
from fl_lightning.core.errors import ConfigurationError
from fl_lightning.core.yaml_files import MOST_DIGITS, check_text, load

_FILES = ("--config", "-c", "--search", "-s")


def files_of(words: Sequence[str]) -> Iterator[tuple[str, Path]]:
    """Yield each command-line option that names a configuration file, with the file's path; pipes are left out."""
    for name, value in options_of(words):
        if name in _FILES and Path(value).is_file():  # a pipe can be read only once
            yield name, Path(value)


def check_word(word: str) -> None:
    """Raise if a command-line value is YAML that is too large, nested too deeply, or contains itself.

    Raises:
        ConfigurationError: naming the option.
    """
    name, is_one, value = word.partition("=")
    text = value if is_one and name.startswith("--") else word
    is_plain = not any(mark in text for mark in "&[{") and len(text) <= MOST_DIGITS
    if is_plain:
        return
    with suppress(yaml.YAMLError):  # a text, then
        try:
            load(text, name.removeprefix("--") if is_one else "")
        except ConfigurationError as error:
            raise ConfigurationError(f"{error}, in {text[:40]}…") from None


def loader(load_value: Callable[[str], Any]) -> Callable[[str], Any]:
    """Wrap a YAML loader, so that it limits size and depth of a text, and replaces short class names by import paths."""

    def load_expanded(text: str) -> Any:
        check_text(text)
        try:
            content = load_value(text)
        except (RecursionError, ValueError) as error:
            raise ConfigurationError(f"a value cannot be read: {error}") from None
        return expanded(content)

    return load_expanded


def interpolating(load_value: Callable[[str], Any]) -> Callable[[str], Any]:
    """Wrap a YAML loader, so that it replaces references such as ``${model.image_size}`` by values of the same file."""

    def load_resolved(text: str) -> Any:
        content = load_value(text)
        if not isinstance(content, (dict, list)):
            return content
        from omegaconf import OmegaConf

        return OmegaConf.to_object(OmegaConf.create(content))

    return load_resolved
