"""Lightning's own subcommands, fit, validate, test and predict: run, and resolved without being run."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import redirect_stderr, redirect_stdout
from io import StringIO

from lightning.pytorch import Callback
from lightning.pytorch.cli import ArgsType

from fl_lightning.cli.console import console
from fl_lightning.cli.federated_cli import FederatedCLI
from fl_lightning.cli.mistakes.constructors import watched
from fl_lightning.cli.mistakes.errors import explain
from fl_lightning.cli.runs import RunConfig
from fl_lightning.core.errors import ClientFailure, ConfigurationError, RoundFailure


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
