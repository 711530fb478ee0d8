"""Of which model a figure is: after which round, and from which file.

``fit`` ends by testing the last model, ``test`` may be given the best one: their figures differ, and
look alike.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities import rank_zero_info

from fl_lightning.callbacks.console.tidy import detail
from fl_lightning.federation import Federation


class ModelOrigin:
    """Remembers which checkpoint a Trainer has loaded into its module for an evaluation.

    Example:
        >>> trainer = Trainer(logger=False, enable_checkpointing=False, accelerator="cpu")
        >>> ModelOrigin().words(trainer)
        'the model as it was given, without a round of this Trainer'
    """

    def __init__(self) -> None:
        self._words, self._steps = "", -1
        self._module: Any = None

    def note(
        self, trainer: Trainer, module: LightningModule, checkpoint: Mapping[str, Any]
    ) -> None:
        """Note the source of the module's weights from now on."""
        if trainer.state.fn == "fit":
            return  # which goes on from it
        self._words = f"the model {_after(checkpoint)}, {shown_path(str(trainer.ckpt_path))}"
        self._steps, self._module = trainer.global_step, weakref.ref(module)

    def words(self, trainer: Trainer) -> str:
        """Return in words which model the Trainer's module holds."""
        module, steps = trainer.lightning_module, trainer.global_step
        # a fit since then would have gone on from it
        if self._module is not None and self._module() is module and self._steps == steps:
            return self._words
        if not steps:
            return "the model as it was given, without a round of this Trainer"
        return f"the model after {_unit(_is_federated(trainer))} {steps}, the last one of this fit"


class EvaluatedModel(Callback):
    """Prints, ahead of the figures of ``validate`` and ``test``, of which model they are."""

    def __init__(self) -> None:
        super().__init__()
        self._origin = ModelOrigin()

    def on_load_checkpoint(
        self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Remember what is loaded."""
        self._origin.note(trainer, pl_module, checkpoint)

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Say it in the ``validate`` command; a fit's own validations stand beside their round."""
        if trainer.state.fn == "validate":
            rank_zero_info(f"validate: {self._origin.words(trainer)}", **detail())

    def on_test_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Say it in the ``test`` command and in the test at the end of a fit."""
        rank_zero_info(f"test: {self._origin.words(trainer)}", **detail())

    def on_predict_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Say it in the ``predict`` command."""
        rank_zero_info(f"predict: {self._origin.words(trainer)}")


def saved_after(path: str) -> str:
    """Return after which round a checkpoint was saved, as ``after round 7``; empty if unknown."""
    try:
        # mapped, not read: of a large model only what is looked at
        checkpoint = torch.load(path, map_location="cpu", mmap=True, weights_only=True)
        return _after(checkpoint)
    except (OSError, RuntimeError, UnpicklingError, KeyError):
        return ""


def shown_path(path: str) -> str:
    """Return a path from the working directory on if it is below it, else from the root on."""
    absolute, here = Path(path).resolve(), Path.cwd()
    return str(absolute.relative_to(here) if absolute.is_relative_to(here) else absolute)


def _after(checkpoint: Mapping[str, Any]) -> str:
    federated = Federation.__qualname__ in checkpoint.get("callbacks", {})
    return f"after {_unit(federated)} {checkpoint['global_step']}"


def _is_federated(trainer: Trainer) -> bool:
    return any(isinstance(callback, Federation) for callback in trainer.callbacks)  # type: ignore[attr-defined]


def _unit(federated: bool) -> str:
    return "round" if federated else "optimizer step"
