"""Reading YAML from users and other machines, with limits on size and depth and without duplicate names.

A file may refer to itself (``trainer: &a {x: *a}``), be nested very deeply, grow a million times by
references, give an option twice, or be no text. A YAML parser then hangs, raises a long traceback, or
silently uses the last of two values; `load` raises an error that names the problem and its place.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from fl_lightning.core.errors import ConfigurationError

MOST_BYTES = 1_000_000
MOST_DEPTH = 64
MOST_VALUES = 200_000
MOST_DIGITS = 40  # of a whole number: seeds have 20
LOADER: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # libyaml is ten times as fast


def read(path: Path, option: str = "config: ", *, remedy: str = "") -> dict[str, Any]:
    """Return the options in a YAML file.

    Args:
        path: path of the file.
        option: option that names the file, the start of error messages.
        remedy: advice, the end of error messages.

    Raises:
        ConfigurationError: if the file is no valid configuration.
    """
    try:
        with path.open("rb") as file:
            return _options_in(file.read(MOST_BYTES + 1))
    except OSError as error:
        problem = f"cannot be read: {error.strerror}"
    except yaml.YAMLError as error:
        problem = (
            f"is not valid YAML: {' '.join(str(error).split())}. Quote texts with special characters, "
            "and indent with spaces"
        )
    except ConfigurationError as error:
        problem = f"is refused: {error}"
    raise ConfigurationError(f"{option}{path} {problem}{f'. {remedy}' if remedy else ''}")


def _options_in(content: bytes) -> dict[str, Any]:
    if len(content) > MOST_BYTES:
        raise ConfigurationError(f"it is larger than {MOST_BYTES} bytes")
    try:
        options = load(content.decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        byte = content[error.start]
        raise ConfigurationError(
            f"it is no UTF-8 text, byte {error.start} is 0x{byte:02x}: save it as UTF-8"
        ) from None
    if not isinstance(options, dict):
        raise ConfigurationError("it holds no options, which are written as name: value")
    return options


def load(text: str) -> Any:
    """Return the content of a YAML text.

    Raises:
        ConfigurationError: if the text is too deep or too large, refers to itself, or gives an option twice.
        yaml.YAMLError: if the text is no YAML.

    Example:
        >>> load("trainer: &a {x: *a}")
        Traceback (most recent call last):
        ...
        fl_lightning.core.errors.ConfigurationError: trainer.x refers to itself: write out what it must be
    """
    check_text(text)
    try:
        content = yaml.load(text, LOADER)
    except ValueError:  # of a number with thousands of digits
        raise ConfigurationError(f"a number must have at most {MOST_DIGITS} digits") from None
    check(content)
    return content


def check_text(text: str) -> None:
    """Raise if a YAML text is nested too deeply, or gives an option twice.

    Raises:
        ConfigurationError: with the option and its lines, counted from 1.
        yaml.YAMLError: if the text is no YAML.

    Example:
        >>> check_text(chr(10).join(["trainer:", "  max_epochs: 3", "  max_epochs: 4"]))
        Traceback (most recent call last):
        ...
        fl_lightning.core.errors.ConfigurationError: trainer.max_epochs stands in line 2 and again in \
line 3: keep one of them
    """
    inside: list[_Place] = []
    for event in _events(text):
        if isinstance(event, yaml.CollectionEndEvent):
            inside.pop()
        if not isinstance(event, yaml.NodeEvent):
            continue
        line = _line(event)
        if inside and (first := inside[-1].line_before(event)):
            path = ".".join(place.name for place in inside)
            again = "" if line == first else f" in line {line}"
            raise ConfigurationError(
                f"{path} stands in line {first} and again{again}: keep one of them"
            )
        if isinstance(event, yaml.CollectionStartEvent):
            inside.append(_Place(isinstance(event, yaml.MappingStartEvent)))
        if len(inside) > MOST_DEPTH:
            raise ConfigurationError(f"it is nested deeper than {MOST_DEPTH} levels")


def _events(text: str) -> Iterator[Any]:
    try:
        yield from yaml.parse(text, LOADER)
    except yaml.YAMLError as error:
        if "nesting depth" not in str(error):  # libyaml's own bound
            raise
        raise ConfigurationError(f"it is nested deeper than {MOST_DEPTH} levels") from None


def _line(event: Any) -> int:
    return int(event.start_mark.line) + 1


class _Place:
    """Parser's position inside a mapping, where names and values alternate, or inside a list."""

    def __init__(self, is_mapping: bool) -> None:
        self.name, self._is_mapping = "", is_mapping
        self._lines: dict[str, int] = {}
        self._count = 0

    def line_before(self, event: Any) -> int | None:
        """Move to the next name or value; returns the line where a name stood before."""
        count, self._count = self._count, self._count + 1
        if not self._is_mapping:
            self.name = str(count)
        if not self._is_mapping or count % 2 or not isinstance(event, yaml.ScalarEvent):
            return None
        self.name, line = event.value, _line(event)
        first = self._lines.get(self.name)
        self._lines[self.name] = line
        return first


def check(content: Any) -> None:
    """Raise if a content refers to itself, or is too deep or too large.

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
