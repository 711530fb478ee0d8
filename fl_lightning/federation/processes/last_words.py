"""What the first of several processes still does when it fails, and how long it is given for that.

Lightning calls the callbacks' ``on_exception`` in the process that started the others, where nothing
has been trained. So the first process calls them itself: a callback may save a checkpoint, e.g.
`lightning.pytorch.callbacks.OnExceptionCheckpoint`. It then speaks for itself alone, because the
others may have ended and would never answer.
"""

from __future__ import annotations

import signal
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import Checkpoint

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
