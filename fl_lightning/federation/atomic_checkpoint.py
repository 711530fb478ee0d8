"""Checkpoints that are whole or not there, whenever the process is killed.

Lightning writes to the system's temporary folder and moves the file. Where that folder lies on
another file system, as on most clusters, moving means copying: a process killed meanwhile leaves
half of ``last.ckpt`` in place of the whole one before it.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from lightning.fabric.plugins.io.torch_io import TorchCheckpointIO
from typing_extensions import override

from fl_lightning.client.vector_file import VectorFile
from fl_lightning.core.errors import ConfigurationError
from fl_lightning.federation.memory_files import place, tidy


class AtomicCheckpointIO(TorchCheckpointIO):
    """Writes beside the target and renames, which no kill can split.

    Attributes:
        files: gives the files to which the checkpoint refers that is saved next.

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
        target.parent.mkdir(parents=True, exist_ok=True)
        place(files, target)
        # always the same name, so that what a killed run left behind is overwritten
        unfinished = target.with_name(f".{target.name}.unfinished")
        with unfinished.open("wb") as file:
            torch.save(checkpoint, file)
        os.replace(unfinished, target)
        tidy(target, [file.path.name for file in files])

    @override
    def remove_checkpoint(self, path: str | Path) -> None:
        """Remove a checkpoint, and the files that no other one of its folder needs."""
        super().remove_checkpoint(path)
        if "://" not in str(path):
            tidy(Path(path))
