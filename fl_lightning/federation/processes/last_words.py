"""What the first of several processes still does when it fails, and how long it is given for that.

Lightning calls the callbacks' ``on_exception`` in the process that started the others, where nothing
has been trained. So the first process calls them itself: a callback may save a checkpoint, e.g.
`lightning.pytorch.callbacks.OnExceptionCheckpoint`. It then speaks for itself alone, because the
others may have ended and would never answer.

An error on its way from one process to another, by way of a file.

Runs of W&B, across the processes of a fit.

W&B writes what it holds back when Python exits. A forked process ends without that, so it ends its run
itself. The process that goes on afterwards, with a test, opens the same run again: both know its name
beforehand.
"""

from __future__ import annotations

import pickle
import secrets
import signal
import traceback
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import Checkpoint
from lightning.pytorch.loggers import WandbLogger

if TYPE_CHECKING:
    from lightning.pytorch.strategies import DDPStrategy


# What stops all processes at once reaches each of them within this time.
_SECONDS_TO_FAIL = 1.0
_SECONDS_TO_SAVE = 120.0


def call_on_exception(trainer: Trainer, strategy: DDPStrategy, error: BaseException) -> None:
    """Let the callbacks of this process save what is to be saved after an error."""
    for number in (signal.SIGINT, signal.SIGTERM):  # an impatient user's second Ctrl-C
        signal.signal(number, signal.SIG_IGN)
    strategy.barrier = lambda *_, **__: None  # type: ignore[method-assign]
    strategy.broadcast = lambda value, *_, **__: value  # type: ignore[method-assign]
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        callback.on_exception(trainer, trainer.lightning_module, error)


def wait_for_first(process: Any, note: Path) -> None:
    """Let the first process end by itself if it has failed as well.

    Args:
        process: the first one.
        note: the file it writes when it has failed.
    """
    process.join(_SECONDS_TO_FAIL)
    if note.exists():
        process.join(_SECONDS_TO_SAVE)


def forget_checkpoints(trainer: Trainer) -> None:
    """Keep callbacks from saving the state of a process in which nothing was trained."""
    kept = [c for c in trainer.callbacks if not isinstance(c, Checkpoint)]  # type: ignore[attr-defined]
    trainer.callbacks = kept  # type: ignore[attr-defined]


class ProcessTraceback(Exception):  # noqa: N818 - it is the cause of an error, not one itself
    """Where in its process an error was raised, as text; then the same of its cause, None without one."""

    def __str__(self) -> str:
        return f"\n\n{self.args[0]}"


def traceback_behind(error: BaseException) -> str | None:
    """Return the traceback of an error's cause as text; None without a cause."""
    cause = error.__cause__
    if isinstance(cause, ProcessTraceback):
        return cause.args[1]  # type: ignore[no-any-return]
    return None if cause is None else "".join(traceback.format_exception(cause))


def write_error(error: BaseException, path: Path) -> None:
    """Write an error and its traceback to a file, which then is whole or not there."""
    where, behind = "".join(traceback.format_exception(error)), traceback_behind(error)
    try:
        content = pickle.dumps((error, where, behind))
        pickle.loads(content)  # some errors can be written but not read
    except Exception:  # noqa: BLE001 - whatever a user's error does when it is pickled
        content = pickle.dumps((RuntimeError(f"{type(error).__name__}: {error}"), where, None))
    unfinished = path.with_name(f"{path.name}.unfinished")
    unfinished.write_bytes(content)
    unfinished.rename(path)


def read_error(path: Path) -> BaseException:
    """Return the error, whose cause tells where it was raised."""
    error, *traces = pickle.loads(path.read_bytes())
    assert isinstance(error, BaseException)
    error.__cause__ = ProcessTraceback(*traces)
    return error


def name_runs(trainer: Trainer) -> None:
    """Give every run that has no name yet one, in the process that is to be forked."""
    for logger in _loggers(trainer):
        if logger._experiment is None and not logger._id:
            logger._id = logger._wandb_init["id"] = f"w{secrets.token_hex(4)}"


def end_runs(trainer: Trainer) -> None:
    """Have every run that is open in this process write all that it has."""
    for logger in _loggers(trainer):
        if logger._experiment is not None:
            logger._experiment.finish()


def _loggers(trainer: Trainer) -> list[WandbLogger]:
    return [logger for logger in trainer.loggers if isinstance(logger, WandbLogger)]
