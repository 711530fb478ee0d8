"""Lines that stay at the bottom of a terminal, while what is printed scrolls above them.

The cursor always waits at the start of the first of these lines. Whoever prints something, in this
process or in one that was forked from it, first clears the screen from there on; the lines are then
drawn again below it. So nothing is ever printed into a line that stays.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
from collections.abc import Callable, Sequence
from typing import Any

from fl_lightning.core.console.terminal import is_terminal, width_of

_CLEAR_DOWN = "\r\x1b[J"
_CLEAR_RIGHT = "\x1b[K"
_UP = "\x1b[{}A"

# One thread at a time moves the cursor, and none while a process is forked, which would never get it.
_LOCK = threading.RLock()
if hasattr(os, "register_at_fork"):  # not on Windows, where nothing forks
    os.register_at_fork(
        before=_LOCK.acquire, after_in_parent=_LOCK.release, after_in_child=_LOCK.release
    )


def clear_leftovers() -> None:
    """Remove lines that a process has left that was ended before it could do so itself."""
    if is_terminal(sys.stderr):
        sys.stderr.write(_CLEAR_DOWN)


class Screen:
    """The lines at the bottom of the terminal that standard error is.

    Between `open` and `close` whatever is printed by Python, logged or warned of is put above the lines.
    Where standard error is no terminal nothing is drawn, and nothing of this happens.
    """

    def __init__(self) -> None:
        self._lines: tuple[str, ...] = ()
        self._stream: Any = None
        self._undo: list[Callable[[], None]] = []

    @property
    def is_open(self) -> bool:
        """Whether there is a terminal, and lines may be shown on it."""
        return self._stream is not None

    @property
    def width(self) -> int:
        """Columns of a line: one less than there are, so that no line is wrapped."""
        return width_of(self._stream or sys.stderr) - 1

    def open(self, *, draws: bool = True) -> None:
        """Begin to put what is printed above the lines.

        Args:
            draws: whether the lines are this process's own; if not, those of another one.
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
        """Show these lines instead of those before.

        Args:
            lines: no longer than `width`; longer ones are cut.
        """
        if self.is_open:
            with _LOCK:
                fewer = len(lines) < len(self._lines)
                self._lines = tuple(line[: self.width] for line in lines)
                self._draw(_CLEAR_DOWN if fewer else "\r")

    def close(self, *lines: str) -> None:
        """Remove the lines, and leave others that scroll like all that is printed.

        Args:
            lines: to leave.
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
    """Does something every second, in a thread, between `start` and `stop`.

    Args:
        tick: what; it must not wait for anybody.
    """

    def __init__(self, tick: Callable[[], None]) -> None:
        self._tick = tick
        self._ends: threading.Event | None = None  # made late: it cannot be copied
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Begin."""
        if self._thread is None:
            self._ends = threading.Event()
            self._thread = threading.Thread(target=self._run, args=(self._ends,), daemon=True)
            self._thread.start()

    def stop(self) -> None:
        """End, before anything else is done."""
        if self._thread is not None and self._ends is not None:
            self._ends.set()
            self._thread.join()
            self._thread = self._ends = None

    def _run(self, ends: threading.Event) -> None:
        while not ends.wait(1.0):
            self._tick()


class _Above:
    """A stream whose whole lines go above those that stay.

    Args:
        stream: the terminal.
        draw: draws the lines that stay anew; None where another process does.
    """

    def __init__(self, stream: Any, draw: Callable[[], None] | None) -> None:
        self._stream, self._draw = stream, draw
        self._begun = ""

    def write(self, text: str) -> int:
        """Write what ends with a line; the beginning of another one waits for its end."""
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
        """Leave the beginning of a line where it is: it would stand in one that stays."""
        self._stream.flush()

    def finish(self) -> None:
        """Write the beginning of a line that has found no end."""
        if self._begun.strip():
            self.write("\n")
        self._begun = ""

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def _handlers_on(stream: Any) -> list[logging.StreamHandler[Any]]:
    """Return what logs to a stream."""
    known = [logging.getLogger(), *logging.Logger.manager.loggerDict.values()]
    handlers = [h for logger in known for h in getattr(logger, "handlers", ())]
    streamed = [h for h in handlers if isinstance(h, logging.StreamHandler) and h.stream is stream]
    # others look at sys.stderr whenever they write, and find it replaced: logging.lastResort is one
    return [handler for handler in streamed if "stream" in vars(handler)]
