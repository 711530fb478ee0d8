"""Checkpoints that are whole or not there, whenever the process is killed.

Lightning writes to the system's temporary folder and moves the file. Where that folder lies on
another file system, as on most clusters, moving means copying: a process killed meanwhile leaves
half of ``last.ckpt`` in place of the whole one before it. Here a file is written beside the old one,
reaches the disk, and takes its name.

Large client memories are files in a folder beside the checkpoint that refers to them, ``last.ckpt.client_memory``.
They are hard links to those that the run works with, so that nothing is copied and what did not change is
not written again. In a run every process has all memories (`RunMemory`).
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
from typing import Any, NamedTuple

import torch
from lightning.fabric.plugins.io.torch_io import TorchCheckpointIO
from lightning.pytorch import Trainer
from typing_extensions import override

from fl_lightning.client.memory import ClientMemory, VectorFile
from fl_lightning.core.errors import CheckpointFailure, ConfigurationError
from fl_lightning.federation.processes.ranks import Ranks

LAST = "last.ckpt"


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
        target, folder = Path(path), memory_folder(path)
        with _in_a_sentence(target):
            target.parent.mkdir(parents=True, exist_ok=True)
            for file in files:
                file.linked(folder)
            unfinished = _unfinished(target)
            with unfinished.open("wb") as stream:
                torch.save(checkpoint, stream)
                stream.flush()
                os.fsync(stream.fileno())  # else a name without content is left where power fails
            os.replace(unfinished, target)
            _keep_only(folder, {file.path.name for file in files})
        if "optimizer_states" in checkpoint:
            self.saved_step = checkpoint.get("global_step")

    @override
    def load_checkpoint(self, path: str | Path, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Load as Lightning does, and note the checkpoint's step."""
        checkpoint: dict[str, Any] = super().load_checkpoint(path, *args, **kwargs)
        self.saved_step = checkpoint.get("global_step")
        return checkpoint

    @override
    def remove_checkpoint(self, path: str | Path) -> None:
        """Remove a checkpoint and its folder."""
        super().remove_checkpoint(path)
        if "://" not in str(path):
            shutil.rmtree(memory_folder(path), ignore_errors=True)


def memory_folder(checkpoint: str | Path) -> Path:
    """Return the folder of the files to which a checkpoint refers."""
    return Path(f"{checkpoint}.client_memory")


def _keep_only(folder: Path, names: set[str]) -> None:
    """Delete what the checkpoint that has just been replaced needed, or what a killed run has left."""
    if not names:
        shutil.rmtree(folder, ignore_errors=True)
        return
    for path in folder.iterdir():
        if path.name not in names:
            path.unlink(missing_ok=True)


def remove_unfinished(folder: Path) -> None:
    """Remove what killed processes have left in a folder of checkpoints."""
    for left in folder.glob(".*.unfinished"):
        left.unlink(missing_ok=True)


def _unfinished(target: Path) -> Path:
    """Return where a file is written before it takes its name."""
    return target.with_name(f".{target.name}.unfinished")


@contextmanager
def _in_a_sentence(target: Path) -> Iterator[None]:
    """Raise the reason why a checkpoint cannot be written, and leave no part of it."""
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


class WorkingFolder:
    """Folder of one process, removed with this or after a ``with``; a killed one's by the next."""

    def __init__(self, parent: Path, prefix: str = ".client_memory-") -> None:
        self._parent, self._prefix = parent, f"{prefix}{socket.gethostname()}_"
        self._path: Path | None = None
        self._remove: Callable[[], Any] | None = None

    def __call__(self) -> Path:
        """Return the folder, made when first asked for."""
        if self._path is None:
            self._remove_left()
            self._parent.mkdir(parents=True, exist_ok=True)
            # one process may have several runs
            mine = f"{self._prefix}{os.getpid()}_"
            self._path = Path(tempfile.mkdtemp(prefix=mine, dir=self._parent))
            # unlike weakref's and atexit's it also runs where a forked process ends
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
    except OSError:  # somebody else's, or a system without /proc
        return True


class Waiting(NamedTuple):
    """A vector that a client remembers from the round's end on."""

    name: str  # what it is
    client: int  # whose
    size: int  # k
    dtype: torch.dtype  # of its numbers


class RunMemory:
    """The clients' memory of one fit.

    Every process has all of it, because a client may train in another one the next time.

    Attributes:
        clients: the memory itself.
    """

    def __init__(self, trainer: Trainer, ranks: Ranks, ram_bytes: float) -> None:
        self._trainer, self._ranks = trainer, ranks
        root = str(trainer.default_root_dir)
        parent = Path(tempfile.gettempdir() if "://" in root else root)
        self.clients = ClientMemory(ram_bytes, WorkingFolder(parent))

    def waiting(self) -> list[Waiting]:
        """Owners, sizes and types of this process's memories that wait to be shared."""
        vectors = self.clients.waiting().items()
        return [Waiting(*key, vector.numel(), vector.dtype) for key, vector in vectors]

    def share(self, waiting: Sequence[Sequence[Waiting]], device: torch.device) -> None:
        """Share the clients' memories of this round among all processes.

        To be called by all of them. The vectors travel one after the other, so that no process
        holds them all in RAM.

        Args:
            waiting: of every process, in order of rank.
            device: on which tensors travel.
        """
        own = self.clients.waiting()
        for rank, name, client, size, dtype in (
            (rank, *each) for rank, all_of_it in enumerate(waiting) for each in all_of_it
        ):
            if rank == self._ranks.rank:
                self._ranks.broadcast(own[name, client].to(device), source=rank)
                continue
            vector = torch.empty(size, dtype=dtype, device=device)
            self._ranks.broadcast(vector, source=rank)
            self.clients.put(name, client, vector)

    def files_of_checkpoint(self) -> Sequence[VectorFile]:
        """Return the files to which the last `state_dict` refers."""
        return self.clients.files_of_checkpoint

    def state_dict(self) -> dict[str, Any]:
        """Return the memories, or where they are; of several processes one writes it."""
        if self._ranks.rank > 0:
            return {}
        beside = isinstance(self._trainer.strategy.checkpoint_io, AtomicCheckpointIO)
        return self.clients.state_dict(inside=not beside)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the memories of a checkpoint, whose files lie beside it.

        Raises:
            ConfigurationError: if they do not.
        """
        if state:
            folder = _folder(self._trainer.ckpt_path)
            self.clients.load_state_dict(state, folder, adopt=True)


def saved_memory(state: Mapping[str, Any], path: str | Path | None) -> ClientMemory:
    """Return the memories of a checkpoint, to be read.

    Raises:
        ConfigurationError: if they are not.
    """
    memory = ClientMemory()
    if state:
        memory.load_state_dict(state, _folder(path))
    return memory


def _folder(path: str | Path | None) -> Path | None:
    return None if path is None else memory_folder(Path(path).resolve())  # it may be a link
