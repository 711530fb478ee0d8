"""Import of Optuna, an optional dependency, and a switch for its log."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from fl_lightning.core.errors import ConfigurationError


def optuna_for(what: str, extra: str, instead: str = "") -> Any:
    """Import Optuna and return it; raise ConfigurationError if it is not installed.

    Args:
        what: the feature that needs Optuna, the subject of the error message, e.g. ``"a sweep"``.
        extra: our extra that installs Optuna.
        instead: an alternative without Optuna, the end of the error message.

    Raises:
        ConfigurationError: if Optuna is not installed.
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
    """Silence Optuna's log inside the block; by default it has a line for every study and trial."""
    before = optuna.logging.get_verbosity()
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    try:
        yield
    finally:
        optuna.logging.set_verbosity(before)
