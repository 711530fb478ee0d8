"""The commands, and what runs each.

``fl-lightning fit --config configs/quickstart.yaml``; also ``validate``, ``test``, ``predict``.
``compare`` and ``sweep`` run many fits, ``search`` and ``latency`` are about architectures, ``network``
trains over a real network.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

from lightning.pytorch.cli import ArgsType

from fl_lightning.cli.at_once.commands import COMMANDS
from fl_lightning.cli.federated_cli import ended_with_a_sentence
from fl_lightning.cli.mistakes.errors import Parser
from fl_lightning.cli.subcommands import fit_trial, resolve, run_lightning, validate

# modules that take seconds to import: each has a function of its command's name
_HOMES = {
    "compare": "fl_lightning.experiments.compare",
    "sweep": "fl_lightning.cli.sweep",
    "search": "fl_lightning.cli.search",
    "latency": "fl_lightning.cli.latency",
    "network": "fl_lightning.cli.over_network.network",
}
_OPTIONS: dict[str, dict[str, Any]] = {
    "compare": {"resolve": resolve},
    "sweep": {"resolve": resolve, "fit": fit_trial},
    "search": {"validate": validate, "resolve": resolve},
}


def parser_of(command: str) -> Parser:
    """Return the parser of one of our commands.

    Args:
        command: ``compare``, ``sweep``, ``search``, ``latency`` or ``network``. What runs it is imported now.
    """
    parser = Parser(prog=f"fl-lightning {command}", description=COMMANDS[command])
    home = import_module(_HOMES[command])
    if command == "network":
        home.add_commands(parser, Parser)
    else:
        home.add_arguments(parser)
    return parser


def _run(words: Any) -> None:
    """Run one of our commands, or one of Lightning's."""
    is_typed = isinstance(words, list) and words
    command: str = words[0] if is_typed else ""
    rest: list[str] = words[1:] if is_typed else []
    if command in _HOMES:
        run = getattr(import_module(_HOMES[command]), command)
        run(rest, parser=parser_of(command), **_OPTIONS.get(command, {}))
    else:
        run_lightning(words)


def run_command(args: ArgsType) -> None:
    """Run a command; a setting that cannot work ends it with one sentence.

    Args:
        args: words of the command line, as the door gives them on.
    """
    ended_with_a_sentence(lambda: _run(args))
