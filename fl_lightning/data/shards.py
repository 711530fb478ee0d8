"""Examples of each client (shards), and the batches of local training.

A client's shard is a list of indices into one data set that all clients share: no data are copied, and
no loader is started per client. Batches are drawn from a shuffled shard, epoch after epoch. One array
contains the shards of all clients, so that a million clients do not need a million objects:

    indices  [ client 0 … | client 1 … | … ]      starts  [0, n_0, n_0 + n_1, …]
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from typing import Any, overload

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from fl_lightning.core.errors import ConfigurationError
from fl_lightning.core.seeds import Integers, Words

BLOCK = 2**16  # indices per block, in operations that need temporary memory per index


class FlatShards(Sequence[Tensor]):
    """Indices of every client's examples in one array; behaves like a list with one index tensor per client.

    It needs 4 bytes per index, 8 if one is beyond 2**31, and 16 bytes per client.

    Args:
        indices: examples of client 0, then those of client 1, …: integers ≥ 0, shape (M,). Clients may
            share examples.
        sizes: number of examples of each client, ≥ 0, shape (num_clients,).

    Raises:
        ConfigurationError: if ``sizes`` do not sum to M, or a number is negative.

    Attributes:
        indices: int32 or int64, shape (M,).
        num_examples: number of examples of each client, int64, shape (num_clients,).
        starts: first position of each client's part, and M; int64, shape (num_clients + 1,).

    Example:
        >>> shards = FlatShards(np.array([4, 0, 2]), sizes=np.array([2, 0, 1]))
        >>> len(shards), shards[0], shards[-1]
        (3, tensor([4, 0]), tensor([2]))
        >>> every_window = np.arange(4)[:, None] + np.arange(3)  # four clients that overlap
        >>> FlatShards(every_window.ravel(), np.full(4, 3))[1]
        tensor([1, 2, 3])
    """

    def __init__(self, indices: npt.NDArray[Any], sizes: npt.NDArray[Any]) -> None:
        self.num_examples = np.asarray(sizes).astype(np.int64, copy=False)
        self.starts = np.zeros(len(self.num_examples) + 1, np.int64)
        np.cumsum(self.num_examples, out=self.starts[1:])
        if self.starts[-1] != len(indices) or self.num_examples.min(initial=0) < 0:
            raise ConfigurationError(
                f"sizes must be at least 0 and sum to the number of indices, {len(indices)}, got "
                f"{len(self.num_examples)} sizes from {self.num_examples.min(initial=0)} that sum to "
                f"{self.starts[-1]}"
            )
        if indices.min(initial=0) < 0:
            raise ConfigurationError(f"indices must be at least 0, got {indices.min()}")
        narrow = indices.max(initial=0) < 2**31
        self.indices = indices.astype(np.int32 if narrow else np.int64, copy=False)

    @staticmethod
    def of(shards: Sequence[Any]) -> FlatShards:
        """Convert a list with one index array per client; `FlatShards` are returned unchanged.

        Raises:
            ConfigurationError: if an array does not have whole numbers.

        Example:
            >>> FlatShards.of([np.array([4, 0]), np.array([2])]).indices.tolist()
            [4, 0, 2]
        """
        if isinstance(shards, FlatShards):
            return shards
        sizes = np.fromiter((len(shard) for shard in shards), np.int64, len(shards))
        indices = np.concatenate(shards) if len(shards) else np.empty(0)
        kind = (
            indices.dtype.kind
        )  # an empty list among the arrays makes them floating-point numbers
        whole = indices.astype(np.int64, copy=False) if kind in "iuf" else None
        if whole is None or (kind == "f" and not np.array_equal(whole, indices)):
            raise ConfigurationError(
                f"shards must be indices of examples, whole numbers, got {indices.dtype}: for a mask, use "
                "numpy.flatnonzero"
            )
        return FlatShards(whole, sizes)

    def __len__(self) -> int:
        return len(self.num_examples)

    @overload
    def __getitem__(self, client: int) -> Tensor: ...

    @overload
    def __getitem__(self, client: slice) -> list[Tensor]: ...

    def __getitem__(self, client: int | slice) -> Tensor | list[Tensor]:
        """Return a client's indices, int64 of shape (n,); for a slice, a list of several clients' indices."""
        if isinstance(client, slice):
            return [self[one] for one in range(len(self))[client]]
        one = range(len(self))[client]  # IndexError past the end, -1 is the last
        own = self.indices[self.starts[one] : self.starts[one + 1]]
        return torch.from_numpy(own.astype(np.int64, copy=False))

    def take(self, clients: Sequence[int] | Integers) -> tuple[Tensor, Integers]:
        """Return the concatenated example indices of several clients, and how many each client has.

        This is several times as fast as a loop over the clients.

        Example:
            >>> shards = FlatShards(np.array([4, 0, 2]), sizes=np.array([2, 0, 1]))
            >>> shards.take([2, 0])
            (tensor([2, 4, 0]), array([1, 2]))
        """
        chosen = np.asarray(clients, np.int64)
        sizes = self.num_examples[chosen]
        ends = np.cumsum(sizes)
        places = np.arange(sizes.sum()) + np.repeat(
            self.starts[:-1][chosen] - (ends - sizes), sizes
        )
        return torch.from_numpy(self.indices[places].astype(np.int64, copy=False)), sizes

    def sums_of(self, values: npt.NDArray[Any], option: str) -> Integers:
        """Return the sum of a column over each client's examples, int64 of shape (num_clients,).

        Args:
            values: one whole number ≥ 0 per example of the data set.
            option: name of the option, for errors.

        Raises:
            ConfigurationError: for other values, and if a client's examples sum to 0.

        Example:
            >>> FlatShards(np.array([2, 0, 1]), sizes=np.array([2, 1])).sums_of(np.array([5, 0, 7]), "x")
            Traceback (most recent call last):
            ...
            fl_lightning.core.errors.ConfigurationError: x: the examples of client 1 sum to 0, so that \
its updates would count for nothing: leave its examples out of the data
        """
        if values.ndim != 1 or values.dtype.kind not in "iu" or values.min(initial=0) < 0:
            raise ConfigurationError(
                f"{option} must have one whole number ≥ 0 per example, got {values.dtype} of shape "
                f"{values.shape} with the minimum {values.min(initial=0)}"
            )
        totals = np.concatenate([[0], np.cumsum(values.astype(np.int64)[self.indices])])
        sums: Integers = np.diff(totals[self.starts])
        nothing = np.flatnonzero((sums == 0) & (self.num_examples > 0))
        if len(nothing):
            raise ConfigurationError(
                f"{option}: the examples of client {nothing[0]} sum to 0, so that its updates would count "
                "for nothing: leave its examples out of the data"
            )
        return sums

    def __repr__(self) -> str:
        return f"<{len(self)} shards of {len(self.indices)} examples>"

    def blocks(self) -> Iterator[tuple[int, int]]:
        """Yield ranges of clients, as (first, last + 1), that have about `BLOCK` examples together.

        Example:
            >>> list(FlatShards(np.zeros(3 * BLOCK, int), np.full(3, BLOCK)).blocks())
            [(0, 1), (1, 2), (2, 3)]
        """
        cuts = np.searchsorted(self.starts, np.arange(0, len(self.indices), BLOCK))
        yield from pairwise(np.unique([0, *cuts, len(self)]).tolist())

    def hold_out(
        self, fraction: float, generator: np.random.Generator, *, at_most_half: bool = False
    ) -> tuple[FlatShards, FlatShards]:
        """Split every client's examples at random, and return the kept and the held-out part.

        ``fraction`` of each client's examples, rounded, is held out. If a client has at least two
        examples, both parts have at least one. With ``at_most_half``, the held-out part is never larger.
        """
        sizes = self.num_examples
        most = sizes // 2 if at_most_half else np.maximum(sizes - 1, 0)
        wanted = np.maximum(np.rint(fraction * sizes), 1).astype(np.int64)
        num_held = np.minimum(wanted, most)
        if fraction == 0:
            num_held[:] = 0
        shuffled = np.empty_like(self.indices)
        is_held = np.empty(len(shuffled), dtype=bool)
        for first, end in self.blocks():  # the draws do not depend on the blocks
            part = slice(self.starts[first], self.starts[end])
            owners = np.repeat(np.arange(end - first), sizes[first:end])
            # one sort by owner, then by draw; it is stable, so that rounding moves no example to
            # another owner
            order = np.argsort(owners + generator.random(len(owners)), kind="stable")
            shuffled[part] = self.indices[part][order]
            rank = np.arange(part.start, part.stop) - self.starts[first:end][owners]
            is_held[part] = rank < num_held[first:end][owners]
        if not num_held.any():  # without another copy of all indices
            return FlatShards(shuffled, sizes), FlatShards(shuffled[:0], num_held)
        return (
            FlatShards(shuffled[~is_held], sizes - num_held),
            FlatShards(shuffled[is_held], num_held),
        )


def local_order(
    shard: Tensor,
    batch_size: int,
    generator: Callable[[], torch.Generator],
    *,
    num_epochs: int | None = None,
    num_batches: int | None = None,
    drop_last: bool = False,
    weights: Tensor | None = None,
) -> tuple[Tensor, list[int]]:
    """Return the indices of a client's examples in the order of its local training, and the sizes of its batches.

    Every epoch is a new permutation of the shard, or with ``weights`` as many independent draws from the
    shard; the last batch of an epoch may be smaller. ``num_batches`` may span several epochs. A shard that
    fits in one batch is not shuffled, because a batch has no order.

    Args:
        shard: the client's indices, shape (n,), n ≥ 1.
        batch_size: examples per batch, ≥ 1.
        generator: returns the generator of the permutations.
        num_epochs: passes over the shard; None if ``num_batches`` is given.
        num_batches: number of batches; None if ``num_epochs`` is given.
        drop_last: drop an epoch's smaller last batch, unless it is the only one.
        weights: weights of all clients' examples, shape (N,), > 0 for this client's.

    Example:
        >>> generator = torch.Generator().manual_seed(0)
        >>> local_order(torch.arange(5), 2, lambda: generator, num_epochs=1)
        (tensor([4, 0, 1, 3, 2]), [2, 2, 1])
    """
    assert (num_epochs is None) != (num_batches is None)
    num_examples = shard.shape[0]
    if num_examples <= batch_size and weights is None:
        count = num_batches if num_epochs is None else num_epochs
        assert count is not None
        return shard if count == 1 else shard.repeat(count), [num_examples] * count
    draws = generator()
    full, rest = divmod(num_examples, batch_size)
    epoch = [batch_size] * full + [rest] * (rest > 0 and not (drop_last and full > 0))
    if num_epochs is None:
        num_epochs = -(-num_batches // len(epoch))  # type: ignore[operator]
    sizes = (epoch * num_epochs)[:num_batches]
    passes = []
    for _ in range(num_epochs):
        if weights is None:
            places = torch.randperm(num_examples, generator=draws)
        else:
            own = weights.index_select(0, shard)
            places = torch.multinomial(own, num_examples, replacement=True, generator=draws)
        passes.append(places[: sum(epoch)])
    order = passes[0] if num_epochs == 1 else torch.cat([shard[:0], *passes])
    count = sum(sizes)
    return shard.index_select(0, order if len(order) == count else order[:count]), sizes


def local_work(
    num_examples: Integers,
    batch_size: int,
    *,
    drop_last: bool,
    num_epochs: int | None = None,
    num_steps: int | None = None,
) -> Integers:
    """Return how many batches each client trains on in a round, given its number of epochs or of steps.

    Example:
        >>> local_work(np.array([7, 8]), 4, drop_last=True, num_epochs=3).tolist()
        [3, 6]
        >>> local_work(np.array([7, 8]), 4, drop_last=True, num_steps=5).tolist()
        [5, 5]
    """
    if num_epochs is None:
        return np.full_like(num_examples, num_steps or 1)
    per_epoch = num_examples // batch_size if drop_last else -(-num_examples // batch_size)
    return num_epochs * np.maximum(per_epoch, np.minimum(num_examples, 1))


def batches_of_steps(num_steps: Integers, per_epoch: Integers, accumulate: int) -> Integers:
    """Return how many batches each client needs for its local steps, each of which accumulates several batches.

    The last step of an epoch may have fewer batches.

    Example:
        >>> batches_of_steps(np.array([6, 7]), np.array([5, 5]), accumulate=2).tolist()
        [10, 12]
    """
    epochs, rest = np.divmod(num_steps, np.maximum(-(-per_epoch // accumulate), 1))
    batches: Integers = epochs * per_epoch + rest * accumulate
    return batches


def poisson_batches(
    shard: Tensor, batch_size: int, num_steps: int, words: Callable[[int], Words]
) -> tuple[Tensor, list[int]]:
    """Sample a client's examples for every local step by Poisson sampling; return all indices and each step's size.

    P(example in step) = q = min(1, B / n), independently of all other examples and steps. The accounting
    of DP-SGD assumes this sampling (Abadi et al. 2016, 1607.00133, Section 3.1), and not a pass over a
    shuffled shard. A batch may be empty.

    Args:
        shard: the client's indices, shape (n,).
        batch_size: expected number of examples in a step, B ≥ 1; a smaller shard is used as a whole.
        num_steps: number of steps, ≥ 0.
        words: function from the number of a step to n uniform random words of 64 bits.

    Example:
        >>> def words(step):
        ...     return np.random.default_rng(step).integers(0, 2**64, 6, dtype=np.uint64)
        >>> poisson_batches(torch.arange(6), 2, 3, words)
        (tensor([1, 2, 3, 2, 4, 0, 1, 3]), [3, 2, 3])
    """
    num_examples = shard.shape[0]
    if num_examples <= batch_size:
        return shard.repeat(num_steps), [num_examples] * num_steps
    below = np.uint64(batch_size / num_examples * 2.0**64)
    chosen = [torch.from_numpy(np.flatnonzero(words(step) < below)) for step in range(num_steps)]
    parts = [shard[places] for places in chosen]
    return torch.cat([shard[:0], *parts]), [len(part) for part in parts]
