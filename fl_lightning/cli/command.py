"""The commands, and what runs each.

``fl-lightning fit --config configs/quickstart.yaml``; also ``validate``, ``test``, ``predict``.
``compare`` and ``sweep`` run many fits, ``search`` and ``latency`` are about architectures, ``network``
trains over a real network.
"""

from __future__ import annotations

from typing import Any

from lightning.pytorch.cli import ArgsType

from fl_lightning.cli.at_once.commands import COMMANDS
from fl_lightning.cli.federated_cli import ended_with_a_sentence
from fl_lightning.cli.mistakes.errors import Parser
from fl_lightning.cli.subcommands import fit_trial, resolve, run_lightning, validate


def parser_of(command: str) -> Parser:
    """Return the parser of one of our commands.

    Args:
        command: ``compare``, ``sweep``, ``search``, ``latency`` or ``network``. What runs it is imported now.
    """
    parser = Parser(prog=f"fl-lightning {command}", description=COMMANDS[command])
    if command == "compare":
        from fl_lightning.experiments.compare import add_arguments

        add_arguments(parser)
    elif command == "sweep":
        from fl_lightning.cli.sweep import add_arguments

        add_arguments(parser)
    elif command == "search":
        from fl_lightning.cli.search import add_arguments

        add_arguments(parser)
    elif command == "latency":
        from fl_lightning.cli.latency import add_arguments

        add_arguments(parser)
    else:
        from fl_lightning.cli.over_network.network import add_commands

        add_commands(parser, Parser)
    return parser


def _run(words: Any) -> None:
    """Run one of our commands, or one of Lightning's."""
    is_typed = isinstance(words, list) and words
    command: str = words[0] if is_typed else ""
    rest: list[str] = words[1:] if is_typed else []
    if command == "compare":
        from fl_lightning.experiments.compare import compare

        compare(rest, parser=parser_of(command), resolve=resolve)
    elif command == "sweep":
        from fl_lightning.cli.sweep import sweep

        sweep(rest, parser=parser_of(command), resolve=resolve, fit=fit_trial)
    elif command == "search":
        from fl_lightning.cli.search import search

        search(rest, parser=parser_of(command), validate=validate, resolve=resolve)
    elif command == "latency":
        from fl_lightning.cli.latency import latency

        latency(rest, parser=parser_of(command))
    elif command == "network":
        from fl_lightning.cli.over_network.network import network

        network(rest, parser=parser_of(command))
    else:
        run_lightning(words)


def run_command(args: ArgsType) -> None:
    """Run a command; a setting that cannot work ends it with one sentence.

    Args:
        args: words of the command line, as the door gives them on.
    """
    ended_with_a_sentence(lambda: _run(args))
