"""Tables and status lines on a terminal, by rich; printed text scrolls above the status lines.

The cursor always waits at the start of the first status line. Each print, also of a forked process, first
clears the screen from there. The status lines are then drawn again below the text. (``rich.live.Live``
leaves the cursor after the last line, so that a forked process would print there.)
"""

from __future__ import annotations

import io
import logging
import os
import sys
import threading
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from rich.box import MARKDOWN
from rich.console import Console, ConsoleRenderable, RenderableType, RenderHook
from rich.control import Control
from rich.file_proxy import FileProxy
from rich.segment import ControlType, Segment, Segments
from rich.table import Table
from rich.text import Text
from typing_extensions import override

from fl_lightning.reports.layout import is_terminal, width_of

# Clears the screen below the cursor: rich itself clears single lines, or everything.
_CLEAR_DOWN = Segments([Segment("\r\x1b[J", control=[(ControlType.CARRIAGE_RETURN,)])])

# Only one thread at a time moves the cursor. The lock is free during a fork: a child could never acquire
# a lock that another thread of its parent held.
_LOCK = threading.RLock()
if hasattr(os, "register_at_fork"):  # not on Windows, where nothing forks
    os.register_at_fork(
        before=_LOCK.acquire, after_in_parent=_LOCK.release, after_in_child=_LOCK.release
    )


def plain(renderable: RenderableType, width: int = 10_000) -> str:
    """Return as plain text what the package rich would print for an object."""
    console = Console(file=io.StringIO(), width=width, color_system=None)
    console.print(renderable)
    printed: str = console.file.getvalue()  # type: ignore[attr-defined]
    return "\n".join(line.rstrip() for line in printed.splitlines()).strip("\n")


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Format rows of text as a table; the first column is left-aligned, the others right-aligned."""
    made = Table(box=None, pad_edge=False)
    for number, name in enumerate(head):
        made.add_column(Text(name), justify="right" if number else "left", no_wrap=True)
    return _filled(made, rows)


def markdown(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Format rows of text as a Markdown table, with padded cells so that the source is readable too.

    Example:
        >>> print(markdown(["variant", "runs"], [["dense", "3"]]))
        | variant | runs |
        |---------|------|
        | dense   | 3    |
    """
    made = Table(box=MARKDOWN)
    for name in head:
        made.add_column(Text(name), no_wrap=True)
    return _filled(made, rows)


def _filled(made: Table, rows: Iterable[Sequence[str]]) -> str:
    for row in rows:
        made.add_row(*map(Text, row))
    return plain(made)


def in_blocks(head: Sequence[str], rows: Sequence[Sequence[str]], width: int) -> str:
    """Format a table no wider than the screen; columns that do not fit follow in a second table below.

    Args:
        head: names of the columns; the first column is repeated in every block.
        rows: cells.
        width: width of the screen in columns.

    Example:
        >>> print(in_blocks(["", "loss", "accuracy"], [["a", "0.5", "0.9"]], 14))
          loss
        a  0.5
        <BLANKLINE>
          accuracy
        a      0.9
    """
    from pandas import DataFrame, Index  # half a second to import

    columns = Index(head[1:], name=head[0] or None)
    cells = DataFrame([row[1:] for row in rows], [row[0] for row in rows], columns)
    lines = cells.to_string(line_width=width).splitlines()
    return "\n".join(line.removesuffix("\\").rstrip() for line in map(str.rstrip, lines))


def clear_leftovers() -> None:
    """Remove status lines from the terminal that a killed process has left there."""
    if is_terminal(sys.stderr):
        _console(sys.stderr).print(_CLEAR_DOWN, end="")


class StatusLines(RenderHook):
    """Lines that stay at the bottom of the terminal, such as progress bars; other output scrolls above.

    Between `open` and `close`, printed text, log messages and warnings appear above the lines. If
    standard error is no terminal, none of the methods does anything.

    Args:
        tick: called every second, in a thread, between `open` and `close`; it must not block.
    """

    def __init__(self, tick: Callable[[], None] | None = None) -> None:
        self._tick = tick
        self._lines: tuple[RenderableType, ...] = ()
        self._console: Console | None = None
        self._ends: threading.Event | None = None  # created in `open`: it cannot be copied
        self._undo: list[Callable[[], None]] = []

    @property
    def is_open(self) -> bool:
        """True while the status lines are shown; never without a terminal."""
        return self._console is not None

    @property
    def width(self) -> int:
        """Length of a status line in columns: one less than the terminal's, so that no line is wrapped."""
        return width_of(sys.stderr) - 1

    def open(self, *, draws: bool = True) -> None:
        """Start to show status lines; from now on, printed text appears above them.

        Args:
            draws: whether this process draws the status lines, and not another one.
        """
        if self.is_open or not is_terminal(sys.stderr):
            return
        self._console = _console(sys.stderr)
        self._console.push_render_hook(self)
        for name in ("stdout", "stderr"):
            if is_terminal(stream := getattr(sys, name)):
                self._replace(name, stream, _Above(self._console, stream))
        if draws and self._tick is not None:
            self._ends = threading.Event()
            threading.Thread(target=self._run, args=(self._ends,), daemon=True).start()

    def show(self, *lines: RenderableType) -> None:
        """Replace the status lines by new ones."""
        with _LOCK:
            if self._console is not None:
                self._lines = lines
                self._console.print(Control(), end="")

    def close(self, *lines: RenderableType) -> None:
        """Remove the status lines, and print the given lines as ordinary text."""
        if self._ends is not None:
            self._ends.set()
            self._ends = None
        with _LOCK:
            if self._console is None:
                return
            self._lines = ()
            for stream in (sys.stdout, sys.stderr):
                if isinstance(stream, _Above):
                    stream.finish()
            self._console.print(*(lines or [Control()]), sep="\n", end="\n" if lines else "")
            while self._undo:
                self._undo.pop()()
            self._console = None

    @override
    def process_renderables(self, renderables: list[ConsoleRenderable]) -> list[ConsoleRenderable]:
        """Wrap each output of rich: clear the status lines, print the new text, draw the lines again below it."""
        assert self._console is not None
        options = self._console.options.update(width=self.width, no_wrap=True, overflow="ellipsis")
        drawn: list[Segment] = []
        height = 0
        for renderable in self._lines:
            for line in self._console.render_lines(renderable, options, pad=False):
                drawn += [Segment.line()] * bool(height) + line
                height += 1
        back = Control(
            *[(ControlType.CURSOR_UP, height - 1)] * (height > 1), ControlType.CARRIAGE_RETURN
        )
        return [_CLEAR_DOWN, *renderables, Segments(drawn), back]

    def _replace(self, name: str, stream: Any, above: _Above) -> None:
        setattr(sys, name, above)
        self._undo.append(lambda: setattr(sys, name, stream))
        for handler in _handlers_on(stream):
            handler.setStream(above)
            self._undo.append(lambda handler=handler: handler.setStream(stream))  # type: ignore[misc]

    def _run(self, ends: threading.Event) -> None:
        while not ends.wait(1.0):
            with _LOCK:
                if not ends.is_set() and self._tick is not None:
                    self._tick()


class _Above(FileProxy):
    """Replacement of standard output or error that prints complete lines above the status lines."""

    @override
    def write(self, text: str) -> int:
        with _LOCK:
            super().write(text)
        return len(text)

    @override
    def flush(self) -> None:
        """Flush the terminal, but hold back an incomplete line, which would mix with a status line."""
        self.rich_proxied_file.flush()

    @override
    def isatty(self) -> bool:
        return True

    def finish(self) -> None:
        """Print the last line, even if it is incomplete."""
        super().flush()


def _console(stream: Any) -> Console:
    """Return a console of rich that prints text unchanged: no markup, highlighting or wrapping."""
    return Console(
        file=stream,
        force_terminal=True,
        markup=False,
        highlight=False,
        emoji=False,
        soft_wrap=True,
    )


def _handlers_on(stream: Any) -> list[logging.StreamHandler[Any]]:
    """Return all log handlers, of any logger, that write to the given stream."""
    known = [logging.getLogger(), *logging.Logger.manager.loggerDict.values()]
    handlers = [h for logger in known for h in getattr(logger, "handlers", ())]
    streamed = [h for h in handlers if isinstance(h, logging.StreamHandler) and h.stream is stream]
    # handlers like logging.lastResort look sys.stderr up on each write, and so find its replacement
    return [handler for handler in streamed if "stream" in vars(handler)]
