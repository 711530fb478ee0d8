"""What becomes of an update when its client has trained: learnt from, sent, folded in, noted.

    correction learns from Δ  →  Δ goes its way  →  server folds in Δ'  →  record notes norms, bytes

A client's memory, like its update, counts from the round's end on.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from torch import Tensor

from fl_lightning.client.local_solver import LocalSolver
from fl_lightning.client.memory import ClientMemory
from fl_lightning.core.space import Space
from fl_lightning.core.update import ClientUpdate, GroupUpdate
from fl_lightning.federation.corrector import Corrector
from fl_lightning.federation.round_record import RoundRecord
from fl_lightning.server.server import Server
from fl_lightning.updates.path import UpdatePath
from fl_lightning.updates.traffic import bytes_up

_FEEDBACK = "error feedback"
# From a client's id, the gradient of its whole shard at the global model, shape (k,).
GradientOf = Callable[[int], Tensor]


class Intake:
    """Takes in the updates of one fit.

    Args:
        path: what happens to updates on their way.
        memory: what clients remember.
        corrector: learns from updates; None without a correction.
        solver: counts the gradients that an update adds up to; None if nobody asks.
    """

    def __init__(
        self,
        path: UpdatePath,
        memory: ClientMemory,
        corrector: Corrector | None,
        solver: LocalSolver | None,
    ) -> None:
        self._path, self._memory = path, memory
        self._corrector, self._solver = corrector, solver

    def learn(
        self, update: ClientUpdate, server: Server, space: Space, gradient: GradientOf
    ) -> None:
        """Have the correction learn from an update that is used.

        Raises:
            ClientFailure: if the gradient that it asks for cannot be computed.
        """
        if self._corrector is not None:
            client = update.client_id
            self._corrector.accept(update, server.model.params, space, lambda: gradient(client))

    def receive(
        self, update: ClientUpdate, round_index: int, server: Server, record: RoundRecord
    ) -> None:
        """Send a client's update and fold in what arrives."""
        client, kept = update.client_id, None
        if self._path.has_memory:
            kept = self._memory.get(_FEEDBACK, client)
        memory = None if kept is None else kept.to(update.delta.device)
        arrival = self._path.send(update, round_index, memory)
        if arrival.memory is not None:
            self._memory.put(_FEEDBACK, client, arrival.memory)
        server.receive(self._counted(arrival.update))
        record.add(update, num_bytes=arrival.num_bytes)
        if not self._path.is_empty:
            record.add_on_the_way(update, arrival.error)

    def receive_group(
        self, group: GroupUpdate, round_index: int, server: Server, record: RoundRecord
    ) -> None:
        """Send the updates of clients that trained together and fold in what arrives."""
        if not self._path.is_empty:
            for update in group:
                self.receive(update, round_index, server, record)
            return
        server.receive_group(self._counted_group(group))
        record.add_group(group, num_bytes=bytes_up(group))

    @contextmanager
    def all_or_nothing(self, server: Server, record: RoundRecord) -> Iterator[None]:
        """Have the updates inside the block count as a whole, or not at all if it fails."""
        before = copy.deepcopy((server.state_dict(), record.state_dict()))
        learnt = None if self._corrector is None else self._corrector.snapshot()
        waiting = self._memory.waiting_keys
        try:
            yield
        except BaseException:  # also an interruption, after which a checkpoint may follow
            server.load_state_dict(before[0])
            record.load_state_dict(before[1])
            self._memory.discard(keep=waiting)
            if self._corrector is not None and learnt is not None:
                self._corrector.go_back(learnt)
            raise

    def relocate(self, positions: Tensor) -> None:
        """Go on in other coordinates, see `Server.relocate`; what is new is 0."""
        if self._path.has_memory:
            self._memory.relocate(_FEEDBACK, positions)

    def _counted(self, update: ClientUpdate) -> ClientUpdate:
        """Say how many gradients an update adds up to, where that is asked for."""
        if self._solver is None:
            return update
        steps = self._solver.effective_steps(update.num_steps)
        return dataclasses.replace(update, effective_steps=steps)

    def _counted_group(self, group: GroupUpdate) -> GroupUpdate:
        if self._solver is None:
            return group
        steps = [self._solver.effective_steps(number) for number in group.num_steps]
        return dataclasses.replace(group, effective_steps=steps)
