"""A file that takes in what is logged and warned of: in Lightning's name, in ours, or in anybody's."""

from __future__ import annotations

import logging
import os
import warnings
from pathlib import Path
from typing import Any, TextIO

from typing_extensions import override

from fl_lightning.callbacks.console.tidy import LOGGERS
from fl_lightning.core.console.layout import FileFormatter

_ADVERTISEMENT = "💡 Tip"


class LogFile:
    """Messages in the order in which they come, at first in memory, then in a file.

    Args:
        level: of the least important messages that are kept.
    """

    def __init__(self, level: int) -> None:
        self.level = level
        self._early = EarlyMessages(level)
        self._handler: logging.Handler | None = None
        self._levels: dict[str, int] = {}
        self._showed: Any = None

    @property
    def is_open(self) -> bool:
        """True if messages go into a file by now."""
        return self._handler is not None

    def begin(self) -> None:
        """Collect messages, to be written when the file is known."""
        if not self._levels and not self.is_open:
            self._attach(self._early)

    def open(self, path: Path, process: int = 0) -> None:
        """Write everything into a file, behind what it holds; in the first process from the start on.

        Args:
            path: of the file.
            process: number of this one; the first needs no name.
        """
        if self.is_open:
            return
        self.begin()
        path.parent.mkdir(parents=True, exist_ok=True)
        handler = _Once(path, "a", encoding="utf-8")
        handler.setFormatter(FileFormatter(process))
        handler.setLevel(self.level)
        handler.addFilter(lambda record: not record.getMessage().startswith(_ADVERTISEMENT))
        early = [*EarlyMessages.taken_from(LOGGERS), *self._early.take()]
        if process:  # the first one has all that was said before there were several
            early = []
        for record in {id(record): record for record in early}.values():
            handler.handle(record)
        self._detach(self._early)
        self._attach(handler)
        self._handler = handler
        self._showed = warnings.showwarning
        warnings.showwarning = self._show_warning

    def close(self) -> None:
        """Leave the file, and everything as it was."""
        self._detach(self._handler or self._early)
        if self._handler is not None:
            if warnings.showwarning == self._show_warning:
                warnings.showwarning = self._showed
            self._handler.close()
            self._handler = None

    def write(self, level: int, message: str, **options: Any) -> None:
        """Write a message that is for the file alone.

        Args:
            level: of the message.
            message: its text.
            options: of a `logging.LogRecord`.
        """
        if self._handler is not None and level >= self.level:
            exc_info = options.get("exc_info")
            made = logging.LogRecord("fl_lightning", level, __file__, 0, message, (), exc_info)
            self._handler.handle(made)

    def _show_warning(
        self,
        message: Warning | str,
        category: type[Warning],
        filename: str,
        lineno: int,
        file: TextIO | None = None,
        line: str | None = None,
    ) -> None:
        where = f"{category.__name__}, {os.path.relpath(filename)}:{lineno}"
        self.write(logging.WARNING, f"{message} ({where})")
        self._showed(message, category, filename, lineno, file, line)

    def _attach(self, handler: logging.Handler) -> None:
        for name in LOGGERS:
            logger = logging.getLogger(name)
            if not name or not logger.propagate:
                logger.addHandler(handler)
            if name:  # the root logger's is everybody's
                self._levels.setdefault(name, logger.level)
                if not logger.level or logger.level > self.level:
                    logger.setLevel(self.level)

    def _detach(self, handler: logging.Handler) -> None:
        for name in LOGGERS:
            logging.getLogger(name).removeHandler(handler)
        for name, level in self._levels.items():
            logging.getLogger(name).setLevel(level)
        self._levels = {}


class EarlyMessages(logging.Handler):
    """Keeps messages until somebody takes them."""

    def __init__(self, level: int = logging.NOTSET) -> None:
        super().__init__(level)
        self._records: dict[int, logging.LogRecord] = {}

    @override
    def emit(self, record: logging.LogRecord) -> None:
        self._records[id(record)] = record  # once, however many loggers pass it on

    def take(self) -> list[logging.LogRecord]:
        """Return the messages so far, and forget them."""
        records, self._records = list(self._records.values()), {}
        return records

    @staticmethod
    def taken_from(names: tuple[str, ...]) -> list[logging.LogRecord]:
        """Collect the messages of all such handlers of some loggers, the command line's."""
        handlers = [h for name in names for h in logging.getLogger(name).handlers]
        found = dict.fromkeys(h for h in handlers if isinstance(h, EarlyMessages))
        return sorted(
            (record for handler in found for record in handler.take()), key=lambda r: r.created
        )


class _Once(logging.FileHandler):
    """A file that takes a message once, however many loggers pass it on."""

    _last: logging.LogRecord | None = None

    @override
    def handle(self, record: logging.LogRecord) -> bool:
        if record is self._last or record.levelno < self.level:
            return False
        self._last = record
        return bool(super().handle(record))
