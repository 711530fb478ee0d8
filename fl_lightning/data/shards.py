"""Clients' shards and their batches.

A client's shard is a set of indices into one data set that all clients share: nothing is copied and
no loader is started per client. Batches are drawn from a shuffled shard, epoch after epoch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.utils.data import Dataset, Subset, TensorDataset, default_collate, default_convert

from fl_lightning.core.modules import sent
from fl_lightning.core.seeds import Integers, Words
from fl_lightning.data.partitions.flat_shards import FlatShards

Collate = Callable[[list[Any]], Any]


@runtime_checkable
class BatchedDataset(Protocol):
    """A data set that builds whole batches, which is many times faster than example by example."""

    def gather(self, indices: Tensor) -> Any:
        """Return the batch of the examples at `indices`, shape (B,), int64."""


def batch_reader(
    dataset: Dataset[Any], collate: Collate = default_collate, *, at_once: bool = False
) -> Callable[[Tensor], Any]:
    """Return the fastest function from indices, shape (B,), to a batch of a map-style data set.

    The batch equals that of a DataLoader without workers. Tensor data sets, whose tensors may be on an
    accelerator, and data sets with a ``gather`` method are indexed once per batch, unless the user has
    a collate function.

    Args:
        dataset: map-style data set.
        collate: makes a batch from a list of examples.
        at_once: index the data set with a list of indices, and convert the result by ``collate``, like
            a DataLoader with ``batch_size=None`` and a sampler of batches.

    Example:
        >>> data = TensorDataset(torch.arange(4.0), torch.tensor([0, 1, 0, 1]))
        >>> batch_reader(data)(torch.tensor([2, 3]))
        [tensor([2., 3.]), tensor([0, 1])]
    """
    if gathers(dataset, collate):
        return dataset.gather  # type: ignore[attr-defined, no-any-return]
    if type(dataset) is TensorDataset and collate is default_collate and not at_once:
        tensors = dataset.tensors
        # several times as fast as tensor[indices]
        if all(tensor.device.type == "cpu" for tensor in tensors):
            return lambda indices: [t.index_select(0, indices) for t in tensors]
        return lambda indices: [t.index_select(0, sent(indices, t.device)) for t in tensors]
    if type(dataset) is Subset:
        inner = batch_reader(dataset.dataset, collate, at_once=at_once)
        places = torch.as_tensor(dataset.indices)
        return lambda indices: inner(places.index_select(0, indices))
    if at_once:
        return lambda indices: collate(dataset[indices.tolist()])
    if fetch := getattr(dataset, "__getitems__", None):
        return lambda indices: collate(fetch(indices.tolist()))
    return lambda indices: collate([dataset[index] for index in indices.tolist()])


def gathers(dataset: Dataset[Any], collate: Collate) -> bool:
    """True if a data set builds whole batches, which are not changed afterwards."""
    return isinstance(dataset, BatchedDataset) and collate in (default_collate, default_convert)


def reads_by_index(dataset: Dataset[Any], collate: Collate = default_collate) -> bool:
    """True if `batch_reader` selects rows in memory that are equal at every reading.

    This holds for tensor data sets and for those with ``gather`` and a true ``is_deterministic``.
    """
    if type(dataset) is Subset:
        return reads_by_index(dataset.dataset, collate)
    if gathers(dataset, collate):
        return bool(getattr(dataset, "is_deterministic", False))
    return type(dataset) is TensorDataset and collate is default_collate


class ClientShards:
    """The examples of each client, as tensors of indices.

    It needs 4 bytes per example and 16 per client, see `FlatShards`.

    Args:
        shards: one index array per client.

    Attributes:
        flat: the shards as one array of indices.

    Example:
        >>> shards = ClientShards([np.array([4, 0]), np.array([2])])
        >>> shards[0], shards.num_examples
        (tensor([4, 0]), array([2, 1]))
    """

    def __init__(self, shards: Sequence[npt.NDArray[np.int64]]) -> None:
        self.flat = FlatShards.of(shards)

    @property
    def num_examples(self) -> npt.NDArray[np.int64]:
        """Number of examples of each client, shape (num_clients,)."""
        return self.flat.sizes

    def __len__(self) -> int:
        return len(self.flat)

    def __getitem__(self, client: int) -> Tensor:
        return torch.from_numpy(self.flat[client])

    def take(self, clients: Sequence[int]) -> tuple[Tensor, npt.NDArray[np.int64]]:
        """Return the concatenated indices of several clients, and the number of each."""
        indices, sizes = self.flat.take(clients)
        return torch.from_numpy(indices), sizes

    def __iter__(self) -> Iterator[Tensor]:
        return (self[client] for client in range(len(self)))

    def hold_out(
        self, fraction: float, generator: np.random.Generator
    ) -> tuple[ClientShards, ClientShards]:
        """Split every shard at random into (kept examples, held-out examples).

        ``fraction`` of each client's examples, rounded, is held out; if a client has at least two
        examples, both parts have at least one.
        """
        flat, sizes = self.flat, self.num_examples
        wanted = np.maximum(np.rint(fraction * sizes), 1).astype(np.int64)
        num_held = np.clip(wanted, 0, np.maximum(sizes - 1, 0))
        if fraction == 0:
            num_held[:] = 0
        shuffled = np.empty_like(flat.indices)
        is_held = np.empty(len(shuffled), dtype=bool)
        for first, end in flat.blocks():  # the draws do not depend on the blocks
            part = slice(flat.starts[first], flat.starts[end])
            owners = np.repeat(np.arange(end - first), sizes[first:end])
            # one sort by owner, then by draw; it is stable, so that rounding moves no example to
            # another owner
            order = np.argsort(owners + generator.random(len(owners)), kind="stable")
            shuffled[part] = flat.indices[part][order]
            rank = np.arange(part.start, part.stop) - flat.starts[first:end][owners]
            is_held[part] = rank < num_held[first:end][owners]
        return (
            ClientShards(FlatShards(shuffled[~is_held], sizes - num_held)),
            ClientShards(FlatShards(shuffled[is_held], num_held)),
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
    """Order of one client's examples in local training, and the sizes of its batches.

    Every epoch is a new permutation of the shard, or with ``weights`` as many independent draws from
    it; its last batch may be smaller. ``num_batches`` may span several epochs. A shard that fits in one
    batch is not shuffled, because a batch has no order.

    Args:
        shard: the client's indices, shape (n,), n ≥ 1.
        batch_size: examples per batch, ≥ 1.
        generator: returns the generator of the permutations.
        num_epochs: passes over the shard; or else
        num_batches: number of batches.
        drop_last: drop an epoch's smaller last batch, unless it is the only one.
        weights: weights of the client's examples, shape (n,), > 0, of any sum.

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
            places = torch.multinomial(weights, num_examples, replacement=True, generator=draws)
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
    """Number of local batches of every client, given epochs or steps.

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
    """Number of batches in clients' local steps; an epoch's last step may have fewer batches.

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
    """Sample the examples of a client's local steps, concatenated, and the sizes of the steps.

    P(example in step) = q = min(1, B / n), independently of all other examples and steps: the sampling
    that the accounting of DP-SGD assumes (Abadi et al. 2016, 1607.00133, Section 3.1), unlike a pass
    over a shuffled shard. A batch may be empty.

    Args:
        shard: the client's indices, shape (n,).
        batch_size: expected number of examples in a step, B ≥ 1; a smaller shard is used as a whole.
        num_steps: number of steps, ≥ 0.
        words: returns n uniform words of 64 bits, by number of the step.

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
