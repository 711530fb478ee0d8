"""The command ``fl-lightning sweep``: its options, and a fit with a callback for every trial."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from jsonargparse import ArgumentParser
from jsonargparse.typing import PositiveInt

from fl_lightning.core.optuna_extra import optuna_for
from fl_lightning.experiments.compare import split
from fl_lightning.experiments.plan import Resolve
from fl_lightning.experiments.space import Search


def add_arguments(parser: ArgumentParser) -> None:
    """Give a parser the options of the command."""
    parser.add_argument(
        "-c",
        "--config",
        action="append",
        type=str,
        default=[],
        help="A configuration, as fit takes it; may be given several times.",
    )
    parser.add_argument(
        "-s", "--search", action="config", help="The search's YAML file: the options below."
    )
    parser.add_class_arguments(Search, None)
    parser.add_argument(
        "--workers", type=PositiveInt, default=2, help="Trials at a time here, one thread each."
    )
    parser.add_argument(
        "--out",
        type=str | None,
        default=None,
        help="Folder of runs and results; runs/sweep_<name> if null. The same command goes on with "
        "what is unfinished there.",
    )
    parser.add_argument(
        "--storage",
        type=str | None,
        default=None,
        help="Of the study, for many machines: a database's URL, as postgresql://user@host/name, or "
        "the path of a journal, a file on a disk that they share; <out>/study.db if null.",
    )
    parser.add_argument(
        "--name",
        type=str | None,
        default=None,
        help="Of the study in the storage; that of the search's or the configuration's file if null.",
    )


def sweep(
    words: Sequence[str],
    *,
    parser: ArgumentParser,
    resolve: Resolve,
    fit: Callable[..., None],
) -> None:
    """Run the command; ends the process with code 1 if trials fail.

    Args:
        words: of the command line, without the command; those after ``--`` go to every run.
        parser: one with the options of the command.
        resolve: from the words of a fit's command line to its complete configuration as YAML.
        fit: runs a fit's command line with a callback, in another process.

    Raises:
        ConfigurationError: if an option is refused, or Optuna is not installed.
    """
    own, options = split(words)
    given = parser.parse_args(own)
    optuna_for("a sweep", "sweep")
    from fl_lightning.experiments.sweep import sweep as run  # imports Optuna

    search = Search(**{key: getattr(given, key) for key in Search.__dataclass_fields__})
    name = given.name or _name(given)
    run(
        search,
        given.config,
        options,
        out=Path(given.out or Path("runs", f"sweep_{name}")),
        storage=given.storage,
        name=name,
        workers=given.workers,
        resolve=resolve,
        fit=fit,
    )


def _name(given: Any) -> str:
    """Return the name of the search's file, or else of the last configuration's."""
    files = [str(path) for path in given.search or []] or given.config
    return Path(files[-1]).stem if files else "sweep"
