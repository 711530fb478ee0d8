"""The log file of a run: everything that it says, and more, with time and level.

2026-11-26 20:01:11,402 | INFO | round 3/50: val/accuracy 0.486, train/loss 1.59, 5 clients, 3.1 s
"""

from __future__ import annotations

import logging
import platform
import sys
import traceback
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Literal, get_args

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities.model_summary.model_summary import summarize

from fl_lightning.callbacks.console.log_file import LogFile
from fl_lightning.callbacks.console.round_line import round_line
from fl_lightning.callbacks.console.tidy import tidy_screen
from fl_lightning.callbacks.progress import RoundProgressBar
from fl_lightning.core.console.layout import aligned
from fl_lightning.core.errors import ConfigurationError
from fl_lightning.federation import begin_round, run_folder

NAME = "run.log"
Level = Literal["debug", "info", "warning", "error"]
_VERSIONS = ("fl-lightning", "lightning", "torch")


class RunLog(Callback):
    """Writes ``run.log`` in the run's folder: time, level and message, a line for every round.

    What is logged by `logging` and what is warned of, by anybody, is in it; so are the model's layers
    and, when a run fails, the traceback. A run that is resumed, validated or tested writes at the end of
    its file. A Trainer with neither logger nor ``default_root_dir`` has no folder, and so no file. On the
    screen, Lightning's messages about itself are left out meanwhile.

    Args:
        level: of the least important messages that are kept: debug, info, warning or error.

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
                f"level must be one of {', '.join(get_args(Level))}, got {level}: it is the least "
                "important that the log file keeps"
            )
        self.level = level
        self._file = LogFile(getattr(logging, level.upper()))
        self._put_back: Callable[[], None] | None = None

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Collect messages from now on."""
        self._close()
        self._put_back = tidy_screen()
        self._file.begin()

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Begin the file, and write the model down."""
        self._open(trainer)
        if trainer.is_global_zero:
            self._file.write(logging.INFO, f"layers\n{_layers(pl_module)}")

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Continue in the file."""
        self._open(trainer)

    def on_test_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Continue in the file."""
        self._open(trainer)

    def on_predict_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Continue in the file."""
        self._open(trainer)

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Tell this round's metrics from older ones."""
        begin_round(trainer)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Write a line for the round, unless it stands on the screen, and so in the file."""
        bars = [c for c in trainer.callbacks if isinstance(c, RoundProgressBar)]  # type: ignore[attr-defined]
        if trainer.is_global_zero and not any(bar.says_rounds for bar in bars):
            self._file.write(logging.INFO, round_line(trainer))

    def on_exception(
        self, trainer: Trainer, pl_module: LightningModule, exception: BaseException
    ) -> None:
        """Write what has ended the run."""
        told = "".join(traceback.format_exception(exception))
        self._file.write(logging.ERROR, f"{type(exception).__name__}: {exception}\n{told}")
        self._close()

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """End the file."""
        self._close()

    def _open(self, trainer: Trainer) -> None:
        folder = folder_of(trainer)  # which processes agree on: all must ask
        if folder is None or self._file.is_open:
            return
        self._file.open(Path(folder, NAME), trainer.global_rank)
        if trainer.is_global_zero:
            self._file.write(logging.INFO, f"{' '.join(sys.argv)} ({_software()})")

    def _close(self) -> None:
        self._file.close()
        if self._put_back is not None:
            self._put_back()
        self._put_back = None


def folder_of(trainer: Trainer) -> str | None:
    """Return the folder of a run, which processes agree on: all must ask; None if it has none.

    Without a logger it is the Trainer's ``default_root_dir``, but for that where the program was started.
    """
    if trainer.fast_dev_run:  # type: ignore[attr-defined]
        return None
    folder = run_folder(trainer)
    is_own = trainer.logger is not None or Path(folder).resolve() != Path.cwd()
    return folder if is_own else None


def _layers(module: LightningModule) -> str:
    """Return name, class and number of parameters of a module's parts and of theirs."""
    summary = summarize(module, max_depth=2)
    rows = zip(summary.layer_names, summary.layer_types, summary.param_nums, strict=True)
    return aligned([[name, kind, f"{count:,}"] for name, kind, count in rows])


def _software() -> str:
    return ", ".join([*map(_named, _VERSIONS), f"Python {platform.python_version()}"])


def _named(package: str) -> str:
    try:
        return f"{package} {version(package)}"
    except PackageNotFoundError:
        return package
