"""Which messages are for the screen: those of this run, laid out for the terminal's width.

Everything that is left out here stands in the run's log file.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterator
from typing import Any

from typing_extensions import override

from fl_lightning.core.console.layout import DETAIL, ConsoleFormatter

# whose messages are shown and kept; some of them keep theirs from the root logger
LOGGERS = ("", "lightning", "lightning.pytorch", "lightning.fabric", "fl_lightning")

# what Lightning says of every run, or of devices that are not there
_NOISE = re.compile(
    r"Seed set to |(GPU|TPU|HPU) available: False|💡|Initializing distributed|-{20}|"
    r"`Trainer\.fit` stopped: `max_(epochs|steps)=|LOCAL_RANK: |Loaded model weights from|"
    r"Restor(ed all|ing) states|The `srun` command|\s*$"
)


class ForTheScreen(logging.Filter):
    """Lets a screen have what is said of this run, and keeps details for the log file."""

    @override
    def filter(self, record: logging.LogRecord) -> bool:
        if record.levelno >= logging.WARNING:
            return True
        is_detail = record.levelno < logging.INFO or getattr(record, DETAIL, False)
        return not is_detail and _NOISE.match(record.getMessage()) is None


def detail() -> dict[str, Any]:
    """Return the options of a message that is for the log file alone, for ``rank_zero_info``."""
    return {"extra": {DETAIL: True}}


def tidy_screen() -> Callable[[], None]:
    """Give Lightning's messages our look on the screen; returns a function that undoes it.

    Handlers that others have given a format of their own are left alone.
    """
    undo: list[Callable[[], None]] = []
    for handler in _plain_handlers():
        chosen = ForTheScreen()
        handler.setFormatter(ConsoleFormatter(handler))
        handler.addFilter(chosen)
        undo += [
            lambda handler=handler: handler.setFormatter(None),  # type: ignore[misc]
            lambda handler=handler, chosen=chosen: handler.removeFilter(chosen),  # type: ignore[misc]
        ]

    def undo_all() -> None:
        for step in undo:
            step()

    return undo_all


def _plain_handlers() -> Iterator[logging.StreamHandler[Any]]:
    for name in LOGGERS[1:]:
        for handler in logging.getLogger(name).handlers:
            if type(handler) is logging.StreamHandler and handler.formatter is None:
                yield handler
