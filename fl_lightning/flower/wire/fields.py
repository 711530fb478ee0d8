"""What the fields of orders and answers may be: each check returns what it was given or refuses it."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from functools import cache
from importlib.metadata import version
from typing import Any

from fl_lightning.flower.wire.plain_json import MessageError, check_plain, check_string, shown

OWN_VERSION = "fl_lightning"
LARGEST_NUMBER = 2**63 - 1
MOST_CHARACTERS = 1000  # of a name
_SITE = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,62}")
_PLACE = re.compile(r"stage/[^/]+/.+", re.DOTALL)


@cache
def package_version() -> str:
    """Return the version of fl_lightning that runs here."""
    return version("fl_lightning")


def check_version(found: object, where: str) -> None:
    """Refuse messages of another version of the package, whose rules may be others.

    Raises:
        MessageError: with both versions.
    """
    if found != package_version():
        raise MessageError(
            f"the {where} has fl_lightning {shown(found)}, here it is {package_version()!r}: "
            "install the same version at the server and the sites"
        )


def check_site(name: Any) -> str:
    """Return the name of a site, which is also a folder's and a file's.

    Example:
        >>> check_site("../etc")
        Traceback (most recent call last):
        ...
        fl_lightning.flower.wire.plain_json.MessageError: site must be 1 to 63 letters, digits, _, . or -, \
the first a letter or digit, got '../etc'
    """
    if type(name) is not str or not _SITE.fullmatch(name):
        raise MessageError(
            "site must be 1 to 63 letters, digits, _, . or -, the first a letter or digit, "
            f"got {shown(name)}"
        )
    return name


def check_choice(what: str, value: Any, choices: tuple[str, ...] | Mapping[str, str]) -> None:
    """Refuse what is not one of the choices."""
    if type(value) is not str or value not in choices:
        raise MessageError(f"{what} must be one of {', '.join(choices)}, got {shown(value)}")


def check_hex(what: str, value: Any, digits: int) -> None:
    """Refuse what is not so many small hexadecimal digits."""
    if type(value) is not str or not re.fullmatch(f"[0-9a-f]{{{digits}}}", value):
        raise MessageError(f"{what} must be {digits} hexadecimal digits, got {shown(value)}")


def check_whole(what: str, value: Any, least: int = 0, most: int = LARGEST_NUMBER) -> None:
    """Refuse what is not a whole number in a range."""
    if type(value) is not int or not least <= value <= most:
        above = "" if most == LARGEST_NUMBER else f" and at most {most}"
        raise MessageError(
            f"{what} must be a whole number, at least {least}{above}, got {shown(value)}"
        )


def check_number(what: str, value: Any) -> None:
    """Refuse what is not a finite float."""
    if type(value) is not float or not math.isfinite(value):
        raise MessageError(f"{what} must be a finite number, a float, got {shown(value)}")


def check_clients(clients: Any) -> None:
    """Refuse what is not a tuple of different clients."""
    if type(clients) is not tuple:
        raise MessageError(f"clients must be a tuple, got {shown(clients)}")
    for client in clients:
        check_whole("clients: each", client)
    if len(set(clients)) < len(clients):
        raise MessageError(f"clients must be different, got {shown(clients)}")


def check_names(what: str, mapping: Any) -> None:
    """Refuse what is not a mapping from printable names."""
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
    """Refuse what is not a mapping from names to plain JSON."""
    check_names("options", options)
    check_plain(dict(options), "options")


def is_stage_tensor(name: str) -> bool:
    """Whether a tensor's name is ``stage/<key>/<name>``.

    Example:
        >>> is_stage_tensor("stage/corrector/layers.0.weight"), is_stage_tensor("stage/corrector")
        (True, False)
    """
    return _PLACE.fullmatch(name) is not None


def fields_of(document: Mapping[str, Any], names: tuple[str, ...], what: str) -> dict[str, Any]:
    """Return the fields of a document, which must be exactly these."""
    if type(document) is not dict:
        raise MessageError(f"{what} must be a mapping, got {shown(document)}")
    unknown, missing = sorted(document.keys() - set(names)), sorted(set(names) - document.keys())
    if unknown or missing:
        told = [f"has no {', '.join(missing)}"] if missing else []
        told += [f"has {shown(unknown[0])}, which is not known"] if unknown else []
        raise MessageError(f"{what} {' and '.join(told)}")
    return document


def tuple_of(value: Any) -> tuple[Any, ...]:
    """Return the clients of a document, which are a list there."""
    if type(value) is not list:
        raise MessageError(f"clients must be a list, got {shown(value)}")
    return tuple(value)
