"""Checkpoints that are whole or not there, whenever the process is killed.

Lightning writes to the system's temporary folder and moves the file. Where that folder lies on
another file system, as on most clusters, moving means copying: a process killed meanwhile leaves
half of ``last.ckpt`` in place of the whole one before it.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
from lightning.fabric.plugins.io.torch_io import TorchCheckpointIO
from typing_extensions import override


class AtomicCheckpointIO(TorchCheckpointIO):
    """Writes beside the target and renames, which no kill can split.

    Example:
        >>> import tempfile
        >>> folder = Path(tempfile.mkdtemp())
        >>> AtomicCheckpointIO().save_checkpoint({"round": 3}, folder / "last.ckpt")
        >>> [path.name for path in folder.iterdir()], torch.load(folder / "last.ckpt")
        (['last.ckpt'], {'round': 3})
    """

    @override
    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: str | Path, storage_options: Any | None = None
    ) -> None:
        """Save to a local path atomically, to a remote one as Lightning does."""
        if "://" in str(path):
            super().save_checkpoint(checkpoint, path, storage_options)
            return
        target = Path(path)
        target.parent.mkdir(parents=True, exist_ok=True)
        # always the same name, so that what a killed run left behind is overwritten
        unfinished = target.with_name(f".{target.name}.unfinished")
        with unfinished.open("wb") as file:
            torch.save(checkpoint, file)
        os.replace(unfinished, target)
