"""The local work of clients in a round."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple, overload

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from fl_lightning.core.seeds import Integers, derive_seed


class ClientWork(NamedTuple):
    """The local work of one client in a round.

    Attributes:
        client_id: whose it is.
        num_examples: its aggregation weight.
        order: indices of its examples in the order in which local steps see them, shape (n,).
        sizes: how many of them each batch takes, Σ sizes = n. A batch is a local step, unless several
            are accumulated.
        round_index: which round.
        root_seed: of the run.
    """

    client_id: int
    num_examples: int
    order: Tensor
    sizes: list[int]
    round_index: int = 0
    root_seed: int = 0

    @property
    def batches(self) -> tuple[Tensor, ...]:
        """The indices of every batch."""
        return tuple(self.order.split(self.sizes))

    @property
    def seed(self) -> int:
        """Where its dropout, its augmentation and the like draw from."""
        return derive_seed(self.root_seed, "local training", self.round_index, self.client_id)

    def head(self, num_batches: int) -> ClientWork:
        """Return its first batches."""
        sizes = self.sizes[:num_batches]
        return self._replace(order=self.order[: sum(sizes)], sizes=sizes)


@dataclass(frozen=True, eq=False)
class GroupWork(Sequence[ClientWork]):
    """The local work of m clients, stored end to end; reads like a list of `ClientWork`.

    As arrays the work of hundreds of small clients takes less time to write down than to do.

    Attributes:
        client_ids: whose it is, shape (m,).
        num_examples: their aggregation weights, shape (m,).
        order: indices of the first one's examples, then of the next one's, …, shape (N,).
        sizes: how many of them each batch takes, likewise, shape (M,), Σ sizes = N.
        num_steps: batches of each client, shape (m,), Σ num_steps = M.
        rounds: which round each trains in, shape (m,).
        root_seed: of the run.

    Example:
        >>> order, one = torch.arange(5), np.ones(2, np.int64)
        >>> work = GroupWork(np.array([3, 8]), 2 * one, order, np.array([2, 1, 2]), np.array([2, 1]), one)
        >>> work[1]
        ClientWork(client_id=8, num_examples=2, order=tensor([3, 4]), sizes=[2], round_index=1, root_seed=0)
    """

    client_ids: Integers
    num_examples: Integers
    order: Tensor
    sizes: Integers
    num_steps: Integers
    rounds: Integers
    root_seed: int = 0

    @staticmethod
    def of(work: Iterable[ClientWork]) -> GroupWork:
        """Return several clients' work, all of one run, in this form; one in this form as it is."""
        if isinstance(work, GroupWork):
            return work
        clients = list(work)
        return GroupWork(
            np.array([client.client_id for client in clients], np.int64),
            np.array([client.num_examples for client in clients], np.int64),
            torch.cat([torch.empty(0, dtype=torch.int64), *(client.order for client in clients)]),
            np.array([size for client in clients for size in client.sizes], np.int64),
            np.array([len(client.sizes) for client in clients], np.int64),
            np.array([client.round_index for client in clients], np.int64),
            clients[0].root_seed if clients else 0,
        )

    @cached_property
    def first_steps(self) -> Integers:
        """Which of all batches is each client's first one, and M; shape (m + 1,)."""
        return np.concatenate([[0], np.cumsum(self.num_steps)])

    @cached_property
    def begins(self) -> Integers:
        """Where in the order each batch begins, and N; shape (M + 1,)."""
        return np.concatenate([[0], np.cumsum(self.sizes)])

    def __len__(self) -> int:
        return len(self.client_ids)

    @overload
    def __getitem__(self, at: int) -> ClientWork: ...

    @overload
    def __getitem__(self, at: slice) -> list[ClientWork]: ...

    def __getitem__(self, at: int | slice) -> ClientWork | list[ClientWork]:
        """Return one client's work, or a list of several clients'."""
        if isinstance(at, slice):
            return [self[one] for one in range(len(self))[at]]
        one = range(len(self))[at]
        first, end = self.first_steps[one], self.first_steps[one + 1]
        return ClientWork(
            int(self.client_ids[one]),
            int(self.num_examples[one]),
            self.order[int(self.begins[first]) : int(self.begins[end])],
            self.sizes[first:end].tolist(),
            int(self.rounds[one]),
            self.root_seed,
        )

    def where(self, is_kept: npt.NDArray[np.bool_]) -> GroupWork:
        """Return the work of those clients for whom this is true, shape (m,)."""
        if is_kept.all():
            return self
        if not is_kept.any():
            return NOTHING
        return GroupWork.of([self[int(one)] for one in np.flatnonzero(is_kept)])


NOTHING = GroupWork.of(())  # made once: it takes as long as to look whether there is anything
