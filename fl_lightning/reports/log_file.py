"""The log file of a run, ``run.log``, and the choice of messages for the screen.

    2026-11-26 20:01:11,402 | INFO | round 3/50: val/accuracy 0.486, train/loss 1.59, 5 clients, 3.1 s

The file has every log message and warning of any library. The screen has the messages about this run, laid out
for the terminal's width.
"""

from __future__ import annotations

import logging
import os
import platform
import re
import sys
import traceback
import warnings
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any, Literal, TextIO, get_args

import lightning
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities.model_summary.model_summary import summarize
from typing_extensions import override

from fl_lightning.core.errors import ConfigurationError
from fl_lightning.federation import begin_round, run_folder
from fl_lightning.reports.layout import DETAIL, ConsoleFormatter, FileFormatter
from fl_lightning.reports.progress import RoundProgressBar, round_line

_ADVERTISEMENT = "💡 Tip"
# loggers whose messages go to the screen and the file; some do not propagate to the root logger
LOGGERS = ("", "lightning", "lightning.pytorch", "lightning.fabric", "fl_lightning")


class EarlyMessages(logging.Handler):
    """Log handler that stores messages in memory until the run's log file is open."""

    def __init__(self) -> None:
        super().__init__()
        self.records: list[logging.LogRecord] = []

    @override
    def emit(self, record: logging.LogRecord) -> None:
        self.records.append(record)


def take_early_messages() -> list[logging.LogRecord]:
    """Return the messages logged before the log file was open, sorted by time, and forget them."""
    handlers = {handler for name in LOGGERS for handler in logging.getLogger(name).handlers}
    early = [handler for handler in handlers if isinstance(handler, EarlyMessages)]
    records = [record for handler in early for record in handler.records]
    for handler in early:
        handler.records.clear()
    return sorted(records, key=lambda record: record.created)


# messages that Lightning logs in every run, or about devices that do not exist
_NOISE = re.compile(
    r"Seed set to |(GPU|TPU|HPU) available: False|💡|Initializing distributed|-{20}|"
    r"`Trainer\.fit` stopped: `max_(epochs|steps)=|LOCAL_RANK: |Loaded model weights from|"
    r"Restor(ed all|ing) states|The `srun` command|\s*$"
)


def _is_for_the_screen(record: logging.LogRecord) -> bool:
    """Return whether to show a log message on the screen: warnings, and messages about this run."""
    if record.levelno >= logging.WARNING:
        return True
    is_detail = record.levelno < logging.INFO or getattr(record, DETAIL, False)
    return not is_detail and _NOISE.match(record.getMessage()) is None


def detail() -> dict[str, Any]:
    """Return keyword arguments with which ``rank_zero_info`` logs only into the file, not onto the screen."""
    return {"extra": {DETAIL: True}}


def tidy_screen() -> Callable[[], None]:
    """Show Lightning's log messages in two columns on the screen; return a function that undoes this.

    Handlers that already have a formatter do not change.
    """
    undo = ExitStack()
    handlers = [each for name in LOGGERS[1:] for each in logging.getLogger(name).handlers]
    for handler in handlers:
        if type(handler) is logging.StreamHandler and handler.formatter is None:
            handler.setFormatter(ConsoleFormatter(handler))
            handler.addFilter(_is_for_the_screen)
            undo.callback(handler.setFormatter, None)
            undo.callback(handler.removeFilter, _is_for_the_screen)
    return undo.close


NAME = "run.log"
_PACKAGE = Path(__file__).parents[1]


def with_place(message: Warning | str, category: type[Warning], filename: str, lineno: int) -> str:
    """Return a warning's text; other packages' warnings also get their category, file and line."""
    if Path(filename).is_relative_to(_PACKAGE):
        return str(message)
    return f"{message} ({category.__name__}, {os.path.relpath(filename)}:{lineno})"


Level = Literal["debug", "info", "warning", "error"]


class RunLog(Callback):
    """Writes the run's log file ``run.log``: all log messages with time and level, and a line per round.

    The file has the log messages and warnings of all libraries, the model's layers and, if the run fails,
    the traceback. A run that is resumed, validated or tested appends to its file. A Trainer with neither
    logger nor ``default_root_dir`` has no folder, and so no file. While the file is open, the screen
    hides Lightning's messages about itself.

    Args:
        level: lowest level of the messages that the file keeps: debug, info, warning or error.

    Raises:
        ConfigurationError: for another level.

    Example:
        >>> RunLog("debug").level
        'debug'
    """

    def __init__(self, level: Level = "info") -> None:
        super().__init__()
        if level not in get_args(Level):
            raise ConfigurationError(
                f"level must be one of {', '.join(get_args(Level))}, got {level}: it is the lowest "
                "level that the log file keeps"
            )
        self.level = level
        self._least: int = getattr(logging, level.upper())
        self._handler: logging.Handler | None = None
        self._undo: list[Callable[[], None]] = []  # a stack of contexts cannot be copied

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Open the log file ``run.log``, to append to it."""
        self._close()
        self._undo.append(tidy_screen())
        folder = folder_of(trainer)  # a collective call: every process has to make it
        if folder is not None:
            self._open(Path(folder, NAME), trainer)

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Write a summary of the model's layers into the log file."""
        if trainer.is_global_zero:
            self._write(logging.INFO, f"layers\n{summarize(pl_module, max_depth=2)}")

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Mark the start of a round, so that its metrics can be told from those of earlier rounds."""
        begin_round(trainer)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Write a line about the round into the log file, unless the progress bar logs the same line."""
        bars = [c for c in trainer.callbacks if isinstance(c, RoundProgressBar)]  # type: ignore[attr-defined]
        if trainer.is_global_zero and not any(bar.logs_rounds for bar in bars):
            self._write(logging.INFO, round_line(trainer))

    def on_exception(
        self, trainer: Trainer, pl_module: LightningModule, exception: BaseException
    ) -> None:
        """Write the error that ended the run into the log file, with its traceback."""
        trace = "".join(traceback.format_exception(exception))
        self._write(logging.ERROR, f"{type(exception).__name__}: {exception}\n{trace}")
        self._close()

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Close the log file."""
        self._close()

    def _open(self, path: Path, trainer: Trainer) -> None:
        """Send all loggers' messages to the file; the first process also writes earlier messages."""
        path.parent.mkdir(parents=True, exist_ok=True)
        self._handler = logging.FileHandler(path, "a", encoding="utf-8")
        self._undo.append(self._handler.close)
        self._handler.setFormatter(FileFormatter(trainer.global_rank))
        self._handler.setLevel(self._least)
        self._handler.addFilter(lambda record: not record.getMessage().startswith(_ADVERTISEMENT))
        for record in take_early_messages():
            # only the first process writes messages from before the processes were forked
            if trainer.is_global_zero and record.levelno >= self._least:
                self._handler.handle(record)
        for name in LOGGERS:
            logger = logging.getLogger(name)
            if not name or not logger.propagate:
                logger.addHandler(self._handler)
                self._undo.append(partial(logger.removeHandler, self._handler))
            # the root logger's level applies to all libraries
            if name and (not logger.level or logger.level > self._least):
                self._undo.append(partial(logger.setLevel, logger.level))
                logger.setLevel(self._least)
        self._showed, warnings.showwarning = warnings.showwarning, self._show_warning
        if trainer.is_global_zero:
            self._write(logging.INFO, f"{' '.join(sys.argv)} ({software()})")

    def _write(self, level: int, message: str) -> None:
        """Write a message into the log file, not onto the screen."""
        if self._handler is not None and level >= self._least:
            made = logging.LogRecord("fl_lightning", level, __file__, 0, message, (), None)
            self._handler.handle(made)

    def _close(self) -> None:
        """Close the log file, and restore log handlers, log levels and the display of warnings."""
        while self._undo:
            self._undo.pop()()
        if warnings.showwarning == self._show_warning:
            warnings.showwarning = self._showed
        self._handler = None

    def _show_warning(
        self,
        message: Warning | str,
        category: type[Warning],
        filename: str,
        lineno: int,
        file: TextIO | None = None,
        line: str | None = None,
    ) -> None:
        self._write(logging.WARNING, with_place(message, category, filename, lineno))
        self._showed(message, category, filename, lineno, file, line)


def folder_of(trainer: Trainer) -> str | None:
    """Return the folder of a run, or None if it has none. Every process must call this (a collective).

    Without a logger it is the Trainer's ``default_root_dir``, unless that is the working directory.
    """
    if trainer.fast_dev_run:  # type: ignore[attr-defined]
        return None
    folder = run_folder(trainer)
    is_own = trainer.logger is not None or Path(folder).resolve() != Path.cwd()
    return folder if is_own else None


def software() -> str:
    """Return the versions of fl-lightning, lightning, torch and Python as one line of text."""
    from fl_lightning import __version__

    found = f"fl-lightning {__version__}, lightning {lightning.__version__}"
    return f"{found}, torch {torch.__version__}, Python {platform.python_version()}"
