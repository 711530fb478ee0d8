"""The examples and batches that clients train on in a round."""

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
    """Training data of one client in a round: indices of its examples, in order, split into batches.

    Attributes:
        client_id: client id.
        num_examples: aggregation weight of the client.
        order: indices of the client's examples in the order in which local steps see them, shape (n,).
        sizes: number of examples in each batch, Σ sizes = n. A batch is a local step, unless several
            are accumulated.
        round_index: number of the round.
        root_seed: root seed of the run.
    """

    client_id: int
    num_examples: int
    order: Tensor
    sizes: list[int]
    round_index: int = 0
    root_seed: int = 0

    @property
    def batches(self) -> tuple[Tensor, ...]:
        """Indices of examples, one tensor per batch."""
        return tuple(self.order.split(self.sizes))

    @property
    def seed(self) -> int:
        """Seed of the global random generators for the client's training (dropout, augmentation)."""
        return derive_seed(self.root_seed, "local training", self.round_index, self.client_id)

    def head(self, num_batches: int) -> ClientWork:
        """Return a copy with the first ``num_batches`` batches only."""
        sizes = self.sizes[:num_batches]
        return self._replace(order=self.order[: sum(sizes)], sizes=sizes)


@dataclass(frozen=True, eq=False)
class GroupWork(Sequence[ClientWork]):
    """Training data of m clients in a round, in a few arrays; a sequence of `ClientWork`.

    Building a `ClientWork` for each of hundreds of small clients would take longer than to train them.

    Attributes:
        client_ids: client ids, shape (m,).
        num_examples: aggregation weights, shape (m,).
        order: indices of the first client's examples, then of the second's, …, shape (N,).
        sizes: number of examples in each batch, in the same order, shape (M,), Σ sizes = N.
        num_steps: number of batches of each client, shape (m,), Σ num_steps = M.
        rounds: number of the round that each client trains in, shape (m,).
        root_seed: root seed of the run.

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
        """Join the `ClientWork` of several clients of a run; a `GroupWork` is returned unchanged."""
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
        """Position of each client's first batch among all M batches; M is appended, shape (m + 1,)."""
        return np.concatenate([[0], np.cumsum(self.num_steps)])

    @cached_property
    def begins(self) -> Integers:
        """Position in ``order`` at which each batch starts; N is appended, shape (M + 1,)."""
        return np.concatenate([[0], np.cumsum(self.sizes)])

    def __len__(self) -> int:
        return len(self.client_ids)

    @overload
    def __getitem__(self, at: int) -> ClientWork: ...

    @overload
    def __getitem__(self, at: slice) -> list[ClientWork]: ...

    def __getitem__(self, at: int | slice) -> ClientWork | list[ClientWork]:
        """Return the work of one client, or of several as a list."""
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
        """Return the work of the clients for which ``is_kept``, a bool array of shape (m,), is true."""
        if is_kept.all():
            return self
        if not is_kept.any():
            return NOTHING
        return GroupWork.of([self[int(one)] for one in np.flatnonzero(is_kept)])


NOTHING = GroupWork.of(
    ()
)  # built once: building it takes as long as the check that there is no work
