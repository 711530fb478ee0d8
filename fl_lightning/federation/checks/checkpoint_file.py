"""What is wrong with a file that is to be a checkpoint, in a sentence, before anything starts."""

from __future__ import annotations

from pathlib import Path
from pickle import UnpicklingError
from typing import Any
from zipfile import is_zipfile

import torch

from fl_lightning.core.errors import ConfigurationError
from fl_lightning.federation.checkpoints.atomic_checkpoint import LAST, PREVIOUS


def check_checkpoint(path: Path) -> int:
    """Return after how many global steps a checkpoint was saved.

    Raises:
        ConfigurationError: if the file cannot be one; with the round before it if that is whole.
    """
    problem, checkpoint = _read(path)
    if problem is None:
        return int(checkpoint.get("global_step", 0))
    previous = path.with_name(PREVIOUS)
    if path.name == LAST and previous.exists():
        reason, checkpoint = _read(previous)
        if reason is None:
            rounds = checkpoint["global_step"]
            raise ConfigurationError(
                f"ckpt_path: {path} {problem}. The one before it is whole, global step {rounds}: go "
                f"on with --ckpt_path {previous}"
            )
    raise ConfigurationError(f"ckpt_path: {path} {problem}. Give the path of a .ckpt file, or last")


def best_of(last: Path) -> Path | None:
    """Return the best checkpoint of the run that wrote a last one, None if it kept none."""
    callbacks = _read(last)[1].get("callbacks", {})
    for state in callbacks.values():
        if isinstance(state, dict) and state.get("monitor") and state.get("best_model_path"):
            best = Path(state["best_model_path"])
            beside = last.with_name(best.name)  # where the run's folder has been moved since
            return next((path for path in (beside, best) if path.exists()), None)
    return None


def _read(path: Path) -> tuple[str | None, dict[str, Any]]:
    """Return why a file is no checkpoint, None if it is one, and what can be read of it."""
    if path.is_dir():
        return "is a folder and no checkpoint", {}
    if not path.exists():
        return "does not exist", {}
    if path.stat().st_size == 0:
        return "is empty", {}
    try:
        # mapped, not read: of a large model only what is looked at
        checkpoint = torch.load(path, map_location="cpu", mmap=is_zipfile(path), weights_only=True)
    except Exception as error:  # noqa: BLE001 - pickle raises whatever the bytes lead to
        return _in_words(error, path), {}
    if not isinstance(checkpoint, dict) or "state_dict" not in checkpoint:
        return "is no checkpoint of Lightning: it has no state_dict", {}
    return None, checkpoint


def _in_words(error: Exception, path: Path) -> str | None:
    if isinstance(error, PermissionError):
        return "may not be read by you"
    if isinstance(error, UnpicklingError) and is_zipfile(path):
        return None  # classes of the user's own: Lightning says what to do
    return "is no checkpoint of Lightning, or a damaged one"
