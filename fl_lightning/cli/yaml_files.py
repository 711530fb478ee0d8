"""YAML on the command line and for its parser: within bounds, with short names of classes and references.

What may be wrong with it is in `fl_lightning.core.yaml_files`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import yaml

from fl_lightning.cli.names import expanded
from fl_lightning.core.errors import ConfigurationError
from fl_lightning.core.yaml_files import MOST_DIGITS, check, check_text, load

_FILES = ("--config", "-c", "--search", "-s")


def files_of(words: Sequence[str]) -> Iterator[tuple[str, Path]]:
    """Yield the files that a command line names and that can be read twice, with their options."""
    for word, following in zip(words, [*words[1:], ""], strict=False):
        name, is_one, value = word.partition("=")
        path = Path(value if is_one else following)
        if name in _FILES and path.is_file():  # what a pipe says can be read once
            yield name, path


def check_word(word: str) -> None:
    """Refuse a word of the command line whose value has no end, as YAML in a file.

    Raises:
        ConfigurationError: with the option.
    """
    name, is_one, value = word.partition("=")
    text = value if is_one and name.startswith("--") else word
    is_plain = not any(mark in text for mark in "&[{") and len(text) <= MOST_DIGITS
    if is_plain:
        return
    with suppress(yaml.YAMLError):  # a text, then
        try:
            load(text)
        except ConfigurationError as error:
            option = f"{name.removeprefix('--')}: " if is_one else ""
            raise ConfigurationError(f"{option}{error}, in {text[:40]}…") from None


def loader(load_value: Callable[[str], Any]) -> Callable[[str], Any]:
    """Return a loader for the parser, within bounds and with whole names of classes."""

    def load_expanded(text: str) -> Any:
        check_text(text)
        try:
            content = load_value(text)
        except (RecursionError, ValueError) as error:
            raise ConfigurationError(f"a value cannot be read: {error}") from None
        check(content)
        return expanded(content)

    return load_expanded


def interpolating(load_value: Callable[[str], Any]) -> Callable[[str], Any]:
    """Return a loader that replaces references such as ``${model.image_size}`` by values of the same file."""

    def load_resolved(text: str) -> Any:
        content = load_value(text)
        if not isinstance(content, (dict, list)):
            return content
        check(content)
        from omegaconf import OmegaConf

        return OmegaConf.to_object(OmegaConf.create(content))

    return load_resolved
