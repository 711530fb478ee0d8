"""YAML from anywhere: read within bounds, with short names of classes and references between options.

A file may refer to itself (``trainer: &a {x: *a}``), be nested without an end, grow a million times by
its references, or be no text. Parsers hang or end in a traceback over it; `check` says what is wrong.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import yaml

from fl_lightning.cli.names import expanded
from fl_lightning.core.errors import ConfigurationError

MOST_DEPTH = 64
MOST_VALUES = 200_000
MOST_DIGITS = 40  # of a whole number: seeds have 20
_FILES = ("--config", "-c", "--search", "-s")


def read(path: Path) -> Any:
    """Content of a YAML file.

    Raises:
        ConfigurationError: if it is no YAML that a configuration may be.
    """
    try:
        text = path.read_bytes().decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ConfigurationError(
            f"config: {path} is no UTF-8 text, byte {error.start} is 0x{error.object[error.start]:02x}: "
            "save it as UTF-8"
        ) from None
    try:
        content = load(text)
    except ConfigurationError as error:
        raise ConfigurationError(f"config: {path}: {error}") from None
    except yaml.YAMLError as error:
        raise ConfigurationError(
            f"config: {path} is not valid YAML: {' '.join(str(error).split())}. Quote texts with special "
            "characters, and indent with spaces"
        ) from None
    if not isinstance(content, dict):
        raise ConfigurationError(
            f"config: {path} holds no options, which are written as name: value"
        )
    return content


def load(text: str) -> Any:
    """Content of a YAML text.

    Raises:
        ConfigurationError: if it is too deep or too large, or refers to itself.
        yaml.YAMLError: if it is no YAML.

    Example:
        >>> load("trainer: &a {x: *a}")
        Traceback (most recent call last):
        ...
        fl_lightning.core.errors.ConfigurationError: trainer.x refers to itself: write out what it must be
    """
    try:
        content = yaml.safe_load(text)
    except RecursionError:
        raise ConfigurationError(f"it is nested deeper than {MOST_DEPTH} levels") from None
    except ValueError:  # of a number with thousands of digits
        raise ConfigurationError(f"a number must have at most {MOST_DIGITS} digits") from None
    check(content)
    return content


def check(content: Any) -> None:
    """Refuse what has no end, or hardly one.

    Raises:
        ConfigurationError: with the path of the option.
    """
    for count, _ in enumerate(_values(content, (), ()), start=1):
        if count > MOST_VALUES:
            raise ConfigurationError(
                f"it has more than {MOST_VALUES} values: references (&, *) are counted each time"
            )


def _values(content: Any, place: tuple[str, ...], outer: tuple[int, ...]) -> Iterator[Any]:
    yield content
    path = ".".join(place)
    if isinstance(content, int) and abs(content) >= 10**MOST_DIGITS:
        raise ConfigurationError(
            f"{path} must have at most {MOST_DIGITS} digits, got {len(str(abs(content)))} digits"
        )
    if not isinstance(content, dict | list):
        return
    if id(content) in outer:
        raise ConfigurationError(f"{path} refers to itself: write out what it must be")
    if len(place) > MOST_DEPTH:
        raise ConfigurationError(f"{path[:60]}… is nested deeper than {MOST_DEPTH} levels")
    items = content.items() if isinstance(content, dict) else enumerate(content)
    for name, value in items:
        yield from _values(value, (*place, str(name)), (*outer, id(content)))


def files_of(words: Sequence[str]) -> Iterator[tuple[str, Path]]:
    """Yield the files that a command line names and that can be read twice, with their options.

    Args:
        words: of the command line.
    """
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
    """Return a loader for the parser, within bounds and with whole names of classes.

    Args:
        load_value: from a text to what it says.
    """

    def load_expanded(text: str) -> Any:
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
