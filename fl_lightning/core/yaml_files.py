"""Reading YAML from users and other machines, with limits on size and depth and without duplicate names.

A file may refer to itself (``trainer: &a {x: *a}``), be nested very deeply, grow a million times by
references, set an option twice, or contain no text. A YAML parser then hangs, raises a long traceback, or
silently uses the last of two values. `load` raises an error that names the problem and the option.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from string import hexdigits
from typing import Any

import yaml

from fl_lightning.core.errors import ConfigurationError

MOST_BYTES = 1_000_000
MOST_DEPTH = 64
MOST_VALUES = 200_000
MOST_DIGITS = 40  # of a whole number: seeds have 20
LOADER: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # libyaml is ten times as fast


def read(path: Path, option: str = "config: ", *, remedy: str = "") -> dict[str, Any]:
    """Read a YAML file of options, and return these as a dict.

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
        problem = f"is not valid: {error}"
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
        raise ConfigurationError("it contains no options, which are written as name: value")
    return options


def load(text: str, path: str = "") -> Any:
    """Parse a YAML text; raise ConfigurationError if it is unsafe to read or repeats an option.

    Args:
        text: the text.
        path: path of the option whose value the text is; empty for a file.

    Raises:
        ConfigurationError: if the text is too deep or too large, refers to itself, or gives an option twice.
        yaml.YAMLError: if the text is no YAML.

    Example:
        >>> load("trainer: &a {x: *a}")
        Traceback (most recent call last):
        ...
        fl_lightning.core.errors.ConfigurationError: trainer.x refers to itself: write its value without a \
reference
    """
    check_text(text, path)
    try:
        return yaml.load(text, LOADER)
    except ValueError as error:  # of an impossible date
        raise ConfigurationError(f"a value cannot be read: {error}") from None


def check_text(text: str, path: str = "") -> None:
    """Raise ConfigurationError if a YAML text is nested too deeply, too large, self-referential, or repeats an option.

    Args:
        text: the text.
        path: path of the option whose value the text is; empty for a file.

    Raises:
        ConfigurationError: with the option, and the lines where it stands twice, counted from 1.
        yaml.YAMLError: if the text is no YAML.

    Example:
        >>> check_text(chr(10).join(["trainer:", "  max_epochs: 3", "  max_epochs: 4"]))
        Traceback (most recent call last):
        ...
        fl_lightning.core.errors.ConfigurationError: trainer.max_epochs is set in line 2 and again in line 3: \
keep one of them
    """
    _check_depth(text, path)
    for count, _ in enumerate(_nodes(yaml.compose(text, LOADER), path, ()), start=1):
        if count > MOST_VALUES:
            raise ConfigurationError(
                f"{path or 'it'} has more than {MOST_VALUES} names and values, counting those behind references "
                "(&, *) each time: use fewer references"
            )


def _check_depth(text: str, path: str) -> None:
    """Raise ConfigurationError if a YAML text is nested too deeply for the recursive parser."""
    depth = 0
    try:
        for event in yaml.parse(text, LOADER):
            depth += isinstance(event, yaml.CollectionStartEvent)
            depth -= isinstance(event, yaml.CollectionEndEvent)
            if depth > MOST_DEPTH:
                break
    except yaml.YAMLError as error:
        if "nesting depth" not in str(error):  # libyaml's own bound
            raise
        depth = MOST_DEPTH + 1
    if depth > MOST_DEPTH:
        raise ConfigurationError(f"{path or 'it'} is nested deeper than {MOST_DEPTH} levels")


def _nodes(node: Any, path: str, outer: tuple[Any, ...]) -> Iterator[Any]:
    """Yield all nodes of a YAML text, those behind references each time; raise an error for an invalid node."""
    yield node
    _check_node(node, path, outer)
    for place, inner in _entries(node, path):
        yield from _nodes(inner, place, (*outer, node))


def _check_node(node: Any, path: str, outer: tuple[Any, ...]) -> None:
    if any(node is each for each in outer):
        raise ConfigurationError(f"{path} refers to itself: write its value without a reference")
    if len(outer) > MOST_DEPTH:
        raise ConfigurationError(f"{path[:60]}… is nested deeper than {MOST_DEPTH} levels")
    is_whole = isinstance(node, yaml.ScalarNode) and node.tag == "tag:yaml.org,2002:int"
    if is_whole and (num_digits := sum(map(hexdigits.count, node.value))) > MOST_DIGITS:
        raise ConfigurationError(
            f"{path} must have at most {MOST_DIGITS} digits, got {num_digits} digits"
        )


def _entries(node: Any, path: str) -> Iterator[tuple[str, Any]]:
    """Yield (path, node) for the entries of a YAML list or mapping; for a mapping, its names too."""
    lines: dict[str, int] = {}
    for number, entry in enumerate(node.value if isinstance(node, yaml.CollectionNode) else ()):
        if isinstance(node, yaml.SequenceNode):
            yield f"{path}[{number}]", entry
            continue
        key, inner = entry
        name, line = str(key.value), key.start_mark.line + 1
        place = f"{path}.{name}".lstrip(".")
        if first := lines.get(name):
            again = "" if line == first else f" in line {line}"
            raise ConfigurationError(
                f"{place} is set in line {first} and again{again}: keep one of them"
            )
        lines[name] = line
        yield place, key
        yield place, inner
