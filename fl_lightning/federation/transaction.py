"""All or nothing: what a round has taken in since a moment is undone if what follows fails.

Around the loop of a round, not in it. Clients that train together in slots count as a whole or not at all: if
slots meet what they cannot run, or a run is interrupted and saved, no half of a group may remain.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any, Protocol, Self, runtime_checkable

from torch import Tensor

from fl_lightning.client.memory import ClientMemory, Key
from fl_lightning.federation.round_record import RoundRecord


@runtime_checkable
class HasRoundState(Protocol):
    """A part of a round that changes while updates come."""

    def round_state(self) -> Any:
        """Return what the open round has brought so far."""

    def load_round_state(self, state: Any) -> None:
        """Restore what `round_state` returned."""


class Transaction:
    """Undoes the updates that came since `begin` if its block raises; without `begin` it does nothing.

    Args:
        parts: what changes while updates come: the server, the stages.
        record: of the round.
        memory: what clients remember.
    """

    def __init__(
        self, parts: Sequence[HasRoundState], record: RoundRecord, memory: ClientMemory
    ) -> None:
        self._parts, self._record, self._memory = parts, record, memory
        self._has_begun = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        if error is not None:  # also an interruption, after which a checkpoint may follow
            self.roll_back()

    def begin(self) -> None:
        """Start a transaction: what follows counts wholly or not at all."""
        self._states = [_copied(part.round_state()) for part in self._parts]
        self._noted = self._record.state_dict()
        self._waiting: frozenset[Key] = self._memory.waiting_keys
        self._has_begun = True

    def commit(self) -> None:
        """Make what has arrived count."""
        self._has_begun = False

    def roll_back(self) -> None:
        """Undo what came since `begin`, if it was called and not followed by `commit`."""
        if not self._has_begun:
            return
        for part, state in zip(self._parts, self._states, strict=True):
            part.load_round_state(state)
        self._record.load_state_dict(self._noted)
        self._memory.discard(keep=self._waiting)
        self._has_begun = False


def _copied(state: Any) -> Any:
    """Return what `copy.deepcopy` does, of a tensor in a fifth of the time."""
    if isinstance(state, Tensor):
        return state.clone()
    if isinstance(state, dict):
        return {name: _copied(value) for name, value in state.items()}
    return copy.deepcopy(state)
