"""The "train dataloader" of a federated run: the groups of clients that make up a round.

Lightning's training epoch is one pass over it, each batch one group. It knows its position, which
Lightning saves with its loops. A round that a checkpoint has cut short is trained from its first
client on, to the same result. Of several processes each goes through its own share of the cohort, all in
the same number of groups.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from fl_lightning.core.errors import ConfigurationError
from fl_lightning.data.cohorts.cohort import Cohort
from fl_lightning.data.cohorts.population import ClientIds, Population
from fl_lightning.federation.processes.ranks import shares

# Lightning lets the processes wait for each other at every batch: few groups, few waits.
MAX_GROUPS_OF_SEVERAL_PROCESSES = 4


class ClientGroup:
    """The ids of clients that train together; Lightning takes it for a batch.

    No tuple and no dataclass, in which Lightning would look for tensors among the ids, one by one.

    Example:
        >>> group = ClientGroup([3, 5])
        >>> len(group), list(group)
        (2, [3, 5])
    """

    def __init__(self, ids: Iterable[int]) -> None:
        self.ids = tuple(ids)

    def __len__(self) -> int:
        return len(self.ids)

    def __iter__(self) -> Iterator[int]:
        return iter(self.ids)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ClientGroup) and self.ids == other.ids

    def __hash__(self) -> int:
        return hash(self.ids)

    def __repr__(self) -> str:
        return f"ClientGroup({list(self.ids)})"


@dataclass(frozen=True)
class Share:
    """Which part of every cohort a process trains."""

    # of every client of the population, e.g. local batches; shape (num_clients,)
    work: npt.NDArray[np.int64]
    rank: int  # of this process, in [0, num_ranks)
    num_ranks: int  # number of processes


class RoundGroups:
    """A sized iterable over a round's groups, the same number of groups in every round.

    Where the cohort's size varies (Poisson sampling), or the clients do not divide evenly, a group
    may be empty or hold more clients than asked for.

    Args:
        sampler: draws the cohort.
        population: the clients to draw from.
        seed: root seed of the draws.
        share: the part of this process; everything if None.
        clients_per_group: how many clients train together, ≥ 1; several processes take larger
            groups where there would be many.
        limit: of every cohort only so many clients, those with the lowest ids, or that share of
            them: the Trainer's ``limit_train_batches``.
        fewest: clients that a round needs; smaller cohorts are left out as a whole.

    Raises:
        ConfigurationError: if the limit leaves no client.

    Attributes:
        num_clients: in a round, as many as are expected.
        population: the clients to draw from, of whom more becomes known from round to round.
        seed: root seed of the draws.
        fewest: as given.
        earlier: groups of the present round that Lightning passes over, as it was resumed inside the round.

    Example:
        >>> from fl_lightning.data.cohorts.cohort import UniformCohort
        >>> population = Population(np.full(5, 10))
        >>> groups = RoundGroups(UniformCohort(size=3), population, seed=0)
        >>> groups.set_epoch(7)
        >>> len(groups), list(groups)
        (3, [ClientGroup([2]), ClientGroup([3]), ClientGroup([4])])
        >>> second = Share(population.num_examples, rank=1, num_ranks=2)
        >>> groups = RoundGroups(UniformCohort(size=3), population, seed=0, share=second)
        >>> groups.groups(round_index=7)
        [ClientGroup([3]), ClientGroup([])]
    """

    def __init__(
        self,
        sampler: Cohort,
        population: Population,
        seed: int,
        *,
        share: Share | None = None,
        clients_per_group: int = 1,
        limit: float = 1.0,
        fewest: int = 1,
    ) -> None:
        self.fewest = fewest
        self._sampler = sampler
        self.population = population
        self.seed = seed
        self._share = share
        self._limit = limit
        self._is_limited = isinstance(limit, int) or limit < 1.0  # 1 is one client, 1.0 are all
        num_ranks = share.num_ranks if share is not None else 1
        expected = sampler.expected_size(population.num_clients)
        self.num_clients = limited(expected, limit)
        if self.num_clients < 1:
            raise ConfigurationError(
                f"trainer.limit_train_batches {limit} of {expected} clients leaves none: it limits "
                "the clients of a round, by their number or as a share of them"
            )
        self._num_groups = -(-self.num_clients // (num_ranks * clients_per_group))
        if num_ranks > 1:
            self._num_groups = min(self._num_groups, MAX_GROUPS_OF_SEVERAL_PROCESSES)
        self._round = 0
        self._position = 0
        self._present: list[ClientGroup] = []
        self.earlier: list[ClientGroup] = []
        self.sampler = self  # where Lightning looks for `set_epoch`

    def __len__(self) -> int:
        return self._num_groups

    def set_epoch(self, epoch: int) -> None:
        """Say which round comes next; a round already begun goes on where it was."""
        if epoch != self._round:
            self._round, self._position = epoch, 0

    def _drawn(self, round_index: int) -> ClientIds:
        ids = np.asarray(self._sampler.sample(round_index, self.population, self.seed))
        check_cohort(ids, self.population, type(self._sampler).__name__)
        return ids[: limited(len(ids), self._limit)] if self._is_limited else ids

    def num_left_out(self, round_index: int) -> int:
        """Return the number of clients drawn for a round that takes none, because they are few."""
        drawn = len(self._drawn(round_index)) if self.fewest > 1 else 0
        return drawn if drawn < self.fewest else 0

    def groups(self, round_index: int) -> list[ClientGroup]:
        """Return all groups of a round."""
        ids = self._drawn(round_index)
        if len(ids) < self.fewest:
            ids = ids[:0]
        if self._share is not None:
            work = self._share.work[ids]
            ids = ids[shares(work, self._share.num_ranks)[self._share.rank]]
        parts = [ids] if self._num_groups == 1 else np.array_split(ids, self._num_groups)
        return [ClientGroup(part.tolist()) for part in parts]

    def __iter__(self) -> Iterator[ClientGroup]:
        self._present = self.groups(self._round)
        self.earlier = self._present[: self._position]
        yield from self._present[self._position :]

    @property
    def whole(self) -> ClientGroup:
        """All clients that this process trains in the current round."""
        return ClientGroup(client for group in self._present for client in group)

    def advance(self) -> None:
        """Say that a group is done; one that was interrupted is yielded again after resuming."""
        self._position += 1

    def state_dict(self) -> dict[str, Any]:
        """Return round and position."""
        return {"round": self._round, "position": self._position, "groups": self._num_groups}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore round and position."""
        is_done = state["position"] == state.get("groups", self._num_groups)
        self._round = state["round"]
        self._position = self._num_groups if is_done else state["position"]


def check_cohort(ids: ClientIds, population: Population, sampler: str) -> None:
    """Refuse what is no cohort: somebody who is in it twice would count twice."""
    if not len(ids):
        return
    is_whole = ids.ndim == 1 and np.issubdtype(ids.dtype, np.integer)
    if not is_whole or len(np.unique(ids)) < len(ids):
        raise ConfigurationError(
            f"federation.cohort: {sampler}.sample must return distinct client ids, an array of whole "
            f"numbers, got {ids.tolist()[:10]}: return np.unique of them"
        )
    first, last = ids.min(), ids.max()
    if first < 0 or last >= len(population.num_examples):
        raise ConfigurationError(
            f"federation.cohort: {sampler}.sample must return ids from 0 to "
            f"{population.num_clients - 1}, got {first} to {last}"
        )


def limited(count: int, limit: float) -> int:
    """Return the size of a cohort under a limit: at most ``limit``, or as a float that share.

    Example:
        >>> limited(10, 3), limited(10, 0.25), limited(10, 1.0)
        (3, 2, 10)
    """
    return int(count * limit) if isinstance(limit, float) else min(count, limit)
