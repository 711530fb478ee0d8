"""The terminal: log messages in two columns, tables, bars, and status lines below what is printed.

The cursor always waits at the start of the first status line. Each print, from this process or one
forked from it, first clears the screen from there; the status lines are then drawn again below it. So
nothing is ever printed into a status line.
"""

from __future__ import annotations

import logging
import os
import re
import sys
import textwrap
import threading
from collections.abc import Callable, Sequence
from typing import Any

from typing_extensions import override

LABEL_WIDTH = 12
WITH_TIME = "%(asctime)s | %(levelname)s | %(message)s"
# attribute of a log record that is for the log file only: it would be too much on a screen
DETAIL = "is_detail"

_LABELLED = re.compile(r"(?P<label>\w[\w ./-]{0,10}): (?P<text>.*)", re.DOTALL)


def laid_out(message: str, width: int) -> str:
    """Lay a message out in two columns, label and text; lines are wrapped between words.

    Args:
        message: the logged message; ``bytes: 4 MB`` has the label ``bytes``. A message of several
            lines is returned unchanged.
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
    """Wrap a line of text to a terminal's width; other streams, and several lines, stay unchanged."""
    if not is_terminal(stream) or "\n" in text:
        return text
    width = width_of(stream) - 1
    return textwrap.fill(text, width, break_long_words=False, break_on_hyphens=False)


class ConsoleFormatter(logging.Formatter):
    """Lays messages out in two columns if the handler writes to a terminal.

    Args:
        handler: the handler that uses this formatter.
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
        process: number of the process, which marks its messages; 0 is not marked.
    """

    def __init__(self, process: int = 0) -> None:
        mark = f"process {process}: " if process else ""
        super().__init__(WITH_TIME.replace("%(message)s", f"{mark}%(message)s"))

    @override
    def format(self, record: logging.LogRecord) -> str:
        return with_time(super().format(record))


def with_time(text: str) -> str:
    r"""Indent all but the first line, so that they do not look like messages of their own.

    Example:
        >>> with_time("1 | INFO | a\nb")
        '1 | INFO | a\n    b'
    """
    return text.rstrip().replace("\n", "\n    ")


NARROWEST, USUAL = 40, 80


def is_terminal(stream: Any) -> bool:
    """True if a stream is a terminal on which the cursor can be moved.

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
    """Number of columns of a stream's lines, ≥ 40; 80 if it is unknown.

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


_BETWEEN = "  "


def aligned(lines: Sequence[Sequence[str]]) -> str:
    """Format a table: the first column aligned to the left, the others to the right."""
    if not lines:
        return ""
    first, *others = [max(map(len, column)) for column in zip(*lines, strict=True)]
    rows = ([line[0].ljust(first), *map(str.rjust, line[1:], others)] for line in lines)
    return "\n".join(_BETWEEN.join(row).rstrip() for row in rows)


def in_blocks(lines: Sequence[Sequence[str]], width: int) -> str:
    """Format a table no wider than the screen: columns without room go into further blocks below.

    Args:
        lines: rows of cells, the head first; the first column is repeated in every block.
        width: width of the screen in columns.

    Example:
        >>> print(in_blocks([["", "loss", "accuracy"], ["a", "0.5", "0.9"]], 14))
           loss
        a   0.5
        <BLANKLINE>
           accuracy
        a       0.9
    """
    first, *others = [max(map(len, column)) for column in zip(*lines, strict=True)]
    blocks: list[list[int]] = [[]]
    used = first
    for column, needed in enumerate(others, 1):
        used += len(_BETWEEN) + needed
        if used > width and blocks[-1]:
            blocks.append([])
            used = first + len(_BETWEEN) + needed
        blocks[-1].append(column)
    tables = [aligned([[line[0], *(line[c] for c in block)] for line in lines]) for block in blocks]
    return "\n\n".join(tables)


def duration(seconds: float) -> str:
    """Format a duration as minutes and seconds, or hours, minutes and seconds.

    Example:
        >>> duration(7.4), duration(75), duration(3 * 3600 + 60)
        ('0:07', '1:15', '3:01:00')
    """
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def filled(share: float, width: int) -> str:
    """Draw a bar that is filled from the left.

    Args:
        share: filled share, in [0, 1].
        width: length of the bar in columns.

    Example:
        >>> filled(0.5, 8)
        '━━━━────'
    """
    done = round(min(1.0, max(0.0, share)) * width)
    return "━" * done + "─" * (width - done)


_CLEAR_DOWN = "\r\x1b[J"
_CLEAR_RIGHT = "\x1b[K"
_UP = "\x1b[{}A"

# One thread at a time moves the cursor, and none during a fork, after which the child could never
# acquire the lock.
_LOCK = threading.RLock()
if hasattr(os, "register_at_fork"):  # not on Windows, where nothing forks
    os.register_at_fork(
        before=_LOCK.acquire, after_in_parent=_LOCK.release, after_in_child=_LOCK.release
    )


def clear_leftovers() -> None:
    """Remove status lines left by a process that was killed."""
    if is_terminal(sys.stderr):
        sys.stderr.write(_CLEAR_DOWN)


class StatusLines:
    """Status lines at the bottom of the terminal, on standard error.

    Between `open` and `close`, text that Python prints, logs or warns of appears above the lines. If
    standard error is no terminal, all of this does nothing.
    """

    def __init__(self) -> None:
        self._lines: tuple[str, ...] = ()
        self._stream: Any = None
        self._undo: list[Callable[[], None]] = []

    @property
    def is_open(self) -> bool:
        """True between `open` and `close`, if there is a terminal."""
        return self._stream is not None

    @property
    def width(self) -> int:
        """Length of a line in columns: one less than the terminal has, so that no line is wrapped."""
        return width_of(self._stream or sys.stderr) - 1

    def open(self, *, draws: bool = True) -> None:
        """Start to print above the status lines.

        Args:
            draws: whether this process draws the status lines; otherwise another one does.
        """
        if self.is_open or not is_terminal(sys.stderr):
            return
        self._stream = sys.stderr
        for name in ("stdout", "stderr"):
            stream = getattr(sys, name)
            if not is_terminal(stream):
                continue
            above = _Above(stream, self._draw if draws else None)
            self._replace(name, stream, above)

    def show(self, *lines: str) -> None:
        """Replace the status lines.

        Args:
            lines: the new lines; cut to `width`.
        """
        if self.is_open:
            with _LOCK:
                fewer = len(lines) < len(self._lines)
                self._lines = tuple(line[: self.width] for line in lines)
                self._draw(_CLEAR_DOWN if fewer else "\r")

    def close(self, *lines: str) -> None:
        """Remove the status lines and print others, which scroll like all text.

        Args:
            lines: lines to print.
        """
        if not self.is_open:
            return
        with _LOCK:
            for stream in (sys.stdout, sys.stderr):
                if isinstance(stream, _Above):
                    stream.finish()
            while self._undo:
                self._undo.pop()()
            text = "".join(f"{line[: self.width]}\n" for line in lines)
            self._write(f"{_CLEAR_DOWN}{text}")
            self._lines, self._stream = (), None

    def _replace(self, name: str, stream: Any, above: _Above) -> None:
        setattr(sys, name, above)
        self._undo.append(lambda: setattr(sys, name, stream))
        for handler in _handlers_on(stream):
            handler.setStream(above)
            self._undo.append(lambda handler=handler: handler.setStream(stream))  # type: ignore[misc]

    def _draw(self, before: str = "\r") -> None:
        if self._lines:
            text = f"{_CLEAR_RIGHT}\n".join(self._lines)
            up = _UP.format(len(self._lines) - 1) if len(self._lines) > 1 else ""
            self._write(f"{before}{text}{_CLEAR_RIGHT}{up}\r")
        elif before != "\r":
            self._write(before)

    def _write(self, text: str) -> None:
        encoding = getattr(self._stream, "encoding", None) or "utf-8"
        self._stream.write(text.encode(encoding, "replace").decode(encoding))
        self._stream.flush()


class Ticker:
    """Calls a function every second, in a thread, between `start` and `stop`.

    Args:
        tick: the function; it must not block.
    """

    def __init__(self, tick: Callable[[], None]) -> None:
        self._tick = tick
        self._ends: threading.Event | None = None  # created in `start`: it cannot be copied
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Start the thread."""
        if self._thread is None:
            self._ends = threading.Event()
            self._thread = threading.Thread(target=self._run, args=(self._ends,), daemon=True)
            self._thread.start()

    def stop(self) -> None:
        """Stop the thread and wait for its end."""
        if self._thread is not None and self._ends is not None:
            self._ends.set()
            self._thread.join()
            self._thread = self._ends = None

    def _run(self, ends: threading.Event) -> None:
        while not ends.wait(1.0):
            self._tick()


class _Above:
    """A stream whose complete lines are printed above the status lines.

    Args:
        stream: the terminal.
        draw: draws the status lines again; None if another process does.
    """

    def __init__(self, stream: Any, draw: Callable[[], None] | None) -> None:
        self._stream, self._draw = stream, draw
        self._begun = ""

    def write(self, text: str) -> int:
        """Write complete lines; the start of a line waits for its end."""
        with _LOCK:
            lines, newline, self._begun = (self._begun + text).rpartition("\n")
            if newline:
                self._stream.write(f"{_CLEAR_DOWN}{lines}\n")
                self._stream.flush()
                if self._draw is not None:
                    self._draw()
        return len(text)

    def writelines(self, lines: Sequence[str]) -> None:
        """Write several pieces of text."""
        self.write("".join(lines))

    def flush(self) -> None:
        """Flush the terminal; the start of a line still waits, or it would be in a status line."""
        self._stream.flush()

    def finish(self) -> None:
        """Write the start of a line that never ended."""
        if self._begun.strip():
            self.write("\n")
        self._begun = ""

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def _handlers_on(stream: Any) -> list[logging.StreamHandler[Any]]:
    """Return the log handlers that write to a stream."""
    known = [logging.getLogger(), *logging.Logger.manager.loggerDict.values()]
    handlers = [h for logger in known for h in getattr(logger, "handlers", ())]
    streamed = [h for h in handlers if isinstance(h, logging.StreamHandler) and h.stream is stream]
    # others, like logging.lastResort, look sys.stderr up on each write, and so find its replacement
    return [handler for handler in streamed if "stream" in vars(handler)]
