"""What can be refused before the parser is there: a command without words, files for another command.

An experiment may be given to ``fit``, a run to ``compare`` or ``sweep``; an option of the federation may be
misspelt.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from difflib import get_close_matches
from itertools import pairwise
from pathlib import Path
from typing import Any

import yaml

from fl_lightning.cli.at_once.catalogue import blocks
from fl_lightning.cli.at_once.commands import OF_LIGHTNING
from fl_lightning.core.errors import ConfigurationError

_OF_EXPERIMENTS = ("variants", "base")
_OF_RUNS = ("model", "data", "trainer")
_OPTION = re.compile(r"--federation\.(?!init_args|help)(?P<name>\w+).*")


def check_command(words: Sequence[str]) -> None:
    """Refuse a command line that no parser is needed for.

    Args:
        words: of the command line, the command first.

    Raises:
        ConfigurationError: with what to type instead.
    """
    if [*words] in [[name] for name in OF_LIGHTNING]:
        raise ConfigurationError(
            f"{words[0]} needs a configuration: --config quickstart is one to begin with, "
            "fl-lightning configs lists all"
        )
    _check_options(words)
    for path in _files(words, "--search"):
        keys = _keys(path)
        if "space" not in keys and any(key in keys for key in _OF_RUNS):
            raise ConfigurationError(
                f"{path} has no space of values to try, as a search has: fl-lightning sweep --search "
                "sweeps/quickstart is one"
            )
    for path in _files(words, "--config", "-c"):
        keys = _keys(path)
        if "space" in keys:
            raise ConfigurationError(
                f"{path} describes a search: use fl-lightning sweep --search {path}"
            )
        is_experiment = any(key in keys for key in _OF_EXPERIMENTS)
        if words[0] == "compare" and not is_experiment and any(key in keys for key in _OF_RUNS):
            raise ConfigurationError(
                f"{path} describes one run, and compare takes an experiment with variants: use "
                f"fl-lightning fit --config {path}"
            )
        if words[0] != "compare" and is_experiment:
            raise ConfigurationError(
                f"{path} describes an experiment, and {words[0]} takes one run: use fl-lightning compare "
                f"--config {path}"
            )


def _check_options(words: Sequence[str]) -> None:
    known = blocks()["federation"]["options"]
    for match in filter(None, map(_OPTION.fullmatch, words)):
        if match["name"] not in known:
            close = get_close_matches(match["name"], known, n=1)
            hint = f"Did you mean {close[0]!r}?" if close else "--federation.help lists what is."
            raise ConfigurationError(
                f"federation.{match['name']}: {match['name']!r} is not accepted by Federation. {hint}"
            )


def _keys(path: Path) -> Sequence[Any]:
    """Return the keys of a file's mapping; none if the parser has to say what is wrong with it."""
    if not path.is_file():  # what a pipe says can be read once
        return ()
    try:
        content = yaml.safe_load(path.read_text())
    except (OSError, ValueError, yaml.YAMLError):
        return ()
    return [*content] if isinstance(content, dict) else ()


def _files(words: Sequence[str], *options: str) -> Iterator[Path]:
    for word, following in pairwise(words):
        if word in options:
            yield Path(following)
    for word in words:
        name, _, value = word.partition("=")
        if name in options and value:
            yield Path(value)
