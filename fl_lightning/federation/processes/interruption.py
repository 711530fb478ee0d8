"""Ctrl-C: a fit completes the current round, saves it and stops; if that takes too long, the round is dropped.

A second Ctrl-C stops at once; so do SIGTERM and a Ctrl-C outside of training. Checkpoints are written
atomically, so that the last completed round is always saved. A run stops by the exception `Interrupted`.

With several processes, any of them may get the signal. They learn of it when they exchange results, and end
after the same round. The parent process forwards the signal and kills processes that take too long.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import FrameType
from typing import Any, NoReturn

from lightning.fabric.plugins.environments.slurm import SLURMEnvironment
from lightning.pytorch import Callback, LightningModule, Trainer

from fl_lightning.core.errors import Interrupted
from fl_lightning.federation.checkpoints.files import LAST, AtomicCheckpointIO
from fl_lightning.federation.checkpoints.run_folder import checkpoint_folders

# Seconds for a round to end after Ctrl-C; the run ends within 5 s.
SECONDS_TO_END = 3.0
# Seconds after which the parent kills processes that have not ended.
_SECONDS_TO_DIE = 4.2
# Signals within this time are one key press: it may arrive from the terminal and from a program.
_ONE_KEY_PRESS = 0.25
_PROMISE = (
    f"\nCtrl-C: stops at the end of this round, or without it in {SECONDS_TO_END:.0f} s. "
    "Once more stops at once.\n"
)

Handler = Callable[[int, FrameType | None], Any] | int | None


@contextmanager
def interruptible() -> Iterator[None]:
    """Make Ctrl-C raise `Interrupted` inside the block; a second one ends the process.

    This also holds if the signal was ignored, as in the background of a script.
    """
    before = _install({signal.SIGINT: _raise_at_once})
    try:
        yield
    finally:
        _install(before)


def _raise_at_once(signum: int, frame: FrameType | None) -> NoReturn:
    asked_at = time.monotonic()

    def again(signum: int, frame: FrameType | None) -> None:
        if time.monotonic() - asked_at > _ONE_KEY_PRESS:
            os._exit(Interrupted(signum).exit_code)

    _install({signal.SIGINT: again})
    raise Interrupted(signum)


def _install(handlers: Mapping[int, Handler]) -> dict[int, Handler]:
    """Install signal handlers and return the earlier ones; outside the main thread do nothing."""
    if threading.current_thread() is not threading.main_thread():
        return {}
    before = {signum: signal.getsignal(signum) for signum in handlers}
    for signum, handler in handlers.items():
        signal.signal(signum, handler)
    return before


class Interruption(Callback):
    """Callback that stops a fit after a completed round when Ctrl-C is pressed.

    Attributes:
        is_asked: whether it was pressed in this process, or (known after an exchange) in another one.
    """

    def __init__(self) -> None:
        super().__init__()
        self.is_asked = False
        self._asked_at = 0.0
        self._is_agreed = False
        self._before: dict[int, Handler] = {}
        self._parent = 0
        self._is_forked = False

    def agree(self) -> None:
        """Note that all processes have agreed to stop after this round."""
        self.is_asked = self._is_agreed = True

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Install handlers of Ctrl-C and SIGTERM for the time of training."""
        self._parent = os.getppid()
        handlers: dict[int, Handler] = {signal.SIGINT: self._ask, signal.SIGALRM: _give_up}
        if not _is_requeued(trainer):
            handlers[signal.SIGTERM] = _stop_at_once
        self._before = _install(handlers)

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """If Ctrl-C was pressed, save the previous round and stop."""
        if not self._stops(trainer):
            return
        self._let_go()
        _save_if_missing(trainer)
        raise Interrupted(signal.SIGINT)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Restore the signal handlers from before training."""
        self._let_go()

    def on_exception(
        self, trainer: Trainer, pl_module: LightningModule, exception: BaseException
    ) -> None:
        """Restore the signal handlers from before training."""
        self._let_go()

    @contextmanager
    def passed_on(self, kill: Callable[[int], None]) -> Iterator[None]:
        """Forward Ctrl-C to the forked processes inside the block.

        Args:
            kill: sends a signal to the processes; with SIGKILL it waits for their end.
        """
        own = os.getpid()

        def give_up(signum: int, frame: FrameType | None) -> NoReturn:
            if os.getpid() == own:  # else this is a forked process before or after its training
                kill(signal.SIGKILL)
            raise Interrupted(signal.SIGTERM if signum == signal.SIGTERM else signal.SIGINT)

        def ask(signum: int, frame: FrameType | None) -> None:
            if os.getpid() != own:
                _install({signal.SIGINT: signal.SIG_IGN})  # the parent forwards the same key press
                raise Interrupted(signum)
            if not self._asked_at:
                self.is_asked, self._asked_at = True, time.monotonic()
                signal.setitimer(signal.ITIMER_REAL, _SECONDS_TO_DIE)
                os.write(2, _PROMISE.encode())
                kill(signal.SIGINT)
            elif time.monotonic() - self._asked_at > _ONE_KEY_PRESS:
                give_up(signum, frame)

        self._before = _install(
            {signal.SIGINT: ask, signal.SIGALRM: give_up, signal.SIGTERM: give_up}
        )
        self._is_forked = True  # true in the forked processes, which inherit this object
        try:
            yield
        finally:
            self._is_forked = False
            self._let_go()

    def _let_go(self) -> None:
        if self._before:
            signal.setitimer(signal.ITIMER_REAL, 0)
        _install(self._before)
        self._before = {}

    def _ask(self, signum: int, frame: FrameType | None) -> None:
        # the parent has died, which the system reports by this signal
        if os.getppid() != self._parent:
            raise Interrupted(signum)
        if not self._asked_at:
            self.is_asked, self._asked_at = True, time.monotonic()
            # repeatedly: Python ignores exceptions in some places
            signal.setitimer(signal.ITIMER_REAL, SECONDS_TO_END, 1.0)
            if not self._is_forked:
                os.write(2, _PROMISE.encode())
        elif not self._is_forked and time.monotonic() - self._asked_at > _ONE_KEY_PRESS:
            raise Interrupted(signum)

    def _stops(self, trainer: Trainer) -> bool:
        if trainer.world_size == 1:
            return self.is_asked
        if getattr(trainer.datamodule, "trains_in_rounds", False):  # type: ignore[attr-defined]
            return self._is_agreed
        return trainer.strategy.reduce_boolean_decision(self.is_asked, all=False)


def interruption_of(trainer: Trainer) -> Interruption | None:
    """Return a Trainer's `Interruption`, if it has one."""
    callbacks: list[Callback] = trainer.callbacks  # type: ignore[attr-defined]
    return next((c for c in callbacks if isinstance(c, Interruption)), None)


def _give_up(signum: int, frame: FrameType | None) -> NoReturn:
    raise Interrupted(signal.SIGINT)


def _stop_at_once(signum: int, frame: FrameType | None) -> NoReturn:
    # repeatedly until the run has ended: Python ignores exceptions in some places
    _install({signal.SIGALRM: _stop_at_once})
    signal.setitimer(signal.ITIMER_REAL, 1.0, 1.0)
    raise Interrupted(signal.SIGTERM)


def _is_requeued(trainer: Trainer) -> bool:
    """Return whether Lightning requeues the run when SLURM sends SIGTERM."""
    environment = getattr(trainer.strategy, "cluster_environment", None)
    return isinstance(environment, SLURMEnvironment) and environment.auto_requeue


def _save_if_missing(trainer: Trainer) -> None:
    """Save a checkpoint of the last round unless there is one; every process must call this."""
    folder = next(iter(checkpoint_folders(trainer)), None)
    if folder is None or trainer.global_step == 0:  # checkpoints are switched off
        return
    plugin = trainer.strategy.checkpoint_io
    is_saved = isinstance(plugin, AtomicCheckpointIO) and plugin.saved_step == trainer.global_step
    if not trainer.strategy.broadcast(is_saved):
        trainer.save_checkpoint(folder / LAST)
