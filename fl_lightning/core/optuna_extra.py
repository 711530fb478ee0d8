"""Optuna, which is an extra: imported when it is asked for, and quiet."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from fl_lightning.core.errors import ConfigurationError


def optuna_for(what: str, extra: str, instead: str = "") -> Any:
    """Return the package.

    Args:
        what: needs it, as the subject of a sentence, e.g. ``"a sweep"``.
        extra: of ours that installs it.
        instead: what does without it, the end of the sentence.

    Raises:
        ConfigurationError: if it is not installed.
    """
    try:
        import optuna
    except ImportError:
        raise ConfigurationError(
            f"{what} needs Optuna: install it with pip install 'fl-lightning[{extra}]'{instead}"
        ) from None
    return optuna


@contextmanager
def quiet(optuna: Any) -> Iterator[None]:
    """Optuna writes a line for every study and trial unless it is told otherwise."""
    logging = optuna.logging
    before = logging.get_verbosity()
    logging.set_verbosity(logging.WARNING)
    try:
        yield
    finally:
        logging.set_verbosity(before)
