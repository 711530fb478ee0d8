"""The end of a Trainer's run in forked processes: its results, its error, its runs of W&B.

Lightning calls the callbacks' ``on_exception`` in the process that started the others, where nothing
has been trained. So the first process calls them itself: a callback may save a checkpoint. It does not
wait for the others, which may have ended.

W&B writes what it holds back when Python exits, and a forked process ends without that: it ends its run
itself. A test afterwards opens the same run, whose name both know.
"""

from __future__ import annotations

import pickle
import secrets
import signal
import traceback
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import Checkpoint, ModelCheckpoint
from lightning.pytorch.loggers import WandbLogger
from lightning.pytorch.trainer.states import TrainerFn, TrainerState
from torch import Tensor

from fl_lightning.federation.logs import bring_metrics, logged_in_round
from fl_lightning.federation.loop import load_progress, progress
from fl_lightning.federation.stages.privacy_ledger import Spent, note_spent, spent_on
from fl_lightning.federation.visits.personal_models import HasPersonalModels

if TYPE_CHECKING:
    from lightning.pytorch.strategies import DDPStrategy


# What a ModelCheckpoint knows of the files it wrote.
_PATHS = ("dirpath", "best_model_path", "best_model_score", "last_model_path")


@dataclass(frozen=True)
class TrainerOutcome:
    """The result of a Trainer's function, and the state it left the Trainer in.

    Attributes:
        result: what the function returned; None for predictions, of which a process has a part.
        state: the Trainer's own word for where it is.
        weights: the module's, after a fit.
        metrics: the Trainer's ``callback_metrics``.
        new: names of those that the last round measured.
        progress: rounds done.
        checkpoints: per checkpoint callback what it wrote where.
        personal: per callback with personal models what they are.
        spent: what private fits of the module have cost.
    """

    result: Any
    state: TrainerState
    weights: dict[str, Tensor] | None
    metrics: dict[str, Tensor]
    new: set[str]
    progress: dict[str, Any]
    checkpoints: list[dict[str, Any]]
    personal: list[dict[str, Any]]
    spent: Spent

    @classmethod
    def of(cls, trainer: Trainer, result: Any) -> TrainerOutcome:
        """Return what there is to bring home."""
        fitted = trainer.state.fn == TrainerFn.FITTING
        return cls(
            result=None if trainer.state.fn == TrainerFn.PREDICTING else result,
            state=trainer.state,
            weights=trainer.lightning_module.state_dict() if fitted else None,
            metrics=dict(trainer.callback_metrics),
            new=set(logged_in_round(trainer)),
            progress=progress(trainer),
            checkpoints=[
                {name: getattr(callback, name) for name in _PATHS} for callback in _savers(trainer)
            ],
            personal=[callback.personal_state() for callback in _knowing(trainer)],
            spent=spent_on(trainer.lightning_module),
        )

    def bring_into(self, trainer: Trainer) -> Any:
        """Put everything into this process's Trainer and return the result."""
        if self.weights is not None:
            trainer.lightning_module.load_state_dict(self.weights, strict=False)
            load_progress(trainer, self.progress)
        trainer.state = self.state
        bring_metrics(trainer, self.metrics, self.new)
        for callback, paths in zip(_savers(trainer), self.checkpoints, strict=True):
            for name, value in paths.items():
                setattr(callback, name, value)
        for knowing, state in zip(_knowing(trainer), self.personal, strict=True):
            knowing.take_personal_state(state)
        if self.spent.state is not None:
            note_spent(trainer.lightning_module, lambda: self.spent)
        return self.result


def _savers(trainer: Trainer) -> list[ModelCheckpoint]:
    return [c for c in trainer.checkpoint_callbacks if isinstance(c, ModelCheckpoint)]


def _knowing(trainer: Trainer) -> list[HasPersonalModels]:
    return [c for c in trainer.callbacks if isinstance(c, HasPersonalModels)]  # type: ignore[attr-defined]


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


class ProcessTraceback(Exception):  # noqa: N818 - it is the cause of an error, not one itself
    """Where in its process an error was raised, as text; then the same of its cause, None without one."""

    def __str__(self) -> str:
        return f"\n\n{self.args[0]}"


def write_error(error: BaseException, path: Path) -> None:
    """Write an error and its traceback to a file, which then is whole or not there."""
    where, cause = "".join(traceback.format_exception(error)), error.__cause__
    behind = None if cause is None else "".join(traceback.format_exception(cause))
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
