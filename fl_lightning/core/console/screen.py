"""Status lines at the bottom of a terminal, above which printed text scrolls.

The cursor always waits at the start of the first status line. Each print, from this process or one
forked from it, first clears the screen from there; the status lines are then drawn again below it. So
nothing is ever printed into a status line.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
from collections.abc import Callable, Sequence
from typing import Any

from fl_lightning.core.console.layout import is_terminal, width_of

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
