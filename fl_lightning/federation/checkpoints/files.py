"""Checkpoints that are whole or not there, whenever the process is killed.

Lightning writes to the system's temporary folder and moves the file. Where that folder lies on
another file system, as on most clusters, moving means copying: a process killed meanwhile leaves
half of ``last.ckpt`` in place of the whole one before it.

No kill can split what is written here, but a disk can lose it: beside ``last.ckpt`` stays
``previous.ckpt``, the one before.

Large client memories are files beside the checkpoints that refer to them, in ``client_memory``. They are
hard links to those that the run works with, so that nothing is copied and what did not change is not
written again. ``references.json`` says which checkpoint needs which files; what none needs is deleted.
"""

from __future__ import annotations

import json
import os
import shutil
import socket
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from multiprocessing.util import Finalize
from pathlib import Path
from typing import Any

import torch
from lightning.fabric.plugins.io.torch_io import TorchCheckpointIO
from typing_extensions import override

from fl_lightning.client.memory import SUFFIX, VectorFile
from fl_lightning.core.errors import CheckpointFailure, ConfigurationError

LAST = "last.ckpt"
PREVIOUS = "previous.ckpt"
FOLDER = "client_memory"
_REFERENCES = "references.json"


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


def owned(prefix: str) -> str:
    """Return the beginning of a name that says which process it belongs to, for `remove_left`."""
    return f"{prefix}{socket.gethostname()}_{os.getpid()}_"


def remove_left(parent: Path, prefix: str) -> None:
    """Remove the files and folders that killed processes of this machine have left, see `owned`."""
    host = f"{prefix}{socket.gethostname()}_"  # no name of a machine has a _
    for left in parent.glob(f"{host}*"):
        process, *_ = left.name.removeprefix(host).split("_")
        if process.isdigit() and not _is_running(int(process)):
            if left.is_dir():
                shutil.rmtree(left, ignore_errors=True)
            else:
                left.unlink(missing_ok=True)


class WorkingFolder:
    """Folder of one process, removed with this or after a ``with``; a killed one's by the next."""

    def __init__(self, parent: Path, prefix: str = ".client_memory-") -> None:
        self._parent, self._prefix = parent, prefix
        self._path: Path | None = None
        self._remove: Callable[[], Any] | None = None

    def __call__(self) -> Path:
        """Return the folder, made when first asked for."""
        if self._path is None:
            remove_left(self._parent, self._prefix)
            self._parent.mkdir(parents=True, exist_ok=True)
            # one process may have several runs
            self._path = Path(tempfile.mkdtemp(prefix=owned(self._prefix), dir=self._parent))
            # unlike weakref's and atexit's it also runs where a forked process ends
            self._remove = Finalize(self, shutil.rmtree, (self._path, True), exitpriority=0)
        return self._path

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


def place(files: Iterable[VectorFile], checkpoint: Path) -> None:
    """Place files beside a checkpoint that is about to be written.

    Until `tidy` those of the checkpoint that it replaces stay.
    """
    folder = checkpoint.parent / FOLDER
    names = {file.path.name for file in files}
    references = _read_references(folder)
    if not names and not references:
        return
    folder.mkdir(parents=True, exist_ok=True)
    hold(checkpoint, names)
    for file in files:
        _link(file.path, folder / file.path.name)


def names_of(checkpoint: Path) -> list[str]:
    """Return the names of the files to which a checkpoint refers."""
    return _read_references(checkpoint.parent / FOLDER).get(checkpoint.name, [])


def hold(checkpoint: Path, names: Iterable[str]) -> None:
    """Keep files, besides its own, for a checkpoint that will refer to them; see `tidy`."""
    folder = checkpoint.parent / FOLDER
    references = _read_references(folder)
    if wanted := {*names, *references.get(checkpoint.name, [])}:
        _write_references(folder, references | {checkpoint.name: sorted(wanted)})


def tidy(checkpoint: Path, names: Iterable[str] = ()) -> None:
    """Delete the files that no checkpoint of the folder needs any more."""
    folder = checkpoint.parent / FOLDER
    if not folder.is_dir():
        return
    references = _read_references(folder) | {checkpoint.name: sorted(names)}
    kept = {name: files for name, files in references.items() if files}
    kept = {name: files for name, files in kept.items() if (checkpoint.parent / name).exists()}
    _write_references(folder, kept)
    needed = {file for files in kept.values() for file in files}
    for path in folder.glob(f"*{SUFFIX}"):
        if path.name not in needed:
            path.unlink(missing_ok=True)
    for unfinished in folder.glob("*.unfinished"):  # of a run that was killed
        unfinished.unlink(missing_ok=True)


def _link(source: Path, target: Path) -> None:
    if target.exists():
        return
    try:
        os.link(source, target)
    except OSError:  # another file system, or one without links
        unfinished = target.with_suffix(".unfinished")
        shutil.copyfile(source, unfinished)
        os.replace(unfinished, target)


def _read_references(folder: Path) -> dict[str, list[str]]:
    path = folder / _REFERENCES
    if not path.is_file():
        return {}
    references: dict[str, list[str]] = json.loads(path.read_text())
    return references


def _write_references(folder: Path, references: dict[str, list[str]]) -> None:
    unfinished = folder / f".{_REFERENCES}.unfinished"
    unfinished.write_text(json.dumps(references, indent=0))
    os.replace(unfinished, folder / _REFERENCES)
