"""Runs the commands of the command line, and fits for other commands.

``fl-lightning fit --config configs/quickstart.yaml``; also ``validate``, ``test``, ``predict``.
``compare`` and ``sweep`` run many fits, ``search`` and ``latency`` are about architectures, ``network``
trains over a real network.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import redirect_stderr, redirect_stdout
from importlib import import_module
from io import StringIO
from typing import Any

import yaml
from jsonargparse import dict_to_namespace
from lightning.pytorch import Callback
from lightning.pytorch.cli import ArgsType

from fl_lightning.cli.checks import check_values
from fl_lightning.cli.errors import Parser, explain
from fl_lightning.cli.federated_cli import FederatedCLI, ended_with_a_sentence
from fl_lightning.cli.help import COMMANDS
from fl_lightning.cli.runs import RunConfig, console
from fl_lightning.core.errors import ClientFailure, ConfigurationError, RoundFailure
from fl_lightning.core.optuna_extra import optuna_for
from fl_lightning.federation import Federation

# modules that take seconds to import; the function that runs a command has the command's name
_MODULES = {
    "report": "fl_lightning.reports.run_report",
    "compare": "fl_lightning.experiments.compare",
    "sweep": "fl_lightning.experiments.sweep",
    "search": "fl_lightning.cli.search",
    "latency": "fl_lightning.cli.latency",
    "export": "fl_lightning.cli.export",
    "network": "fl_lightning.cli.network",
}
# commands that pass words after -- on to a fit
_WITH_FITS = ("compare", "sweep", "search", "network")


def parser_of(command: str) -> Parser:
    """Return the argument parser of one of this package's own commands, e.g. ``compare``.

    Args:
        command: ``report``, ``export``, ``compare``, ``sweep``, ``search``, ``latency`` or ``network``.
    """
    if command == "sweep":
        optuna_for("a sweep", "sweep")
    parser = Parser(prog=f"fl-lightning {command}", description=COMMANDS[command])
    import_module(_MODULES[command]).add_arguments(parser)
    return parser


def run_command(args: ArgsType) -> None:
    """Run a command line; if the user can correct an error, print one sentence about it and exit.

    Args:
        args: words of the command line, in which configurations and classes have their whole paths.
    """
    ended_with_a_sentence(lambda: _run(args))


def _run(words: Any) -> None:
    command, *rest = words if isinstance(words, list) and words else [""]
    if command not in _MODULES:
        run_lightning(words)
        return
    parser = parser_of(command)
    at = rest.index("--") if "--" in rest and command in _WITH_FITS else len(rest)
    options: dict[str, Any] = {"options": rest[at + 1 :]} if command in _WITH_FITS else {}
    if command in ("compare", "sweep"):  # whose modules must not import this one
        options |= {"resolve": resolve, "fit": fit_run}
    run = getattr(import_module(_MODULES[command]), command)
    run(parser.parse_args(rest[:at]), **options)


def resolve(words: Sequence[str]) -> str:
    """Return the complete configuration of a ``fit`` as YAML, checked as far as possible without training.

    Raises:
        ConfigurationError: if an option is refused, or the federation refuses its options together.
    """
    said, refused = StringIO(), StringIO()
    try:
        with redirect_stdout(said), redirect_stderr(refused):
            run_lightning(["fit", *words, "--print_config"])
    except SystemExit as end:
        if end.code:
            sentence = refused.getvalue().strip().removeprefix("fl-lightning: ")
            raise ConfigurationError(sentence) from None
    text = said.getvalue()
    configuration = yaml.safe_load(text)
    check_values(dict_to_namespace(configuration))
    block = Parser(
        exit_on_error=False
    )  # of the federation alone, because data and model take long to build
    block.add_argument("--federation", type=Federation | None)
    block.instantiate(block.parse_object({"federation": configuration.get("federation")}))
    return text


def fit_run(words: Sequence[str], callbacks: Sequence[Callback]) -> None:
    """Run the command ``fit`` with additional callbacks, in a worker process of ``compare`` or ``sweep``.

    Raises:
        ConfigurationError: for a setting that cannot work, even if another library refuses it.
    """
    with console():
        try:
            run_lightning(["fit", *words], callbacks)
        except (ClientFailure, RoundFailure):
            raise
        except Exception as error:
            sentence = explain(error)
            if sentence is None:
                raise
            raise ConfigurationError(sentence) from error


def run_lightning(
    args: ArgsType,
    callbacks: Sequence[Callback] = (),
    *,
    cli: type[FederatedCLI] = FederatedCLI,
    keeps_configuration: bool = True,
) -> None:
    """Run one of Lightning's subcommands, e.g. ``fit`` or ``validate``.

    Args:
        args: the words of the command line.
        callbacks: additional callbacks, ahead of those of the configuration.
        cli: class of the command line.
        keeps_configuration: whether ``config.yaml`` is saved in the run's folder.
    """
    cli(
        args=args,
        trainer_defaults={"callbacks": list(callbacks)},
        save_config_callback=RunConfig if keeps_configuration else None,
    )
