"""What the server knows of all clients, as arrays: of a million clients 24 MB.

The federation notes it when a round ends, the same in every process, and keeps it in its
checkpoint: a cohort depends on rounds that are over, never on the one that is running.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

ClientIds = npt.NDArray[np.int64]
Numbers = npt.NDArray[np.float64]

NEVER = -1
_COLUMNS = {"losses": np.nan, "last_rounds": NEVER, "durations": np.nan}


class Population:
    """What the server knows of all clients, sampled or not.

    Args:
        num_examples: training examples of each client, shape (num_clients,).
        is_available: who can be asked at all, bool, shape (num_clients,); everybody if None.

    Example:
        >>> population = Population(np.array([10, 20, 30]))
        >>> population.note([2], round_index=0, losses={2: 0.5})
        >>> population.losses, population.last_rounds
        (array([nan, nan, 0.5]), array([-1, -1,  0]))
    """

    def __init__(
        self,
        num_examples: npt.NDArray[np.int64],
        is_available: npt.NDArray[np.bool_] | None = None,
    ) -> None:
        self.num_examples = num_examples
        self.is_available = is_available

    # made when they are first looked at: most samplers never do

    @cached_property
    def losses(self) -> Numbers:
        """The last known training loss of each client, nan where none is known."""
        return np.full(self.num_clients, np.nan)

    @cached_property
    def last_rounds(self) -> ClientIds:
        """The last round that each took part in, `NEVER` if none."""
        return np.full(self.num_clients, NEVER, np.int64)

    @cached_property
    def durations(self) -> Numbers:
        """How long each was seen to take for a round, in seconds, nan where not known."""
        return np.full(self.num_clients, np.nan)

    @property
    def num_clients(self) -> int:
        """Number of clients, sampled or not."""
        return len(self.num_examples)

    @property
    def num_available(self) -> int:
        """Number of clients that can be asked."""
        available = self.is_available
        return self.num_clients if available is None else int(np.count_nonzero(available))

    @property
    def available_ids(self) -> ClientIds:
        """Who can be asked, increasing."""
        if self.is_available is None:
            return np.arange(self.num_clients)
        return np.flatnonzero(self.is_available)

    def restricted(self, is_available: npt.NDArray[np.bool_]) -> Population:
        """Return the same knowledge where only some of those who can be asked still can."""
        if self.is_available is not None:
            is_available = is_available & self.is_available
        other = Population(self.num_examples, is_available)
        other.losses, other.last_rounds = self.losses, self.last_rounds
        other.durations = self.durations
        return other

    def note(
        self,
        clients: list[int],
        *,
        round_index: int,
        losses: Mapping[int, float],
        durations: Mapping[int, float] | None = None,
    ) -> None:
        """Take in what a round has shown.

        Args:
            clients: who was asked.
            round_index: in which round.
            losses: training losses by client; what was known of the others stays.
            durations: seconds by client, likewise.
        """
        self.last_rounds[clients] = round_index
        for known, seen in ((self.losses, losses), (self.durations, durations or {})):
            known[list(seen)] = list(seen.values())

    def state_dict(self) -> dict[str, Any]:
        """Return what is known of those clients of whom anything is, as tensors."""
        known = np.flatnonzero((self.last_rounds != NEVER) | ~np.isnan(self.losses))
        columns = {name: getattr(self, name)[known] for name in _COLUMNS}
        return {"clients": torch.from_numpy(known)} | {
            name: torch.from_numpy(values) for name, values in columns.items()
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Know exactly what `state_dict` told."""
        for name, unknown in _COLUMNS.items():
            column = getattr(self, name)
            column[:] = unknown
            column[state["clients"].numpy()] = state[name].numpy()
