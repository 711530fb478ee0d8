"""Files that are given to the wrong command: an experiment to ``fit``, a run to ``compare``."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path

import yaml

from fl_lightning.core.errors import ConfigurationError

_OF_EXPERIMENTS = ("variants", "base")
_OF_RUNS = ("model", "data", "trainer")


def check_command(words: Sequence[str]) -> None:
    """Refuse a command line whose files belong to the other command.

    Args:
        words: of the command line, the command first.

    Raises:
        ConfigurationError: with the command to use.
    """
    for path in _files(words):
        if not path.is_file():  # what a pipe says can be read once
            continue
        try:
            content = yaml.safe_load(path.read_text())
        except (OSError, ValueError, yaml.YAMLError):
            continue  # the parser says what is wrong with it
        keys = content.keys() if isinstance(content, dict) else ()
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


def _files(words: Sequence[str]) -> Iterator[Path]:
    for word, following in pairwise(words):
        if word in ("--config", "-c"):
            yield Path(following)
    for word in words:
        if word.startswith("--config="):
            yield Path(word.removeprefix("--config="))
