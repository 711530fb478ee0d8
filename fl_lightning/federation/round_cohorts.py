"""The "train dataloader" of a federated run: every round is one batch, the clients that train in it.

Lightning's checkpoints say whether the round is done. An interrupted round is trained again from its first
client, with the same result. Each of several processes trains its own share of the cohort.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np

from fl_lightning.core.errors import ConfigurationError
from fl_lightning.data.cohorts.cohort import Cohort
from fl_lightning.data.cohorts.population import ClientIds, Population


class CohortBatch:
    """Ids of a round's clients, which Lightning's loop receives as a batch.

    It is neither a tuple nor a dataclass: in those, Lightning would look for tensors, id by id.

    Example:
        >>> batch = CohortBatch([3, 5])
        >>> len(batch), list(batch)
        (2, [3, 5])
    """

    def __init__(self, ids: Iterable[int]) -> None:
        self.ids = tuple(ids)

    def __len__(self) -> int:
        return len(self.ids)

    def __iter__(self) -> Iterator[int]:
        return iter(self.ids)

    def __repr__(self) -> str:
        return f"CohortBatch({list(self.ids)})"


class RoundCohorts:
    """Lightning's training data loader in a federation: an epoch's only batch holds the ids of the round's clients.

    Args:
        sampler: draws the cohort.
        population: the clients to draw from.
        seed: root seed of the draws.
        share: maps the ids of a cohort to the ids that this process trains; all of them if None.
        limit: largest number (int) or fraction (float) of a cohort's clients that train, lowest ids first:
            the Trainer's ``limit_train_batches``.
        fewest: smallest cohort that trains; in a round with a smaller cohort no client trains.

    Raises:
        ConfigurationError: if the limit leaves no client.

    Attributes:
        num_clients: expected number of clients per round.
        population: the clients to draw from, with their losses and durations of past rounds.
        seed: root seed of the draws; `PrivateRounds.enter` sets a secret where sampling amplifies privacy.

    Example:
        >>> from fl_lightning.data.cohorts.cohort import UniformCohort
        >>> population = Population(np.full(5, 10))
        >>> cohorts = RoundCohorts(UniformCohort(size=3), population, seed=0)
        >>> cohorts.set_epoch(7)
        >>> len(cohorts), list(cohorts)
        (1, [CohortBatch([2, 3, 4])])
        >>> second = RoundCohorts(UniformCohort(size=3), population, seed=0, share=lambda ids: ids[1:2])
        >>> second.clients(round_index=7)
        CohortBatch([3])
    """

    def __init__(
        self,
        sampler: Cohort,
        population: Population,
        seed: int,
        *,
        share: Callable[[ClientIds], ClientIds] | None = None,
        limit: float = 1.0,
        fewest: int = 1,
    ) -> None:
        self.population, self.seed, self.fewest = population, seed, fewest
        self._sampler, self._share, self._limit = sampler, share, limit
        self._is_limited = isinstance(limit, int) or limit < 1.0  # 1 is one client, 1.0 are all
        expected = sampler.expected_size(population.num_clients)
        self.num_clients = limited(expected, limit)
        if self.num_clients < 1:
            raise ConfigurationError(
                f"trainer.limit_train_batches {limit} leaves no client of a cohort of {expected}: it is the number "
                "(2) or fraction (0.5) of the cohort's clients that train. Raise it, or use a larger cohort"
            )
        self._round, self._is_done = 0, False
        self.sampler = self  # where Lightning looks for `set_epoch`

    def __len__(self) -> int:
        return 1

    def set_epoch(self, epoch: int) -> None:
        """Set the round whose clients are yielded next; setting the current round again keeps whether it is done."""
        if epoch != self._round:
            self._round, self._is_done = epoch, False

    def _drawn(self, round_index: int) -> ClientIds:
        """Draw the cohort of a round, and raise if its ids are invalid or repeated."""
        ids = np.asarray(self._sampler.sample(round_index, self.population, self.seed))
        sampler = f"federation.cohort: {type(self._sampler).__name__}"
        is_whole = not len(ids) or (ids.ndim == 1 and np.issubdtype(ids.dtype, np.integer))
        if not is_whole or len(np.unique(ids)) < len(ids):
            raise ConfigurationError(
                f"{sampler}.sample must return distinct client ids, an array of whole "
                f"numbers, got {ids.tolist()[:10]}: return np.unique of them"
            )
        if len(ids) and (ids.min() < 0 or ids.max() >= self.population.num_clients):
            raise ConfigurationError(
                f"{sampler}.sample must return ids from 0 to "
                f"{self.population.num_clients - 1}, got {ids.min()} to {ids.max()}"
            )
        return ids[: limited(len(ids), self._limit)] if self._is_limited else ids

    def num_left_out(self, round_index: int) -> int:
        """Return the size of a round's cohort if it is too small to train; else 0."""
        drawn = len(self._drawn(round_index)) if self.fewest > 1 else 0
        return drawn if drawn < self.fewest else 0

    def clients(self, round_index: int) -> CohortBatch:
        """Return the clients of a round that this process trains."""
        ids = self._drawn(round_index)
        if len(ids) < self.fewest:
            ids = ids[:0]
        if self._share is not None:
            ids = self._share(ids)
        return CohortBatch(ids.tolist())

    def __iter__(self) -> Iterator[CohortBatch]:
        if not self._is_done:
            yield self.clients(self._round)

    def finish(self) -> None:
        """Mark the round as done, so that a resumed run does not repeat it."""
        self._is_done = True

    def state_dict(self) -> dict[str, Any]:
        """Return the current round's number, and whether it is done."""
        return {"round": self._round, "is_done": self._is_done}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the state from `state_dict`."""
        self._round, self._is_done = state["round"], state["is_done"]


def limited(count: int, limit: float) -> int:
    """Return a cohort's size under a limit: at most ``limit`` clients (int), or that fraction (float).

    Example:
        >>> limited(10, 3), limited(10, 0.25), limited(10, 1.0)
        (3, 2, 10)
    """
    return int(count * limit) if isinstance(limit, float) else min(count, limit)
