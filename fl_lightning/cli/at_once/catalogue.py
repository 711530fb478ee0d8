"""What there is for an option: ``--federation.correction.help``, from a list made beforehand.

``catalogue.json`` is written by ``python -m fl_lightning.cli.at_once.catalogued``, which imports everything;
to read it takes a moment. With a class's name after it, the parser shows that class's own options; the
class may be anybody's.
"""

from __future__ import annotations

import json
import re
import textwrap
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

FILE = Path(__file__).with_name("catalogue.json")
_ASKED = re.compile(r"--(?P<block>\w+)(?:\.init_args)?\.(?P<option>\w+)\.help")


def asked_for(words: Sequence[str]) -> tuple[str, str] | None:
    """Return the option whose classes a command line asks for, without naming one of them.

    Example:
        >>> asked_for(["fit", "--federation.correction.help"])
        ('federation', 'correction')
        >>> asked_for(["fit", "--federation.correction.help", "fl_lightning.Scaffold"]) is None
        True
    """
    for word, following in zip(words, [*words[1:], "--"], strict=False):
        asked = _ASKED.fullmatch(word)
        if asked and following.startswith("--") and _option(asked["block"], asked["option"]):
            return asked["block"], asked["option"]
    return None


def catalogue(block: str, option: str) -> str:
    """Return a line for each class that an option takes.

    Example:
        >>> print(catalogue("federation", "asynchronous"))  # doctest: +ELLIPSIS
        federation.asynchronous takes one of
        <BLANKLINE>
          FedAsync  The server mixes every client's model in as it arrives.
          FedBuff   The server steps whenever a buffer of updates is full.
        <BLANKLINE>
        ...
    """
    found = _option(block, option)
    classes: Mapping[str, str] = found["classes"]
    width = max((len(_short(path)) for path in classes), default=0)
    lines: list[str] = []
    for path, line in classes.items():
        first, *more = textwrap.wrap(line, 79 - 2 - width - 2)
        lines += [
            f"  {_short(path).ljust(width)}  {first}",
            *(f"{'':{width + 4}}{m}" for m in more),
        ]
    lines += [f"  any {of}" for of in found["any"]]
    if not lines:
        bases = " or ".join(found["bases"])
        lines = [f"  a class of your own that derives from {bases}: see docs/extending.md"]
    example = next((_short(path) for path in classes), "CLASS_PATH")
    return "\n".join(
        [
            f"{block}.{option} takes one of",
            "",
            *lines,
            "",
            f"The options of one: --{block}.{option}.help {example}",
        ]
    )


def paths(block: str | None = None, option: str | None = None) -> Mapping[str, str]:
    """Return the whole paths of classes by their short names.

    Args:
        block: whose option, ``federation`` or ``data``; all options' classes if None.
        option: its name.

    Example:
        >>> paths("federation", "correction")["FedProx"]
        'fl_lightning.FedProx'
    """
    if block is None:
        options = [option for block in blocks().values() for option in block["classes"].values()]
    else:
        options = [_option(block, option)] if _option(block, option) else []
    return {_short(path): path for found in options for path in found["classes"]}


def options_with_classes(block: str) -> Sequence[str]:
    """Return the names of a block's options that take classes."""
    return list(blocks()[block]["classes"])


@cache
def blocks() -> dict[str, dict[str, Any]]:
    """Return the file: by block, its ``options`` and the ``classes`` that they take."""
    content: dict[str, dict[str, Any]] = json.loads(FILE.read_text(encoding="utf-8"))
    return content


def _option(block: str, option: str | None) -> Any:
    return blocks().get(block, {}).get("classes", {}).get(option)


def _short(path: str) -> str:
    return path.rpartition(".")[2]
