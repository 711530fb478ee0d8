"""Checkpoints that are whole or not there, whenever the process is killed.

Lightning writes to the system's temporary folder and moves the file. Where that folder lies on
another file system, as on most clusters, moving means copying: a process killed meanwhile leaves
half of ``last.ckpt`` in place of the whole one before it.

No kill can split what is written here, but a disk can lose it: beside ``last.ckpt`` stays
``previous.ckpt``, the one before.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
from lightning.fabric.plugins.io.torch_io import TorchCheckpointIO
from typing_extensions import override

from fl_lightning.client.vector_file import VectorFile
from fl_lightning.core.errors import CheckpointFailure, ConfigurationError
from fl_lightning.federation.checkpoints.memory_files import (
    hold,
    names_of,
    owned,
    place,
    remove_left,
    tidy,
)

LAST = "last.ckpt"
PREVIOUS = "previous.ckpt"


class AtomicCheckpointIO(TorchCheckpointIO):
    """Writes beside the target and renames, which no kill can split.

    Attributes:
        files: gives the files to which the checkpoint refers that is saved next.
        saved_step: the ``global_step`` of the checkpoint from which a fit can go on that was saved
            last; None before the first.

    Example:
        >>> import tempfile
        >>> folder = Path(tempfile.mkdtemp())
        >>> AtomicCheckpointIO().save_checkpoint({"round": 3}, folder / "last.ckpt")
        >>> [path.name for path in folder.iterdir()], torch.load(folder / "last.ckpt")
        (['last.ckpt'], {'round': 3})
    """

    def __init__(self) -> None:
        super().__init__()
        self.files: Callable[[], Sequence[VectorFile]] = tuple
        self.saved_step: int | None = None
        self._whole: dict[Path, Any] = {}
        self._cleared: set[Path] = set()

    @override
    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: str | Path, storage_options: Any | None = None
    ) -> None:
        """Save to a local path atomically, to a remote one as Lightning does."""
        files = self.files()
        if "://" in str(path):
            if files:
                raise ConfigurationError(
                    f"{path}: what clients remember is too large to be part of a checkpoint and "
                    "lies in files beside it, which needs a folder of this machine"
                )
            super().save_checkpoint(checkpoint, path, storage_options)
            return
        target = Path(path)
        with _in_a_sentence(target):
            target.parent.mkdir(parents=True, exist_ok=True)
            referred = names_of(target)
            place(files, target)
            if target.parent not in self._cleared:
                remove_left(target.parent, ".")
                self._cleared.add(target.parent)
            unfinished = _unfinished(target)
            with unfinished.open("wb") as file:
                torch.save(checkpoint, file)
            step = checkpoint.get("global_step")
            if target.name == LAST and self._whole.get(target, step) != step:
                _keep_previous(target, referred)
            os.replace(unfinished, target)
            tidy(target, [file.path.name for file in files])
        self._whole[target] = step
        if "optimizer_states" in checkpoint:
            self.saved_step = step

    @override
    def load_checkpoint(self, path: str | Path, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Load as Lightning does, and know that this checkpoint is whole."""
        checkpoint: dict[str, Any] = super().load_checkpoint(path, *args, **kwargs)
        self._whole[Path(path)] = self.saved_step = checkpoint.get("global_step")
        return checkpoint

    @override
    def remove_checkpoint(self, path: str | Path) -> None:
        """Remove a checkpoint, and the files that no other one of its folder needs."""
        super().remove_checkpoint(path)
        if "://" not in str(path):
            tidy(Path(path))


def remove_unfinished(folder: Path) -> None:
    """Remove what killed processes have left in a folder of checkpoints."""
    for left in folder.glob(".*.unfinished"):
        left.unlink(missing_ok=True)


def _unfinished(target: Path) -> Path:
    """Return where a file is written before it takes its name; it says whose it is, see `remove_left`."""
    return target.with_name(f"{owned('.')}{target.name}.unfinished")


def _keep_previous(last: Path, names: Sequence[str]) -> None:
    """Give a whole ``last.ckpt``, about to be replaced, and the files it needs its second name."""
    previous = last.with_name(PREVIOUS)
    unfinished = _unfinished(previous)
    hold(previous, names)
    unfinished.unlink(missing_ok=True)
    try:
        os.link(last, unfinished)
    except FileNotFoundError:  # somebody has removed it
        return
    except OSError:  # a file system without links: for a moment there is no last.ckpt
        unfinished = last
    os.replace(unfinished, previous)
    tidy(previous, names)


@contextmanager
def _in_a_sentence(target: Path) -> Iterator[None]:
    """Say what keeps a checkpoint from being written, and leave no part of it."""
    try:
        yield
    except (OSError, RuntimeError) as error:  # PyTorch's writer tells of a full disk by the latter
        with suppress(OSError):
            _unfinished(target).unlink(missing_ok=True)
        free = _free_megabytes(target.parent)
        reason = (getattr(error, "strerror", None) or str(error)).splitlines()[0]
        raise CheckpointFailure(
            f"{target} could not be written: {reason} ({free}). The checkpoint before it is whole: "
            "make room, or let the folder be written to, and go on with ckpt_path: last"
        ) from error


def _free_megabytes(folder: Path) -> str:
    try:
        return f"{shutil.disk_usage(folder).free // 2**20:,} MB are free"
    except OSError:
        return "there is no such folder"
