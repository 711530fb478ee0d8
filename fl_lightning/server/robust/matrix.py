"""The updates of a round as a matrix with one row per update, for robust rules.

Rows are kept in memory up to a limit and in a file beyond it. They are read in blocks of columns, so
that a rule needs memory for one block and its result, for any number of updates. Rows are in
increasing order of the client ids: no rule depends on the order in which updates arrive.

`chosen_rows`, `mixed_rows` and `rows_and_one` are views of other rows; they copy only a block at a time.
"""

from __future__ import annotations

import tempfile
import weakref
from abc import ABC, abstractmethod
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from io import FileIO
from typing import Any, cast

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from typing_extensions import override

from fl_lightning.core.update import ClientUpdate

Floats = npt.NDArray[Any]
Blocks = Iterator[tuple[slice, Floats]]
# size of a block: it, its transpose and the next parts of the rows fit into a core's cache
_BLOCK_BYTES = 2 * 2**20
# the file is memory-mapped, which saves a system call per row of a block, and mapped again after this
# many blocks: until then, the pages read count as this process's memory
_BLOCKS_PER_MAP = 64


class Rows(ABC):
    """A matrix of n vectors (updates) of k numbers, read in blocks of columns to limit memory.

    Attributes:
        num_columns: k.
        dtype: dtype of the numbers, float32 or float64.
        num_examples: number of examples behind each row, shape (n,).
        client_ids: client of each row; empty if rows belong to no single client.
    """

    num_columns: int
    dtype: np.dtype[Any]
    num_examples: Floats
    client_ids: list[int]

    def __len__(self) -> int:
        return len(self.num_examples)

    @abstractmethod
    def blocks(self, rows: Sequence[int] | None = None) -> Blocks:
        """Yield (slice of columns, block): read-only blocks of the matrix, shape (number of rows, width).

        The memory of a block is reused for the next one.

        Args:
            rows: row numbers, in the order of the block; all rows if None.
        """


def block_width(num_rows: int, num_columns: int, itemsize: int) -> int:
    """Return how many columns a block has, ≥ 1, so that it fits into limited memory.

    Example:
        >>> block_width(100, 21_000_000, 4)
        5242
    """
    return min(max(1, num_columns), max(1024, _BLOCK_BYTES // (max(1, num_rows) * itemsize)))


class UpdateRows(Rows):
    """The updates of one round as rows of a matrix; those beyond a memory limit are in a temporary file.

    Args:
        like: a vector with the shape (k,) and device of the updates; half precision is kept as float32.
        memory_limit: bytes of updates to keep in memory.
        folder: folder of the file; the system's temporary folder if None. The file is deleted with
            the rows.

    Example:
        >>> rows = UpdateRows(torch.empty(2), memory_limit=8)  # the second row goes to a file
        >>> for client, delta in ((7, [1.0, 2.0]), (3, [5.0, 6.0])):
        ...     rows.append(ClientUpdate(client, torch.tensor(delta), torch.empty(0), 10, 1))
        >>> rows.client_ids, [block.tolist() for _, block in rows.blocks()]
        ([3, 7], [[[5.0, 6.0], [1.0, 2.0]]])
    """

    def __init__(
        self, like: Tensor, *, memory_limit: int = 2**30, folder: str | None = None
    ) -> None:
        self._like = like
        self._options: dict[str, Any] = {"memory_limit": memory_limit, "folder": folder}
        self.num_columns = like.numel()
        self.dtype = np.dtype(np.float64 if like.dtype == torch.float64 else np.float32)
        self._row_bytes = self.num_columns * self.dtype.itemsize
        self._num_in_memory = memory_limit // max(1, self._row_bytes)
        self.client_ids = []  # increasing
        self._updates: list[ClientUpdate] = []  # in that order, without their deltas
        self._kept: list[Floats | int] = []  # each delta, or its row number in the file
        self._num_in_file = 0
        self._file: FileIO | None = None

    @property
    def num_examples(self) -> Floats:  # type: ignore[override]
        """Number of examples of each row's client, shape (n,)."""
        return np.array([update.num_examples for update in self._updates], dtype=np.float64)

    def __len__(self) -> int:
        return len(self._updates)

    def append(self, update: ClientUpdate) -> None:
        """Add a client's update as a row: a copy of its delta and, always in memory, of its buffers."""
        metrics = {name: value.detach().cpu() for name, value in update.metrics.items()}
        buffers = update.buffers.detach().cpu().clone()
        place = bisect_right(self.client_ids, update.client_id)
        self._kept.insert(place, self._keep(update.delta))
        self.client_ids.insert(place, update.client_id)
        self._updates.insert(
            place, replace(update, delta=torch.empty(0), buffers=buffers, metrics=metrics)
        )

    def _keep(self, delta: Tensor) -> Floats | int:
        """Return a copy of a delta, or write it to the temporary file and return its index there."""
        row: Floats = delta.detach().cpu().numpy().astype(self.dtype, copy=True)
        if len(self) < self._num_in_memory:
            return row
        if self._file is None:
            folder = self._options["folder"]
            file = tempfile.TemporaryFile(buffering=0, dir=folder)  # noqa: SIM115 - see below
            self._file = file
            weakref.finalize(self, file.close)
        self._file.seek(self._num_in_file * self._row_bytes)
        rest = row.data.cast("B")
        while rest:  # a call writes 2 GB at most
            rest = rest[self._file.write(rest) :]
        self._num_in_file += 1
        return self._num_in_file - 1

    @override
    def blocks(self, rows: Sequence[int] | None = None) -> Blocks:
        chosen = range(len(self)) if rows is None else rows
        width = block_width(len(chosen), self.num_columns, self.dtype.itemsize)
        buffer = np.empty((len(chosen), width), self.dtype)
        for number, begin in enumerate(range(0, self.num_columns, width)):
            if number % _BLOCKS_PER_MAP == 0:
                sources = self._sources(chosen)
            columns = slice(begin, min(begin + width, self.num_columns))
            # contiguous also where the last block is narrower
            block = buffer.reshape(-1)[: len(chosen) * (columns.stop - begin)]
            block = block.reshape(len(chosen), -1)
            for target, source in zip(block, sources, strict=True):
                target[:] = source[columns]
            yield columns, block

    def _sources(self, rows: Sequence[int]) -> list[Floats]:
        """Return the deltas of some rows, shape (k,) each: arrays in memory, or views of the temporary file."""
        mapped: Any = ()
        if any(isinstance(self._kept[row], int) for row in rows):
            shape = self._num_in_file, self.num_columns
            mapped = np.asarray(np.memmap(cast(Any, self._file), self.dtype, "r+", 0, shape))
        kept = [self._kept[row] for row in rows]
        return [mapped[each] if isinstance(each, int) else each for each in kept]

    def updates(self) -> Iterator[ClientUpdate]:
        """Yield the clients' updates in increasing order of client ids."""
        device = self._like.device
        for place, update in enumerate(self._updates):
            delta = torch.from_numpy(self._row(place)).to(device, self._like.dtype)
            yield replace(update, delta=delta, buffers=update.buffers.to(device))

    def buffer_rows(self) -> UpdateRows:
        """Return a matrix whose rows are the updates' buffers."""
        like = self._updates[0].buffers if self._updates else torch.empty(0)
        rows = UpdateRows(like)
        for update in self._updates:
            rows.append(replace(update, delta=update.buffers))
        return rows

    def _row(self, place: int) -> Floats:
        [source] = self._sources([place])
        row: Floats = source.copy()
        return row

    def exchange(
        self, gather: Callable[[Any], list[Any]], all_reduce: Callable[[Tensor], None]
    ) -> UpdateRows:
        """Return a matrix with the updates of all processes; every process must call this.

        One update is sent at a time, as a sum to which the other processes contribute zeros.

        Args:
            gather: returns one value per process.
            all_reduce: replaces a vector by its sum over processes.
        """
        mine: dict[int, list[int]] = {}
        for place, update in enumerate(self._updates):
            mine.setdefault(update.client_id, []).append(place)
        everyone = UpdateRows(self._like, **self._options)
        for update in (update for updates in gather(self._updates) for update in updates):
            vector = torch.zeros_like(self._like)
            if places := mine.get(update.client_id):  # a client trains in one process
                vector.copy_(torch.from_numpy(self._row(places.pop(0))))
            all_reduce(vector)
            everyone.append(replace(update, delta=vector))
        return everyone


class _View(Rows):
    """A matrix whose blocks are computed from another matrix when they are read."""

    def __init__(
        self,
        rows: Rows,
        blocks: Callable[[Sequence[int] | None], Blocks],
        num_examples: Floats,
        client_ids: Sequence[int] = (),
    ) -> None:
        self.num_columns, self.dtype, self._blocks = rows.num_columns, rows.dtype, blocks
        self.num_examples, self.client_ids = num_examples, list(client_ids)

    @override
    def blocks(self, rows: Sequence[int] | None = None) -> Blocks:
        return self._blocks(rows)


def chosen_rows(rows: Rows, places: Sequence[int]) -> Rows:
    """Return the matrix of the rows with these numbers."""
    clients = [rows.client_ids[place] for place in places]

    def blocks(some: Sequence[int] | None) -> Blocks:
        return rows.blocks(list(places) if some is None else [places[row] for row in some])

    return _View(rows, blocks, rows.num_examples[list(places)], clients)


def mixed_rows(rows: Rows, matrix: Floats) -> Rows:
    """Return the matrix of mixtures y_i = Σ_j M_ij x_j of the rows x_j, with M of shape (m, n)."""

    def blocks(some: Sequence[int] | None) -> Blocks:
        mixed = (matrix if some is None else matrix[list(some)]).astype(rows.dtype)
        for columns, block in rows.blocks():
            yield columns, mixed @ block

    return _View(rows, blocks, matrix @ rows.num_examples)


def rows_and_one(rows: Rows, last: Floats) -> Rows:
    """Return the matrix with one more vector, shape (k,), as its last row, of 0 examples."""

    def blocks(some: Sequence[int] | None) -> Blocks:
        for columns, block in rows.blocks():
            whole = np.concatenate([block, last[None, columns].astype(rows.dtype)])
            yield columns, whole if some is None else whole[list(some)]

    return _View(rows, blocks, np.append(rows.num_examples, 0.0))
