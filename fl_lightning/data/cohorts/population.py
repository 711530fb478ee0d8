"""The server's information about all clients, as arrays: 24 MB for a million clients.

The federation updates it when a round ends, equally in every process, and saves it in checkpoints: a
cohort depends on completed rounds, never on the current one.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

ClientIds = npt.NDArray[np.int64]
Numbers = npt.NDArray[np.float64]

NEVER = -1
_COLUMNS = {"losses": np.nan, "last_rounds": NEVER, "durations": np.nan}


class Population:
    """The server's record of every client: number of examples, last loss, last round, last duration.

    Args:
        num_examples: training examples of each client, shape (num_clients,).
        is_available: True for clients that can be sampled, bool of shape (num_clients,); None for all.

    Attributes:
        losses: last known training loss of each client, nan if unknown.
        last_rounds: last round in which each client was sampled; `NEVER` (-1) if it never was.
        durations: last observed duration of a round of each client in seconds, nan if unknown.

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
        self.losses: Numbers = np.full(len(num_examples), np.nan)
        self.last_rounds: ClientIds = np.full(len(num_examples), NEVER, np.int64)
        self.durations: Numbers = np.full(len(num_examples), np.nan)

    @property
    def num_clients(self) -> int:
        """Number of all clients, available or not."""
        return len(self.num_examples)

    @property
    def num_available(self) -> int:
        """Number of clients that can be sampled."""
        available = self.is_available
        return self.num_clients if available is None else int(np.count_nonzero(available))

    @property
    def available_ids(self) -> ClientIds:
        """Ids of the clients that can be sampled, in increasing order."""
        if self.is_available is None:
            return np.arange(self.num_clients)
        return np.flatnonzero(self.is_available)

    def restricted(self, is_available: npt.NDArray[np.bool_]) -> Population:
        """Return the same record of clients, in which only the given clients can be sampled."""
        if self.is_available is not None:
            is_available = is_available & self.is_available
        other = copy.copy(self)
        other.is_available = is_available
        return other

    def note(
        self,
        clients: list[int],
        *,
        round_index: int,
        losses: Mapping[int, float],
        durations: Mapping[int, float] | None = None,
    ) -> None:
        """Record the losses and durations of a round's clients.

        Args:
            clients: clients of the cohort.
            round_index: number of the round.
            losses: training losses by client; other clients keep theirs. A loss that is not finite,
                which a module may log, is unknown.
            durations: seconds by client; other clients keep theirs.
        """
        self.last_rounds[clients] = round_index
        for known, seen in ((self.losses, losses), (self.durations, durations or {})):
            values = np.array(list(seen.values()), np.float64)
            known[list(seen)] = np.where(np.isfinite(values), values, np.nan)

    def state_dict(self) -> dict[str, Any]:
        """Return, as tensors, the record of every client that was sampled or has a known loss."""
        known = np.flatnonzero((self.last_rounds != NEVER) | ~np.isnan(self.losses))
        columns = {name: getattr(self, name)[known] for name in _COLUMNS}
        return {"clients": torch.from_numpy(known)} | {
            name: torch.from_numpy(values) for name, values in columns.items()
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Replace the record of all clients by that of a `state_dict`."""
        for name, unknown in _COLUMNS.items():
            column = getattr(self, name)
            column[:] = unknown
            column[state["clients"].numpy()] = state[name].numpy()
