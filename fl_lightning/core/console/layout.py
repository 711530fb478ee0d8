"""How messages look: in columns on a terminal, with time and level elsewhere."""

from __future__ import annotations

import logging
import re
import textwrap
from typing import Any

from typing_extensions import override

from fl_lightning.core.console.terminal import is_terminal, width_of

LABEL_WIDTH = 12
WITH_TIME = "%(asctime)s | %(levelname)s | %(message)s"
# set on a record that is for the log file, and would be too much on a screen
DETAIL = "is_detail"

_LABELLED = re.compile(r"(?P<label>\w[\w ./-]{0,10}): (?P<text>.*)", re.DOTALL)


def laid_out(message: str, width: int) -> str:
    """Return a message in two columns, no line of it longer than a width but for whole words.

    Args:
        message: as it was logged; ``bytes: 4 MB`` has the label ``bytes``. One of several lines is left
            as it is.
        width: columns of a line.

    Example:
        >>> print(laid_out("bytes: a client sends about 4 MB and receives 4 MB a round", 40))
        bytes       a client sends about 4 MB
                    and receives 4 MB a round
    """
    if "\n" in message.strip():
        return message
    found = _LABELLED.fullmatch(message)
    first = found["label"].ljust(LABEL_WIDTH) if found else ""
    return textwrap.fill(
        found["text"] if found else message,
        width,
        initial_indent=first,
        subsequent_indent=" " * LABEL_WIDTH,
        break_long_words=False,
        break_on_hyphens=False,
    )


def in_lines(text: str, stream: Any) -> str:
    """Return a line of text in lines of a terminal's width, its words whole; elsewhere as it is."""
    if not is_terminal(stream) or "\n" in text:
        return text
    width = width_of(stream) - 1
    return textwrap.fill(text, width, break_long_words=False, break_on_hyphens=False)


class ConsoleFormatter(logging.Formatter):
    """Lays messages out for the terminal that a handler writes to, if it is one.

    Args:
        handler: whose formatter this is.
    """

    def __init__(self, handler: logging.StreamHandler[Any]) -> None:
        super().__init__(WITH_TIME)
        self._handler = handler

    @override
    def format(self, record: logging.LogRecord) -> str:
        stream = self._handler.stream
        if not is_terminal(stream):
            return with_time(super().format(record))
        message = record.getMessage()
        if record.levelno >= logging.WARNING:
            message = f"{record.levelname.lower()}: {message}"
        return laid_out(message, width_of(stream) - 1)


class FileFormatter(logging.Formatter):
    """Time, level and message; further lines of a message are indented.

    Args:
        process: whose messages they are, of several; the first one's are not marked.
    """

    def __init__(self, process: int = 0) -> None:
        mark = f"process {process}: " if process else ""
        super().__init__(WITH_TIME.replace("%(message)s", f"{mark}%(message)s"))

    @override
    def format(self, record: logging.LogRecord) -> str:
        return with_time(super().format(record))


def with_time(text: str) -> str:
    r"""Return a message whose further lines cannot be taken for messages of their own.

    Example:
        >>> with_time("1 | INFO | a\nb")
        '1 | INFO | a\n    b'
    """
    return text.rstrip().replace("\n", "\n    ")
