"""The shards of all clients as one array, so that a million clients need no million objects.

    indices  [ client 0 … | client 1 … | … ]      starts  [0, n_0, n_0 + n_1, …]

A list of arrays costs some hundred bytes and several microseconds per client, which matters for many
clients.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any, overload

import numpy as np
import numpy.typing as npt

from fl_lightning.core.errors import ConfigurationError

Indices = npt.NDArray[np.int64]

BLOCK = 2**16  # indices per block, in operations that need temporary memory per index


class FlatShards(Sequence[Indices]):
    """One index array per client, concatenated in a single array; reads like a list of arrays.

    It needs 4 bytes per index, 8 if one is beyond 2**31, and 16 bytes per client.

    Args:
        indices: examples of client 0, then those of client 1, …: integers ≥ 0, shape (M,). Clients may
            share examples.
        sizes: number of examples of each client, ≥ 0, shape (num_clients,).

    Raises:
        ConfigurationError: if ``sizes`` do not sum to M, or a number is negative.

    Attributes:
        indices: int32 or int64, shape (M,).
        sizes: int64, shape (num_clients,).
        starts: first position of each client's part, and M; int64, shape (num_clients + 1,).

    Example:
        >>> shards = FlatShards(np.array([4, 0, 2]), sizes=np.array([2, 0, 1]))
        >>> len(shards), shards[0], shards[-1]
        (3, array([4, 0]), array([2]))
        >>> every_window = np.arange(4)[:, None] + np.arange(3)  # four clients that overlap
        >>> FlatShards(every_window.ravel(), np.full(4, 3))[1]
        array([1, 2, 3])
    """

    def __init__(self, indices: npt.NDArray[Any], sizes: npt.NDArray[Any]) -> None:
        self.sizes = np.asarray(sizes).astype(np.int64, copy=False)
        self.starts = np.zeros(len(self.sizes) + 1, np.int64)
        np.cumsum(self.sizes, out=self.starts[1:])
        if self.starts[-1] != len(indices) or self.sizes.min(initial=0) < 0:
            raise ConfigurationError(
                f"sizes must be at least 0 and sum to the number of indices, {len(indices)}, got "
                f"{len(self.sizes)} sizes from {self.sizes.min(initial=0)} that sum to "
                f"{self.starts[-1]}"
            )
        if indices.min(initial=0) < 0:
            raise ConfigurationError(f"indices must be at least 0, got {indices.min()}")
        narrow = indices.max(initial=0) < 2**31
        self.indices = indices.astype(np.int32 if narrow else np.int64, copy=False)

    @staticmethod
    def of(shards: Sequence[npt.NDArray[Any]]) -> FlatShards:
        """Convert a sequence of index arrays; `FlatShards` are returned unchanged.

        Example:
            >>> FlatShards.of([np.array([4, 0]), np.array([2])]).indices.tolist()
            [4, 0, 2]
        """
        if isinstance(shards, FlatShards):
            return shards
        sizes = np.fromiter((len(shard) for shard in shards), np.int64, len(shards))
        flat = np.concatenate(shards) if len(shards) else np.empty(0)
        return FlatShards(flat.astype(np.int64, copy=False), sizes)

    def __len__(self) -> int:
        return len(self.sizes)

    @overload
    def __getitem__(self, client: int) -> Indices: ...

    @overload
    def __getitem__(self, client: slice) -> list[Indices]: ...

    def __getitem__(self, client: int | slice) -> Indices | list[Indices]:
        """Return a client's indices, int64, shape (n,), or a list of several clients'."""
        if isinstance(client, slice):
            return [self[one] for one in range(len(self))[client]]
        one = range(len(self))[client]  # IndexError past the end, -1 is the last
        return self.indices[self.starts[one] : self.starts[one + 1]].astype(np.int64, copy=False)

    def take(self, clients: Sequence[int]) -> tuple[Indices, Indices]:
        """Return the concatenated indices of several clients, and the number of each.

        Several times as fast as one client after the other.

        Example:
            >>> shards = FlatShards(np.array([4, 0, 2]), sizes=np.array([2, 0, 1]))
            >>> shards.take([2, 0])
            (array([2, 4, 0]), array([1, 2]))
        """
        chosen = np.asarray(clients, np.int64)
        sizes = self.sizes[chosen]
        ends = np.cumsum(sizes)
        places = np.arange(sizes.sum()) + np.repeat(
            self.starts[:-1][chosen] - (ends - sizes), sizes
        )
        return self.indices[places].astype(np.int64, copy=False), sizes

    def __repr__(self) -> str:
        return f"<{len(self)} shards of {len(self.indices)} examples>"

    def blocks(self) -> Iterator[tuple[int, int]]:
        """Yield ranges (first client, client after the last) of about `BLOCK` indices each.

        Example:
            >>> list(FlatShards(np.zeros(3 * BLOCK, int), np.full(3, BLOCK)).blocks())
            [(0, 1), (1, 2), (2, 3)]
        """
        cuts = np.searchsorted(self.starts, np.arange(0, len(self.indices), BLOCK))
        yield from pairwise(np.unique([0, *cuts, len(self)]).tolist())
