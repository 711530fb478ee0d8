"""The "train dataloader" of a federated run: the groups of clients that make up a round.

Lightning's training epoch is one pass over it, each batch one group. It knows its position, which
Lightning saves with its loops, so that a checkpoint taken inside a round resumes inside it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from fl_lightning.data.cohort import CohortSampler, Population


class ClientGroup(tuple[int, ...]):
    """The ids of clients that train together; Lightning takes it for a batch."""

    __slots__ = ()


class RoundGroups:
    """A sized iterable over a round's groups, the same number of groups in every round.

    Where the cohort's size varies (Poisson sampling) a group may be empty or hold several clients.

    Args:
        sampler: draws the cohort.
        population: the clients to draw from.
        seed: root seed of the draws.
        clients_per_group: how many clients train together, ≥ 1.

    Example:
        >>> from fl_lightning.data.cohort import UniformCohort
        >>> groups = RoundGroups(UniformCohort(size=2), Population(np.full(5, 10)), seed=0)
        >>> groups.set_epoch(7)
        >>> len(groups), list(groups)
        (2, [(2,), (3,)])
    """

    def __init__(
        self,
        sampler: CohortSampler,
        population: Population,
        seed: int,
        *,
        clients_per_group: int = 1,
    ) -> None:
        self._sampler = sampler
        self._population = population
        self._seed = seed
        self._num_groups = -(-sampler.expected_size(population.num_clients) // clients_per_group)
        self._round = 0
        self._position = 0

    def __len__(self) -> int:
        return self._num_groups

    @property
    def sampler(self) -> RoundGroups:
        """Where Lightning looks for `set_epoch`."""
        return self

    def set_epoch(self, epoch: int) -> None:
        """Say which round comes next; a round already begun goes on where it was."""
        if epoch != self._round:
            self._round, self._position = epoch, 0

    def groups(self, round_index: int) -> list[ClientGroup]:
        """Return all groups of a round."""
        ids = self._sampler.sample(round_index, self._population, self._seed)
        return [ClientGroup(part.tolist()) for part in np.array_split(ids, self._num_groups)]

    def __iter__(self) -> Iterator[ClientGroup]:
        yield from self.groups(self._round)[self._position :]

    def advance(self) -> None:
        """Say that a group is done; one that was interrupted is yielded again after resuming."""
        self._position += 1

    def state_dict(self) -> dict[str, Any]:
        """Return round and position."""
        return {"round": self._round, "position": self._position}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from there."""
        self._round, self._position = state["round"], state["position"]
