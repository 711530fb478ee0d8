"""The commands, and what runs each.

``fl-lightning fit --config configs/quickstart.yaml``; also ``validate``, ``test``, ``predict``.
``fl-lightning compare`` runs many fits;
``search`` and ``latency`` are about architectures, ``network`` trains over a real network.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import redirect_stderr, redirect_stdout
from io import StringIO
from typing import Any

from lightning.pytorch import Callback
from lightning.pytorch.cli import ArgsType

from fl_lightning.cli.at_once.commands import COMMANDS
from fl_lightning.cli.console import console
from fl_lightning.cli.federated_cli import FederatedCLI, ended_with_a_sentence
from fl_lightning.cli.mistakes.constructors import watched
from fl_lightning.cli.mistakes.errors import Parser, explain
from fl_lightning.cli.runs import (
    RunConfig,
)
from fl_lightning.core.errors import (
    ClientFailure,
    ConfigurationError,
    RoundFailure,
)


def resolve(words: Sequence[str]) -> str:
    """Return the complete configuration of a fit, as YAML, without running it.

    Args:
        words: of the command line, after ``fit``.

    Raises:
        ConfigurationError: if they are refused.
    """
    said, refused = StringIO(), StringIO()
    try:
        with redirect_stdout(said), redirect_stderr(refused):
            run_lightning(["fit", *words, "--print_config"])
    except SystemExit as end:
        if end.code:
            sentence = refused.getvalue().strip().removeprefix("fl-lightning: ")
            raise ConfigurationError(sentence) from None
    return said.getvalue()


def fit_trial(words: Sequence[str], callback: Callback) -> None:
    """Run ``fit`` with a callback of ours, in a process that has just begun.

    Args:
        words: of the command line, after ``fit``.
        callback: beside those of the configuration.

    Raises:
        ConfigurationError: for a setting that cannot work, whoever refuses it.
    """
    with console(), watched() as watch:
        try:
            run_lightning(["fit", *words], [callback])
        except (ClientFailure, RoundFailure):
            raise
        except Exception as error:
            sentence = explain(error, watch)
            if sentence is None:
                raise
            raise ConfigurationError(sentence) from error


def validate(words: Sequence[str], callback: Callback) -> None:
    """Run ``validate`` with a callback of ours, which leaves nothing on the disk.

    Args:
        words: of the command line, after ``validate``.
        callback: beside those of the configuration.
    """
    run_lightning(["validate", *words], [callback], keeps_configuration=False)


def run_lightning(
    args: ArgsType,
    callbacks: Sequence[Callback] = (),
    *,
    cli: type[FederatedCLI] = FederatedCLI,
    keeps_configuration: bool = True,
) -> None:
    """Run one of Lightning's subcommands.

    Args:
        args: of the command line.
        callbacks: of ours.
        cli: what runs it.
        keeps_configuration: whether the configuration is saved beside checkpoints.
    """
    cli(
        args=args,
        trainer_defaults={"callbacks": list(callbacks)},
        save_config_callback=RunConfig if keeps_configuration else None,
    )


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
