"""Memories of clients from round to round: vectors by name and client.

They are kept in RAM up to a limit, and beyond it in files that are mapped into memory. What is put
during a round counts from its end on, so that a round that fails or is trained again changes
nothing.

A vector's file is named after its content, BLAKE2b(dtype, bytes), and is never changed. So a file that is there need not be written again, one that is damaged or another's is found out,
and a later version cannot take an earlier one's place.
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

Key = tuple[str, int]
# So much is kept inside a checkpoint, which then is one file; more lies in files beside it.
INSIDE_CHECKPOINT_BYTES = 64 * 2**20


@dataclass(frozen=True)
class _Entry:
    """Where a vector is: in RAM, in a file, or both.

    Attributes:
        vector: in RAM.
        file: with the same content.
        is_checked: whether the file is known to hold it.
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
    """The memories of all clients.

    Args:
        ram_bytes: of vectors in RAM at most; those that come later go to disk.
        folder: gives the folder for files, when the first is written. Files in it are deleted when
            they are not needed any more.

    Attributes:
        files_of_checkpoint: to which the last `state_dict` refers.

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
        """Memory of a client, on the CPU and not to be changed; None if it has none.

        Raises:
            ConfigurationError: if it is in a file that came with a checkpoint and is damaged.
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
        """Store a vector of a client, shape (k,); it counts from the next `commit` on."""
        self._forget(self._new.pop((name, client), None))
        self._new[name, client] = self._stored(vector)

    def waiting(self) -> dict[Key, Tensor]:
        """Memories that were put since the last `commit`."""
        return {key: entry.read() for key, entry in self._new.items()}

    @property
    def waiting_keys(self) -> frozenset[Key]:
        """Keys of the memories that were put since the last `commit`."""
        return frozenset(self._new)

    def discard(self, keep: frozenset[Key] = frozenset()) -> None:
        """Discard the memories that were put since the last `commit`, except some."""
        for key in self._new.keys() - keep:
            self._forget(self._new.pop(key))
        self._delete_unused()

    def commit(self, client: int | None = None) -> None:
        """Make stored vectors count, of one client or of all."""
        for key in [key for key in self._new if client in (None, key[1])]:
            self._forget(self._present.get(key))
            self._present[key] = self._new.pop(key)
        self._delete_unused()

    def relocate(self, name: str, positions: Tensor) -> None:
        """Move the vectors of a name to new coordinates; new entries are 0.

        Args:
            name: whose.
            positions: where each new coordinate was, -1 where it was not, shape (k',).
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
        """Drop all that is remembered under a name."""
        for entries in (self._present, self._new):
            for key in [key for key in entries if key[0] == name]:
                self._forget(entries.pop(key))
        self._delete_unused()

    def state_dict(self, *, inside: bool = True) -> dict[str, Any]:
        """Return all that was committed, or where it is if it is large.

        Args:
            inside: return all of them, however large. Else, if they are more than 64 MB, all are in
                files, of which those that are not there yet are written.
        """
        self.files_of_checkpoint = []
        if inside or self.is_small:
            return {"present": _contents(self._present)}
        return {"present": self._written(self._present)}

    def state_with_waiting(self) -> dict[str, Any]:
        """Return all that was committed, and what was put since: at a site it may count yet."""
        return {"present": _contents(self._present), "new": _contents(self._new)}

    @property
    def is_empty(self) -> bool:
        """True if no client has a memory."""
        return not self._present and not self._new

    @property
    def is_small(self) -> bool:
        """True if all committed vectors fit inside a checkpoint."""
        return sum(e.num_bytes for e in self._present.values()) <= INSIDE_CHECKPOINT_BYTES

    def load_state_dict(
        self, state: Mapping[str, Any], folder: Path | None = None, *, adopt: bool = False
    ) -> None:
        """Restore a state from `state_dict` or `state_with_waiting`.

        Args:
            state: from there.
            folder: where files are.
            adopt: link them into the memory's own folder, where they outlive the checkpoint.

        Raises:
            ConfigurationError: if one is missing or of another length.
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
    """Where a vector is.

    Attributes:
        path: of the file.
        dtype: the name that torch has for it, e.g. ``float32``.
        size: k.

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
        """Write a vector of shape (k,), k ≥ 1, unless it is there, and return where it is."""
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
        """True if the file exists and has the right length."""
        return self.path.is_file() and self.path.stat().st_size == self.num_bytes

    def linked(self, folder: Path) -> VectorFile:
        """Return the same file in another folder, by a hard link or a copy, safely on the disk."""
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
        """Return the vector, mapped into memory: its pages are read when they are needed."""
        # copies what would be changed, so that torch does not warn of memory it may not write to
        content = np.memmap(self.path, dtype=np.uint8, mode="c")
        return torch.from_numpy(content).view(getattr(torch, self.dtype))

    def check(self) -> None:
        """Refuse another content than the name says.

        Raises:
            ConfigurationError: if the file is missing or holds something else.
        """
        if not self.is_whole:
            state = "of another length" if self.path.exists() else "missing"
            raise ConfigurationError(
                f"{self.path}, in which the checkpoint keeps what a client remembers, is {state}: "
                f"move a checkpoint together with the folder {self.path.parent.name} beside it"
            )
        content = np.memmap(self.path, dtype=np.uint8, mode="r")
        if _digest(self.dtype, content) != self.path.stem:
            raise ConfigurationError(
                f"{self.path}, in which the checkpoint keeps what a client remembers, holds "
                "something else: it was changed or damaged; resume from another checkpoint"
            )


def _contents(entries: Mapping[Key, _Entry]) -> list[tuple[str, int, Tensor]]:
    return [(*key, entry.read()) for key, entry in entries.items()]


def _digest(dtype: str, content: npt.NDArray[np.uint8]) -> str:
    return blake2b(content.data, digest_size=16, person=dtype.encode()[:16]).hexdigest()
