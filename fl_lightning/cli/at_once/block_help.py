"""``--federation.help``: the options of the block in groups, those that most people set first.

The texts are the docstring's, read beforehand into the catalogue's file.
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterator, Sequence
from typing import Any

from fl_lightning.cli.at_once.catalogue import blocks, options_with_classes

GROUPS: dict[str, dict[str, tuple[str, ...]]] = {
    "federation": {
        "what most people set": (
            *("cohort", "local_epochs", "local_steps", "correction", "aggregator"),
            *("server_optimizer", "on_client_failure"),
        ),
        "clients": ("personal", "client_state", "client_memory_gb", "devices", "attackers"),
        "what travels": ("updates", "download", "privacy"),
        "the server": ("min_replies", "server_schedule", "asynchronous", "stages"),
        "speed": ("engine", "slots", "speedups", "spot_check", "pad_batches", "clients_per_group"),
        "randomness": ("seed",),
    },
}
_ASKED = re.compile(r"--(?P<block>\w+)\.help")


def asked_for_block(words: Sequence[str]) -> str | None:
    """Return the block whose options a command line asks for, None if it does not.

    Example:
        >>> asked_for_block(["fit", "--federation.help"])
        'federation'
    """
    found = (_ASKED.fullmatch(word) for word in words)
    return next((match["block"] for match in found if match and match["block"] in GROUPS), None)


def block_help(block: str) -> str:
    """Return the options of a block, at most 80 characters a line."""
    options = blocks()[block]["options"]
    listed = options_with_classes(block)
    lines: list[str] = []
    for title, names in GROUPS[block].items():
        lines += [
            f"{title}:",
            *(line for name in names for line in _lines(name, options[name])),
            "",
        ]
    example = next(name for name in GROUPS[block]["what most people set"] if name in listed)
    lines += [
        f"In YAML a mapping, on the command line --{block}.NAME VALUE. Classes of an",
        f"option: --{block}.NAME.help, as in --{block}.{example}.help.",
    ]
    return "\n".join(lines)


def _lines(name: str, option: dict[str, Any]) -> Iterator[str]:
    default = "" if option["default"] == "null" else f" (default: {option['default']})"
    said = f"{option['help']}{default}".replace("`", "").replace("None", "null")
    first, *more = textwrap.wrap(said, 56)
    yield f"  {name.ljust(20)}{first}"
    yield from (f"  {'':20}{line}" for line in more)
