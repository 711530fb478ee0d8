"""What becomes of an update when its client has trained: learnt from, sent, folded in, noted.

    correction learns from Δ  →  Δ goes its way  →  server folds in Δ'  →  record notes norms, bytes

A client's memory, like its update, counts from the round's end on.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from torch import Tensor

from fl_lightning.client.memory import ClientMemory
from fl_lightning.core.space import Space
from fl_lightning.core.update import ClientUpdate, LazyDeltas, Updates
from fl_lightning.federation.round_record import RoundRecord
from fl_lightning.federation.stages.corrector import Corrector
from fl_lightning.federation.stages.older_models import Start
from fl_lightning.server.server import Server
from fl_lightning.updates.path import UpdatePath
from fl_lightning.updates.wire.traffic import bytes_up

_FEEDBACK = "error feedback"


class Intake:
    """Takes in the updates of one fit.

    Args:
        path: what happens to updates on their way.
        memory: what clients remember.
        corrector: learns from updates.
        sends_buffers: whether clients send their buffers with their updates.
        sends_deltas: whether deltas travel in clear; if not, only the rest of a message counts here.
    """

    def __init__(
        self,
        path: UpdatePath,
        memory: ClientMemory,
        corrector: Corrector,
        *,
        sends_buffers: bool = True,
        sends_deltas: bool = True,
    ) -> None:
        self._path, self._memory, self._corrector = path, memory, corrector
        self._sends_buffers, self._sends_deltas = sends_buffers, sends_deltas

    def learn(
        self, update: ClientUpdate, start: Start, space: Space, gradient: Callable[[], Tensor]
    ) -> None:
        """Have the correction learn from an update that is used.

        Args:
            update: of a client.
            start: what the client began from.
            space: of its coordinates.
            gradient: gives that of the client's whole shard there, shape (k,).

        Raises:
            ClientFailure: if the gradient is asked for and cannot be computed.
        """
        self._corrector.accept(update, start.model.params, space, gradient)

    def receive(
        self,
        updates: Updates,
        start: Start,
        round_index: int,
        server: Server,
        record: RoundRecord,
    ) -> None:
        """Send clients' updates and fold in what arrives, as stale as it is.

        Args:
            updates: theirs.
            start: what they began from.
            round_index: the round in which they arrive.
            server: folds them in.
            record: notes them.
        """
        if not self._sends_buffers:
            updates = replace(updates, buffers=updates.buffers[:, :0])
        if self._path.is_empty:
            server.receive(self._corrector.counted(start.counted(updates)))
            sent = updates
            if not self._sends_deltas:
                sent = replace(updates, deltas=updates.whole[:, :0], active=None)
            num_bytes = bytes_up(sent) + self.more_bytes_up(updates.deltas)
            record.add(updates, num_bytes=num_bytes)
            return
        for update in updates:
            memory = None
            if self._path.has_memory:
                kept = self._memory.get(_FEEDBACK, update.client_id)
                memory = None if kept is None else kept.to(update.delta.device)
            arrival = self._path.send(update, round_index, memory)
            if arrival.memory is not None:
                self._memory.put(_FEEDBACK, update.client_id, arrival.memory)
            arrived = Updates.of(arrival.update)
            server.receive(self._corrector.counted(start.counted(arrived)))
            num_bytes = arrival.num_bytes + self.more_bytes_up(update.delta)
            record.add(Updates.of(update), num_bytes=num_bytes, error=arrival.error)

    def more_bytes_up(self, like: Tensor | LazyDeltas) -> int:
        """Return how many bytes a client sends for its correction, see `Corrector.bytes_up`."""
        return self._corrector.bytes_up(like, is_lossy=not self._path.is_empty)

    @contextmanager
    def all_or_nothing(self, server: Server, record: RoundRecord) -> Iterator[None]:
        """Have the updates inside the block count as a whole, or not at all if it fails."""
        before, noted = _copied(server.round_state()), record.state_dict()
        learnt, waiting = _copied(self._corrector.round_state()), self._memory.waiting_keys
        try:
            yield
        except BaseException:  # also an interruption, after which a checkpoint may follow
            server.load_round_state(before)
            record.load_state_dict(noted)
            self._corrector.load_round_state(learnt)
            self._memory.discard(keep=waiting)
            raise

    def relocate(self, positions: Tensor) -> None:
        """Go on in other coordinates, see `Server.relocate`; what is new is 0."""
        self._corrector.relocate(positions)
        if self._path.has_memory:
            self._memory.relocate(_FEEDBACK, positions)


def _copied(state: Any) -> Any:
    """Return what `copy.deepcopy` does, of a tensor in a fifth of the time."""
    if isinstance(state, Tensor):
        return state.clone()
    if isinstance(state, dict):
        return {name: _copied(value) for name, value in state.items()}
    return copy.deepcopy(state)
