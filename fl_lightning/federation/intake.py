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
from fl_lightning.core.update import ClientUpdate, GroupUpdate, LazyDeltas
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
        update: ClientUpdate,
        start: Start,
        round_index: int,
        server: Server,
        record: RoundRecord,
    ) -> None:
        """Send a client's update and fold in what arrives, as stale as it is.

        Args:
            update: of a client.
            start: what it began from.
            round_index: the round in which it arrives.
            server: folds it in.
            record: notes it.
        """
        if not self._sends_buffers:
            update = replace(update, buffers=update.buffers[:0])
        memory = None
        if self._path.has_memory:
            kept = self._memory.get(_FEEDBACK, update.client_id)
            memory = None if kept is None else kept.to(update.delta.device)
        arrival = self._path.send(update, round_index, memory)
        if arrival.memory is not None:
            self._memory.put(_FEEDBACK, update.client_id, arrival.memory)
        server.receive(self._corrector.counted(start.counted(arrival.update)))
        num_bytes = arrival.num_bytes
        if not self._sends_deltas:
            num_bytes = bytes_up(replace(update, delta=update.delta[:0]))
        record.add(update, num_bytes=num_bytes + self.more_bytes_up(update.delta))
        if not self._path.is_empty:
            record.add_on_the_way(update, arrival.error)

    def receive_group(
        self,
        group: GroupUpdate,
        start: Start,
        round_index: int,
        server: Server,
        record: RoundRecord,
    ) -> None:
        """Send the updates of clients that trained together and fold in what arrives."""
        if not self._path.is_empty:
            for update in group:
                self.receive(update, start, round_index, server, record)
            return
        if not self._sends_buffers:
            group = replace(group, buffers=group.buffers[:, :0])
        server.receive_group(self._corrector.counted_group(start.counted_group(group)))
        sent = group if self._sends_deltas else replace(group, deltas=group.whole[:, :0])
        record.add_group(group, num_bytes=bytes_up(sent) + self.more_bytes_up(group.deltas))

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
