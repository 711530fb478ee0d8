"""The work of each client in a round: its examples, their order, its steps."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from fl_lightning.client.local_step import SizedBatch
from fl_lightning.client.work import ClientWork, GroupWork
from fl_lightning.core.errors import ConfigurationError
from fl_lightning.core.seeds import torch_generator
from fl_lightning.data.federated import FederatedDataModule
from fl_lightning.data.shards import batches_of_steps, local_order, local_work


class DrawsBatches(Protocol):
    """Draws the batches of a client's local steps by Poisson sampling."""

    def batches(
        self, shard: Tensor, batch_size: int, num_steps: int, client: int, round_index: int
    ) -> tuple[Tensor, list[int]]:
        """Return the example indices of all local steps, concatenated, and each step's batch size."""


@dataclass(frozen=True)
class LocalWork:
    """Amount of a client's local training per round: steps or epochs, batches per step, and seed."""

    local_steps: int | None  # optimizer steps; or
    local_epochs: int | None  # passes over its shard
    accumulate: int  # batches per step; an epoch's last step takes those that are left
    seed: int  # root seed of all draws
    # Poisson sampling of batches, for privacy; None for passes over a shuffled shard
    examples: DrawsBatches | None = None


class WorkPlan:
    """Draws clients' work in each round: examples, their order, and batches.

    Attributes:
        num_examples: number of training examples of each client, int64, shape (num_clients,).
    """

    def __init__(self, data: FederatedDataModule, local_work: LocalWork) -> None:
        self._local_work = local_work
        self._data = data
        self._clients, self._batch_size = data.clients, data.batch_size
        self._drop_last = data.drop_last
        self.num_examples, self._update_weights = data.clients.num_examples, data.update_weights
        self._weights = data.draw_weights

    def of(self, clients: Sequence[int], rounds: int | Sequence[int]) -> GroupWork:
        """Return clients' work in a round (examples, order, batch sizes); a client without examples takes no step.

        Args:
            clients: ids of the clients.
            rounds: the round, or the round of each client.
        """
        client_ids = np.array(clients, np.int64)
        if isinstance(rounds, int):
            rounds = [rounds] * len(clients)
        indices, num_examples = self._clients.take(clients)
        amount = self._local_work
        num_passes = amount.local_epochs or amount.local_steps
        fits = num_examples.max(initial=0) <= self._batch_size
        is_plain = amount.examples is None and self._weights is None
        if fits and num_passes == 1 and is_plain:  # one batch per client, in the shard's order
            has_any = num_examples > 0
            order, sizes, num_steps = indices, num_examples[has_any], has_any.astype(np.int64)
        else:
            shards = indices.split(num_examples.tolist())
            work = list(map(self._order, shards, clients, rounds))
            order = torch.cat([indices[:0], *(places for places, _ in work)])
            sizes = np.array([size for _, batches in work for size in batches], np.int64)
            num_steps = np.array([len(batches) for _, batches in work], np.int64)
        return GroupWork(
            client_ids=client_ids,
            num_examples=self._update_weights[client_ids],
            order=order,
            sizes=sizes,
            num_steps=num_steps,
            rounds=np.array(rounds, np.int64),
            root_seed=amount.seed,
        )

    def _order(self, shard: Tensor, client: int, round_index: int) -> tuple[Tensor, list[int]]:
        """Return the order in which a client trains on its examples in a round, and its batch sizes."""
        amount, num_examples = self._local_work, shard.numel()
        if not num_examples:
            return shard, []
        if amount.examples is not None:
            steps = local_work(
                np.array([num_examples]),
                self._batch_size,
                drop_last=False,
                num_epochs=amount.local_epochs,
                num_steps=amount.local_steps,
            )
            return amount.examples.batches(
                shard, self._batch_size, int(steps[0]), client, round_index
            )
        num_batches = amount.local_steps
        if num_batches is not None and amount.accumulate > 1:
            per_epoch = np.array([self._per_epoch(num_examples)])
            steps = np.array([num_batches])
            num_batches = int(batches_of_steps(steps, per_epoch, amount.accumulate)[0])
        whose = "shuffle", round_index, client
        return self._drawn(shard, whose, amount.local_epochs, num_batches)

    def _drawn(
        self,
        shard: Tensor,
        whose: tuple[str, int, int],
        num_epochs: int | None,
        num_batches: int | None = None,
    ) -> tuple[Tensor, list[int]]:
        """Return a client's examples in random order, with batch sizes; `whose` (purpose, round, client) seeds it."""
        return local_order(
            shard,
            self._batch_size,
            partial(torch_generator, self._local_work.seed, *whose),
            num_epochs=num_epochs,
            num_batches=num_batches,
            drop_last=self._drop_last,
            weights=self._weights,
        )

    def _per_epoch(self, num_examples: int) -> int:
        sizes = np.array([num_examples])
        return int(local_work(sizes, self._batch_size, drop_last=self._drop_last, num_epochs=1)[0])

    def more_epochs(self, work: ClientWork, num_epochs: int, purpose: str) -> ClientWork:
        """Return a client's work for extra passes over its shard, in a random order seeded by ``purpose``."""
        if not work.sizes:
            return work
        whose = purpose, work.round_index, work.client_id
        order, sizes = self._drawn(self._clients[work.client_id], whose, num_epochs)
        return work._replace(order=order, sizes=sizes)

    def shard(self, work: ClientWork) -> ClientWork:
        """Return a client's work for one pass over its whole shard, in stored order.

        If the loader drops a smaller last batch, so does this pass, in a random order per round, so that
        the dropped examples vary. If the loader draws by weight, so does this pass.
        """
        if self._drop_last or self._weights is not None:
            return self.more_epochs(work, 1, "shard gradient")
        indices = self._clients[work.client_id]
        sizes = [len(part) for part in indices.split(self._batch_size)]
        return work._replace(order=indices, sizes=sizes)

    def labels(self, work: ClientWork) -> Tensor:
        """Return the classes of a client's training examples, whole numbers, shape (n,).

        Raises:
            ConfigurationError: if the labels are no classes.
        """
        labels = self._data.labels
        if labels.ndim != 1 or labels.dtype.kind not in "iub" or labels.min(initial=0) < 0:
            raise ConfigurationError(
                "FedLC counts examples by class, so that each training example needs a label that is a whole "
                "number ≥ 0: name the attribute of the data set with such labels in data.labels"
            )
        return torch.from_numpy(labels[self._clients[work.client_id].numpy()].astype(np.int64))

    def batches(self, work: ClientWork) -> Iterator[SizedBatch]:
        """Yield a client's batches with their sizes, lazily; an empty batch is None."""
        read: Callable[[Tensor], Any] = self._data.train_batch
        parts = work.order.split(work.sizes)
        read_some = read if all(work.sizes) else lambda part: read(part) if len(part) else None
        return zip(map(read_some, parts), work.sizes, strict=True)

    def batches_of_steps(self, work: ClientWork) -> list[int]:
        """Return the number of batches in each local step of a client; no step spans two epochs."""
        total, most = len(work.sizes), self._local_work.accumulate
        if most == 1 or not total:
            return [1] * total
        per_epoch = self._per_epoch(int(self._clients.num_examples[work.client_id]))
        epochs = (min(per_epoch, total - start) for start in range(0, total, per_epoch))
        return [min(most, epoch - start) for epoch in epochs for start in range(0, epoch, most)]

    def steps(self, work: ClientWork) -> Iterator[Sequence[SizedBatch]]:
        """Yield for each local step of a client its batches, which are read lazily."""
        batches = self.batches(work)
        if self._local_work.accumulate == 1:
            return zip(batches, strict=True)  # one batch each
        return (list(islice(batches, count)) for count in self.batches_of_steps(work))
