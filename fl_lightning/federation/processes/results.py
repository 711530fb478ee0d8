"""What a Trainer's run leaves behind, carried from one process to another."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.trainer.states import TrainerFn, TrainerState
from torch import Tensor

from fl_lightning.federation.logs import bring_metrics, logged_in_round
from fl_lightning.federation.loop import load_progress, progress
from fl_lightning.federation.stages.privacy_ledger import Spent, note_spent, spent_on
from fl_lightning.federation.visits.personal_models import HasPersonalModels

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
