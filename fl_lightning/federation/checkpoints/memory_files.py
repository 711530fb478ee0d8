"""Files of large client memories beside the checkpoints that refer to them.

A checkpoint in a folder finds its files in ``client_memory`` there. They are hard links to those
that the run works with, so that nothing is copied and what did not change is not written again.
``references.json`` says which checkpoint needs which files; what none needs is deleted.
"""

from __future__ import annotations

import json
import os
import shutil
import socket
import tempfile
from collections.abc import Callable, Iterable
from multiprocessing.util import Finalize
from pathlib import Path
from typing import Any

from fl_lightning.client.vector_file import SUFFIX, VectorFile

FOLDER = "client_memory"
_REFERENCES = "references.json"


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
    """Folder of one process, removed with this or after a ``with``; a killed one's by the next.

    Args:
        parent: in which it will be.
        prefix: of its name.
    """

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
    """Have files beside a checkpoint that is about to be written.

    Until `tidy` those of the checkpoint that it replaces stay.

    Args:
        files: that it refers to.
        checkpoint: its path.
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
    """Have files stay, besides its own, for a checkpoint that will refer to them; see `tidy`."""
    folder = checkpoint.parent / FOLDER
    references = _read_references(folder)
    if wanted := {*names, *references.get(checkpoint.name, [])}:
        _write_references(folder, references | {checkpoint.name: sorted(wanted)})


def tidy(checkpoint: Path, names: Iterable[str] = ()) -> None:
    """Delete the files that no checkpoint of the folder needs any more.

    Args:
        checkpoint: that was written or removed just now.
        names: of the files that it refers to.
    """
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
