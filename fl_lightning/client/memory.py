"""Vectors that clients keep from round to round, e.g. SCAFFOLD's control variates, by name and client.

They are stored in RAM up to a limit, and beyond it in memory-mapped files. A vector that is stored during
a round replaces the former one at the end of the round, so a round that fails changes nothing.

A file's name is a hash of its content, BLAKE2b(dtype, bytes), and a file is never changed. So an existing
file need not be written again, and a damaged or exchanged file is detected.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from hashlib import blake2b
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from fl_lightning.core.errors import ConfigurationError

Key = tuple[str, int]  # name and client id
# Vectors of up to this total size are stored in the checkpoint's own file, more in files beside it.
INSIDE_CHECKPOINT_BYTES = 64 * 2**20


@dataclass(frozen=True)
class _Entry:
    """A client's stored vector: in RAM, in a file, or both.

    Attributes:
        vector: the vector in RAM, or None.
        file: the file with the vector, or None.
        is_checked: whether the file's content has been verified.
    """

    vector: Tensor | None
    file: VectorFile | None = None
    is_checked: bool = True

    @property
    def num_bytes(self) -> int:
        if self.vector is not None:
            return self.vector.nbytes
        return 0 if self.file is None else self.file.num_bytes

    def read(self) -> Tensor:
        if self.vector is not None:
            return self.vector
        assert self.file is not None
        return self.file.read()


class ClientMemory:
    """Vectors that are kept for each client between rounds, e.g. control variates; large ones are kept in files.

    Args:
        ram_bytes: largest total size in bytes of vectors in RAM; further vectors are written to files.
        folder: returns the folder of the files, which are deleted when they are not needed any more.

    Attributes:
        files_of_checkpoint: files that the last `state_dict` refers to.

    Example:
        >>> memory = ClientMemory()
        >>> memory.put("control variate", 3, torch.ones(2))
        >>> memory.get("control variate", 3) is None
        True
        >>> memory.commit()
        >>> memory.get("control variate", 3)
        tensor([1., 1.])
    """

    def __init__(
        self, ram_bytes: float = float("inf"), folder: Callable[[], Path] = Path.cwd
    ) -> None:
        self._ram_bytes, self._folder = ram_bytes, folder
        self._present: dict[Key, _Entry] = {}
        self._new: dict[Key, _Entry] = {}
        self._own_files: set[VectorFile] = set()
        self._in_ram = 0
        self.files_of_checkpoint: list[VectorFile] = []

    def get(self, name: str, client: int) -> Tensor | None:
        """Return a client's vector, on the CPU and read-only; None if the client has none.

        Raises:
            ConfigurationError: if the vector's file, from a checkpoint, is damaged.
        """
        key = name, client
        entry = self._present.get(key)
        if entry is None:
            return None
        if not entry.is_checked and entry.file is not None:
            entry.file.check()
            self._present[key] = replace(entry, is_checked=True)
        return entry.read()

    def put(self, name: str, client: int, vector: Tensor) -> None:
        """Store a client's new vector, shape (k,); `get` returns the former one until the next `commit`."""
        self._forget(self._new.pop((name, client), None))
        self._new[name, client] = self._stored(vector)

    def waiting(self) -> dict[Key, Tensor]:
        """Return the vectors that `commit` has not made current yet, by (name, client)."""
        return {key: entry.read() for key, entry in self._new.items()}

    @property
    def waiting_clients(self) -> frozenset[int]:
        """Ids of the clients with a new vector that `commit` has not made current yet."""
        return frozenset(client for _, client in self._new)

    def discard(self, client: int | None = None) -> None:
        """Discard the new vectors put since the last `commit`: those of one client, or all."""
        for key in [key for key in self._new if client in (None, key[1])]:
            self._forget(self._new.pop(key))
        self._delete_unused()

    def commit(self, client: int | None = None) -> None:
        """Make the vectors put since the last `commit` the current ones, for one client or for all."""
        for key in [key for key in self._new if client in (None, key[1])]:
            self._forget(self._present.get(key))
            self._present[key] = self._new.pop(key)
        self._delete_unused()

    def relocate(self, name: str, positions: Tensor) -> None:
        """Reorder the entries of all current vectors with this name, after masks have changed.

        Args:
            name: name of the vectors.
            positions: former index of each entry, shape (k',); -1 for a new entry, which is 0.
        """
        positions = positions.cpu()
        is_known, known = positions >= 0, positions.clamp(min=0)
        for key in [key for key in self._present if key[0] == name]:
            vector = self.get(*key)
            assert vector is not None
            moved = torch.where(is_known, vector[known], 0)
            del vector
            self._forget(self._present.pop(key))
            self._present[key] = self._stored(moved)
        self._delete_unused()

    def forget(self, name: str) -> None:
        """Delete all clients' vectors with this name."""
        for entries in (self._present, self._new):
            for key in [key for key in entries if key[0] == name]:
                self._forget(entries.pop(key))
        self._delete_unused()

    def state_dict(self, *, inside: bool = True) -> dict[str, Any]:
        """Return the current vectors for a checkpoint, or the names of the files that hold them.

        Args:
            inside: return the vectors themselves. If false and they exceed 64 MB, those in RAM are written
                to files as well, and the names of the files are returned.
        """
        self.files_of_checkpoint = []
        num_bytes = sum(entry.num_bytes for entry in self._present.values())
        if inside or num_bytes <= INSIDE_CHECKPOINT_BYTES:
            return {"present": _contents(self._present)}
        return {"present": self._written(self._present)}

    def state_with_waiting(self) -> dict[str, Any]:
        """Return the current vectors and the uncommitted ones, for a site's own checkpoint."""
        return {"present": _contents(self._present), "new": _contents(self._new)}

    @property
    def is_empty(self) -> bool:
        """True if no vector is stored."""
        return not self._present and not self._new

    def load_state_dict(
        self, state: Mapping[str, Any], folder: Path | None = None, *, adopt: bool = False
    ) -> None:
        """Restore a state from `state_dict` or `state_with_waiting`.

        Args:
            state: the saved state.
            folder: folder of the files that the state names.
            adopt: link these files into this object's own folder, so that they outlive the checkpoint.

        Raises:
            ConfigurationError: if a file is missing or has another length.
        """
        self._in_ram = 0
        self._present = self._loaded(state["present"], folder, adopt=adopt)
        self._new = self._loaded(state.get("new", []), folder, adopt=adopt)
        self._delete_unused()

    def _stored(self, vector: Tensor) -> _Entry:
        vector = vector.detach().cpu()
        if self._in_ram + vector.nbytes <= self._ram_bytes or not vector.numel():
            self._in_ram += vector.nbytes
            whole = vector.untyped_storage().nbytes() == vector.nbytes
            return _Entry(vector if whole else vector.clone())
        return _Entry(None, self._write(vector))

    def _forget(self, entry: _Entry | None) -> None:
        if entry is not None and entry.vector is not None:
            self._in_ram -= entry.vector.nbytes

    def _write(self, vector: Tensor) -> VectorFile:
        file = VectorFile.write(vector, self._folder())
        self._own_files.add(file)
        return file

    def _written(self, entries: dict[Key, _Entry]) -> list[tuple[str, int, str, str, int]]:
        for key, entry in entries.items():
            if entry.file is None and entry.vector is not None:
                entries[key] = replace(entry, file=self._write(entry.vector))
        files = [(key, entry.file) for key, entry in entries.items() if entry.file is not None]
        self.files_of_checkpoint += [file for _, file in files]
        return [(*key, file.path.name, file.dtype, file.size) for key, file in files]

    def _loaded(self, saved: list[Any], folder: Path | None, *, adopt: bool) -> dict[Key, _Entry]:
        entries: dict[Key, _Entry] = {}
        for name, client, *what in saved:
            if len(what) == 1:
                entries[name, client] = self._stored(what[0])
                continue
            file = VectorFile((folder or Path()) / what[0], what[1], what[2])
            if not file.is_whole:
                file.check()  # says what is wrong
            if adopt:
                file = file.linked(self._folder())
                self._own_files.add(file)
            entries[name, client] = _Entry(None, file, is_checked=False)
        return entries

    def _delete_unused(self) -> None:
        entries = [*self._present.values(), *self._new.values()] if self._own_files else []
        for file in self._own_files - {entry.file for entry in entries}:
            file.path.unlink(missing_ok=True)
            self._own_files.discard(file)


SUFFIX = ".vector"


@dataclass(frozen=True)
class VectorFile:
    """A file that holds one client's vector.

    Attributes:
        path: path of the file.
        dtype: torch's name of the dtype, e.g. ``float32``.
        size: number of elements k.

    Example:
        >>> import tempfile
        >>> file = VectorFile.write(torch.tensor([1.0, 2.0]), Path(tempfile.mkdtemp()))
        >>> file.check()
        >>> file.read()
        tensor([1., 2.])
    """

    path: Path
    dtype: str
    size: int

    @classmethod
    def write(cls, vector: Tensor, folder: Path) -> VectorFile:
        """Write a vector of shape (k,), k ≥ 1, unless its file exists, and return the file."""
        content = vector.detach().cpu().contiguous().view(torch.uint8).numpy()
        dtype = str(vector.dtype).removeprefix("torch.")
        file = cls(folder / f"{_digest(dtype, content)}{SUFFIX}", dtype, vector.numel())
        if not file.is_whole:
            folder.mkdir(parents=True, exist_ok=True)
            unfinished = file.path.with_suffix(".unfinished")
            content.tofile(unfinished)
            os.replace(unfinished, file.path)
        return file

    @property
    def num_bytes(self) -> int:
        """Length of the file in bytes."""
        itemsize: int = getattr(torch, self.dtype).itemsize
        return self.size * itemsize

    @property
    def is_whole(self) -> bool:
        """True if the file exists and has the expected length."""
        return self.path.is_file() and self.path.stat().st_size == self.num_bytes

    def linked(self, folder: Path) -> VectorFile:
        """Hard-link or copy the file into another folder, and return the `VectorFile` there."""
        there = replace(self, path=folder / self.path.name)
        if not there.is_whole:
            folder.mkdir(parents=True, exist_ok=True)
            unfinished = there.path.with_suffix(".unfinished")
            unfinished.unlink(missing_ok=True)
            try:
                os.link(self.path, unfinished)
            except OSError:  # another file system, or one without links
                shutil.copyfile(self.path, unfinished)
            with unfinished.open("rb+") as stream:
                os.fsync(stream.fileno())
            os.replace(unfinished, there.path)
        return there

    def read(self) -> Tensor:
        """Return the memory-mapped vector, whose pages are read on access."""
        # copy on write: torch warns of memory that is read-only
        content = np.memmap(self.path, dtype=np.uint8, mode="c")
        return torch.from_numpy(content).view(getattr(torch, self.dtype))

    def check(self) -> None:
        """Raise ConfigurationError if the file is missing, or its content does not match its name."""
        if not self.is_whole:
            state = "has another length" if self.path.exists() else "is missing"
            raise ConfigurationError(
                f"the checkpoint refers to {self.path}, a file with a client's state, which {state}: "
                f"move a checkpoint together with the folder {self.path.parent.name} beside it"
            )
        content = np.memmap(self.path, dtype=np.uint8, mode="r")
        if _digest(self.dtype, content) != self.path.stem:
            raise ConfigurationError(
                f"the checkpoint refers to {self.path}, a file with a client's state, which was changed or "
                "damaged: resume from another checkpoint"
            )


def _contents(entries: Mapping[Key, _Entry]) -> list[tuple[str, int, Tensor]]:
    return [(*key, entry.read()) for key, entry in entries.items()]


def _digest(dtype: str, content: npt.NDArray[np.uint8]) -> str:
    return blake2b(content.data, digest_size=16, person=dtype.encode()[:16]).hexdigest()
