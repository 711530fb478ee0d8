"""JSON from untrusted senders: a canonical text for each value, with limits on depth and length.

Two readers must not understand the same text differently: a repeated name, NaN, and numbers that
overflow are refused, and so is any text that `to_text` would not have written.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from typing import Any

MOST_DEPTH = 32
MOST_BITS = 4096  # bits of a whole number
LARGEST_NUMBER = 2**63 - 1  # largest value of a field that holds a whole number
MOST_CHARACTERS = 1000  # characters of a name
# an unterminated string matches the rest of the text, so that one pass is enough
_STRING = re.compile(r'"(?:[^"\\]|\\.)*+"?', re.DOTALL)
_BRACKET = re.compile(r"[\[\]{}]")


class MessageError(ValueError):
    """Raised for an invalid message or file, or for one that cannot be written."""


def to_text(value: Any) -> str:
    """Return the canonical JSON text of a value: sorted names, no spaces, ASCII.

    Raises:
        MessageError: if the value is not plain JSON.

    Example:
        >>> to_text({"b": [1, None], "a": -0.0})
        '{"a":-0.0,"b":[1,null]}'
        >>> to_text({"rate": float("nan")})
        Traceback (most recent call last):
        ...
        fl_lightning.core.plain_json.MessageError: .rate is nan: only finite numbers can be sent
    """
    check_plain(value)
    return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False)


def from_text(text: str) -> Any:
    """Return the value of a canonical JSON text.

    Raises:
        MessageError: if `to_text` cannot have written the text.
    """
    value = parse(text)
    if to_text(value) != text:
        raise MessageError("the JSON is not in canonical form (sorted names, no spaces, ASCII)")
    return value


def parse(text: str) -> Any:
    """Parse any JSON text; raise MessageError for repeated names and deep nesting."""
    depth = deepest = 0
    for bracket in _BRACKET.finditer(_STRING.sub("", text)):
        depth += 1 if bracket[0] in "[{" else -1
        deepest = max(deepest, depth)
    if deepest > MOST_DEPTH:
        raise MessageError(f"the JSON must have at most {MOST_DEPTH} nested levels, got {deepest}")
    try:
        return json.loads(
            text, object_pairs_hook=_unique, parse_constant=_no_constant, parse_int=_whole
        )
    except json.JSONDecodeError as error:
        raise MessageError(f"invalid JSON: {error.msg} at character {error.pos}") from None


def check_plain(value: Any, where: str = "", depth: int = 0) -> None:
    """Raise MessageError with the entry's name if a value is not plain JSON or has non-finite numbers."""
    kind = type(value)
    if kind is dict or kind is list:
        if depth >= MOST_DEPTH:
            raise MessageError(f"{where} is nested deeper than {MOST_DEPTH}")
        for name, inner in value.items() if kind is dict else enumerate(value):
            if kind is dict:
                check_string(name, f"a name in {where or 'the message'}")
            check_plain(inner, f"{where}.{name}", depth + 1)
    elif kind is str:
        check_string(value, where)
    else:
        _check_leaf(value, where)


def _check_leaf(value: Any, where: str) -> None:
    kind = type(value)
    if kind is float and not math.isfinite(value):
        raise MessageError(f"{where} is {value}: only finite numbers can be sent")
    if kind is int and value.bit_length() > MOST_BITS:
        raise MessageError(f"{where} is a whole number of more than {MOST_BITS} bits")
    if value is not None and kind not in (bool, int, float):
        advice = ": use a list" if isinstance(value, tuple) else ""
        advice = ": use a dict" if isinstance(value, Mapping) else advice
        raise MessageError(f"{where} has the type {kind.__name__}, which JSON lacks{advice}")


def check_form(written: Any, read: Any) -> None:
    """Raise MessageError if decoding and encoding a document again gives another text."""
    if to_text(written) != to_text(read):
        raise MessageError("the message is not in canonical form")


def check_string(value: Any, what: str) -> None:
    """Raise MessageError if a value is no string, or cannot be encoded as UTF-8."""
    if type(value) is not str:
        raise MessageError(f"{what} must be a text, got {shown(value)}")
    try:
        value.encode()
    except UnicodeEncodeError:
        raise MessageError(f"{what} cannot be encoded as UTF-8") from None


def shown(value: Any) -> str:
    """Return a value as text for an error message, shortened to 60 characters.

    Example:
        >>> shown("a" * 100)
        "'aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa…"
    """
    if type(value) is int and value.bit_length() > 200:
        return f"a whole number of {value.bit_length()} bits"
    if isinstance(value, dict | set | frozenset) and len(value) > 20:
        return f"a {type(value).__name__} of {len(value)}"
    try:
        text = repr(value[:100] if isinstance(value, str | bytes | list | tuple) else value)
    except ValueError:  # a whole number inside it is too long
        return f"a {type(value).__name__}"
    return text if len(text) <= 60 else f"{text[:59]}…"


def check_choice(what: str, value: Any, choices: tuple[str, ...] | Mapping[str, str]) -> None:
    """Raise MessageError if a value is not one of the allowed texts."""
    if type(value) is not str or value not in choices:
        raise MessageError(f"{what} must be one of {', '.join(choices)}, got {shown(value)}")


def check_hex(what: str, value: Any, digits: int) -> None:
    """Raise MessageError if a value is not a text of ``digits`` lower-case hexadecimal digits."""
    if type(value) is not str or not re.fullmatch(f"[0-9a-f]{{{digits}}}", value):
        raise MessageError(f"{what} must be {digits} hexadecimal digits, got {shown(value)}")


def check_whole(what: str, value: Any, least: int = 0, most: int = LARGEST_NUMBER) -> None:
    """Raise MessageError if a value is not a whole number from ``least`` to ``most``."""
    if type(value) is not int or not least <= value <= most:
        above = "" if most == LARGEST_NUMBER else f" and at most {most}"
        raise MessageError(
            f"{what} must be a whole number, at least {least}{above}, got {shown(value)}"
        )


def check_number(what: str, value: Any) -> None:
    """Raise MessageError if a value is not a finite float."""
    if type(value) is not float or not math.isfinite(value):
        raise MessageError(f"{what} must be a finite number, a float, got {shown(value)}")


def check_names(what: str, mapping: Any) -> None:
    """Raise MessageError if a value is not a mapping whose keys are short, printable names."""
    if not isinstance(mapping, Mapping):
        raise MessageError(f"{what} must be a mapping, got {shown(mapping)}")
    for name in mapping:
        check_string(name, f"{what}: a name")
        if not 0 < len(name) <= MOST_CHARACTERS or not name.isprintable():
            raise MessageError(
                f"{what}: a name must be 1 to {MOST_CHARACTERS} printable characters, "
                f"got {shown(name)}"
            )


def check_options(options: Any) -> None:
    """Raise MessageError if a value is not a mapping from names to plain JSON."""
    check_names("options", options)
    check_plain(dict(options), "options")


def fields_of(document: Mapping[str, Any], names: tuple[str, ...], what: str) -> dict[str, Any]:
    """Return a JSON object whose fields must be exactly ``names``; else raise MessageError."""
    if type(document) is not dict:
        raise MessageError(f"{what} must be a mapping, got {shown(document)}")
    unknown, missing = sorted(document.keys() - set(names)), sorted(set(names) - document.keys())
    if unknown or missing:
        faults = [f"has no {', '.join(missing)}"] if missing else []
        faults += [f"has the unknown field {shown(unknown[0])}"] if unknown else []
        raise MessageError(f"{what} {' and '.join(faults)}")
    return document


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise MessageError("the JSON has the same name twice")
    return found


def _no_constant(name: str) -> None:
    raise MessageError(f"the JSON has {name}: only finite numbers can be sent")


def _whole(digits: str) -> int:
    if len(digits) > MOST_BITS // 3:
        raise MessageError(f"the JSON has a number of {len(digits)} digits, which is too long")
    return int(digits)
