"""Layout of text for a terminal: log messages in two columns, wrapped to the terminal's width.

On other streams log messages have time and level instead. Nothing here imports rich, so that ``--help`` and error
messages appear at once.
"""

from __future__ import annotations

import logging
import os
import re
import textwrap
from typing import Any

from typing_extensions import override

LABEL_WIDTH = 12
# attribute of log records that go into the log file only, not onto the screen
DETAIL = "is_detail"

_LABELLED = re.compile(r"(?P<label>\w[\w ./-]{0,10}): (?P<text>.*)", re.DOTALL)


def laid_out(message: str, width: int) -> str:
    """Format a log message such as ``bytes: 4 MB`` in two columns, label and text, with wrapped lines.

    Args:
        message: the log message; in ``bytes: 4 MB``, the label is ``bytes``. A message of several lines
            is returned unchanged.
        width: largest length of a line in columns.

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
    """Wrap a line of text to the width of a terminal; unchanged if the stream is none, or for several lines."""
    if not is_terminal(stream) or "\n" in text:
        return text
    width = width_of(stream) - 1
    return textwrap.fill(text, width, break_long_words=False, break_on_hyphens=False)


class FileFormatter(logging.Formatter):
    r"""Formats log records for a file: time, level and message; a message's further lines are indented.

    So they do not look like separate messages.

    Args:
        process: number of the process, written ahead of its messages unless it is 0.

    Example:
        >>> made = logging.makeLogRecord({"msg": "a\nb", "levelname": "INFO"})
        >>> FileFormatter().format(made).split(" | ", 1)[1]
        'INFO | a\n    b'
    """

    def __init__(self, process: int = 0) -> None:
        mark = f"process {process}: " if process else ""
        super().__init__(f"%(asctime)s | %(levelname)s | {mark}%(message)s")

    @override
    def format(self, record: logging.LogRecord) -> str:
        return super().format(record).rstrip().replace("\n", "\n    ")


class ConsoleFormatter(FileFormatter):
    """Formats log messages in two columns, label and text, if their handler writes to a terminal.

    Args:
        handler: the handler that uses this formatter.
    """

    def __init__(self, handler: logging.StreamHandler[Any]) -> None:
        super().__init__()
        self._handler = handler

    @override
    def format(self, record: logging.LogRecord) -> str:
        stream = self._handler.stream
        if not is_terminal(stream):
            return super().format(record)
        message = record.getMessage()
        if record.levelno >= logging.WARNING:
            message = f"{record.levelname.lower()}: {message}"
        return laid_out(message, width_of(stream) - 1)


NARROWEST, USUAL = 40, 80


def is_terminal(stream: Any) -> bool:
    """Return whether a stream is a terminal on which the cursor can be moved.

    Example:
        >>> from io import StringIO
        >>> is_terminal(StringIO()), is_terminal(None)
        (False, False)
    """
    try:
        return bool(stream.isatty()) and os.environ.get("TERM", "") != "dumb"
    except (AttributeError, ValueError):  # no stream at all, or a closed one
        return False


def width_of(stream: Any) -> int:
    """Return the width of a terminal in columns, at least 40; 80 if it is unknown.

    Example:
        >>> from io import StringIO
        >>> width_of(StringIO())
        80
    """
    try:
        columns = os.get_terminal_size(stream.fileno()).columns
    except (AttributeError, ValueError, OSError):
        columns = 0
    return max(NARROWEST, columns) if columns else USUAL


def duration(seconds: float) -> str:
    """Format a duration in seconds as ``1:15`` (minutes and seconds) or ``3:01:00`` (with hours).

    Example:
        >>> duration(7.4), duration(75), duration(3 * 3600 + 60)
        ('0:07', '1:15', '3:01:00')
    """
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
