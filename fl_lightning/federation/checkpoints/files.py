"""Files of checkpoints, written atomically: a kill leaves the previous checkpoint intact.

Lightning writes to the system's temporary folder and moves the file. If that folder is on another file
system, as on most clusters, moving means copying: a process killed meanwhile leaves half a
``last.ckpt``. Here a file is written beside the previous one, flushed to disk, and renamed.

Large client states are files in a folder beside their checkpoint, ``last.ckpt.client_memory``. They are
hard links to the run's working files, so that nothing is copied and unchanged states are not written
again. Every process of a run has all client states, because a client may train in another process the
next time; the first one saves them.
"""

from __future__ import annotations

import os
import shutil
import socket
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from multiprocessing.util import Finalize
from pathlib import Path
from typing import Any

import torch
from lightning.fabric.plugins.io.torch_io import TorchCheckpointIO
from lightning.pytorch import Trainer
from typing_extensions import override

from fl_lightning.client.memory import ClientMemory, VectorFile
from fl_lightning.core.errors import CheckpointFailure, ConfigurationError

LAST = "last.ckpt"


class AtomicCheckpointIO(TorchCheckpointIO):
    """Saves checkpoints atomically: a file is written beside its target and renamed.

    Attributes:
        files: returns the files to which the next checkpoint refers.
        saved_step: ``global_step`` of the last checkpoint from which a fit can resume; None without one.

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

    @override
    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: str | Path, storage_options: Any | None = None
    ) -> None:
        """Save a checkpoint atomically to a local path, or to a remote path as Lightning does."""
        files = self.files()
        if "://" in str(path):
            if files:
                raise ConfigurationError(
                    f"{path}: the clients' states are too large for a checkpoint, so they are in files beside it, "
                    "which is possible only in a local folder: set ModelCheckpoint's dirpath to one"
                )
            super().save_checkpoint(checkpoint, path, storage_options)
            return
        target, folder = Path(path), memory_folder(path)
        with _explaining_errors(target):
            target.parent.mkdir(parents=True, exist_ok=True)
            for file in files:
                file.linked(folder)
            unfinished = _unfinished(target)
            with unfinished.open("wb") as stream:
                torch.save(checkpoint, stream)
                stream.flush()
                os.fsync(stream.fileno())  # else a power failure may leave an empty file
            os.replace(unfinished, target)
            _keep_only(folder, {file.path.name for file in files})
        if "optimizer_states" in checkpoint:
            self.saved_step = checkpoint.get("global_step")

    @override
    def load_checkpoint(self, path: str | Path, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Load a checkpoint as Lightning does, and record its ``global_step``."""
        checkpoint: dict[str, Any] = super().load_checkpoint(path, *args, **kwargs)
        self.saved_step = checkpoint.get("global_step")
        return checkpoint

    @override
    def remove_checkpoint(self, path: str | Path) -> None:
        """Remove a checkpoint and the folder with its client states."""
        super().remove_checkpoint(path)
        if "://" not in str(path):
            shutil.rmtree(memory_folder(path), ignore_errors=True)


def memory_folder(checkpoint: str | Path) -> Path:
    """Return the folder with a checkpoint's client states."""
    return Path(f"{checkpoint}.client_memory")


def _keep_only(folder: Path, names: set[str]) -> None:
    """Delete the files of client states in a checkpoint's folder that the checkpoint does not use."""
    if not names:
        shutil.rmtree(folder, ignore_errors=True)
        return
    for path in folder.iterdir():
        if path.name not in names:
            path.unlink(missing_ok=True)


def remove_unfinished(folder: Path) -> None:
    """Remove half-written checkpoint files that killed processes have left in a folder."""
    for left in folder.glob(".*.unfinished"):
        left.unlink(missing_ok=True)


def _unfinished(target: Path) -> Path:
    """Return the path at which a file is written before it is renamed."""
    return target.with_name(f".{target.name}.unfinished")


@contextmanager
def _explaining_errors(target: Path) -> Iterator[None]:
    """Raise `CheckpointFailure` for errors of writing inside the block, and remove the unfinished file."""
    try:
        yield
    # PyTorch's writer raises RuntimeError if the disk is full
    except (OSError, RuntimeError) as error:
        with suppress(OSError):
            _unfinished(target).unlink(missing_ok=True)
        free = _free_megabytes(target.parent)
        reason = (getattr(error, "strerror", None) or str(error)).splitlines()[0]
        raise CheckpointFailure(
            f"{target} could not be written: {reason} ({free}). The previous checkpoint is intact: "
            "free space or make the folder writable, and resume with ckpt_path: last"
        ) from error


def _free_megabytes(folder: Path) -> str:
    try:
        return f"{shutil.disk_usage(folder).free // 2**20:,} MB are free"
    except OSError:
        return "there is no such folder"


class WorkingFolder:
    """Working folder of one process, removed with this object. Creating it also removes folders of killed processes."""

    def __init__(self, parent: Path, prefix: str = ".client_memory-") -> None:
        self._parent, self._prefix = parent, f"{prefix}{socket.gethostname()}_"
        self._path: Path | None = None
        self._remove: Callable[[], Any] | None = None

    def __call__(self) -> Path:
        """Return the path of the folder; the first call creates the folder."""
        if self._path is None:
            self._remove_left()
            self._parent.mkdir(parents=True, exist_ok=True)
            # one process may have several runs
            mine = f"{self._prefix}{os.getpid()}_"
            self._path = Path(tempfile.mkdtemp(prefix=mine, dir=self._parent))
            # unlike those of weakref and atexit, it also runs when a forked process ends
            self._remove = Finalize(self, shutil.rmtree, (self._path, True), exitpriority=0)
        return self._path

    def _remove_left(self) -> None:
        """Remove the folders that killed processes of this machine have left."""
        for left in self._parent.glob(f"{self._prefix}*"):  # no name of a machine has a _
            process, *_ = left.name.removeprefix(self._prefix).split("_")
            if process.isdigit() and not _is_running(int(process)):
                shutil.rmtree(left, ignore_errors=True)

    __enter__ = __call__

    def __exit__(self, *_: object) -> None:
        if self._remove is not None:
            self._remove()


def _is_running(process: int) -> bool:
    try:
        os.kill(process, 0)
        return "State:\tZ" not in Path(f"/proc/{process}/status").read_text()
    except ProcessLookupError:
        return False
    except OSError:  # another user's process, or a system without /proc
        return True


def run_memory(trainer: Trainer, ram_bytes: float) -> ClientMemory:
    """Return the store of a fit's client states; what exceeds ``ram_bytes`` is in files below the root folder."""
    root = str(trainer.default_root_dir)
    parent = Path(tempfile.gettempdir() if "://" in root else root)
    return ClientMemory(ram_bytes, WorkingFolder(parent))


def in_files(state: Mapping[str, Any]) -> bool:
    """Return whether a checkpoint's client states are in separate files, which may be lost."""
    return any(len(entry) > 3 for entry in state.get("present", ()))


def load_memory(
    memory: ClientMemory, state: Mapping[str, Any], path: str | Path | None, *, adopt: bool = False
) -> None:
    """Load the client states of a checkpoint; if it has none, keep the present ones.

    Args:
        memory: gets the client states.
        state: the client states, or references to their files.
        path: path of the checkpoint; None if it came from no file.
        adopt: keep the files, so that they outlive the checkpoint.

    Raises:
        ConfigurationError: if files are missing beside the checkpoint.
    """
    if state:
        folder = None if path is None else memory_folder(Path(path).resolve())  # it may be a link
        memory.load_state_dict(state, folder, adopt=adopt)
