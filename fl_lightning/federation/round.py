"""A round, from the clients that are asked to the server's step. Read this first.

    cohort → down → for every update of its clients: up → receive → the server's step

Clients train wherever they are: in the module, in slots, at sites (`Clients`). What else happens in a
round is a `Stage`. How updates become one is the server's affair. What surrounds a round in a fit,
such as masks that change between rounds and several processes, is in `fit_rounds`.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import AbstractContextManager, closing, contextmanager
from typing import Any, Protocol, runtime_checkable

from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor

from fl_lightning.client.log_collector import LogCollector
from fl_lightning.client.memory import ClientMemory
from fl_lightning.client.work import GroupWork
from fl_lightning.core.errors import ClientFailure, RoundFailure
from fl_lightning.federation.round_record import RoundRecord
from fl_lightning.federation.stage import Missing, Processes, Stages, Start, Upload
from fl_lightning.server.server import Server

# Makes a block whose updates count as a whole: those that have come are undone if it raises.
Transaction = Callable[[], AbstractContextManager[None]]


class Clients(Protocol):
    """The clients' side of a round.

    Attributes:
        stages_ahead: that updates have to pass once `train` has yielded them.
        collector: what clients log.
    """

    stages_ahead: Stages
    collector: LogCollector

    def work_of(self, clients: Sequence[int]) -> GroupWork:
        """Local work of some clients in the present round."""

    def train(
        self, start: Start, work: GroupWork, transaction: Transaction
    ) -> Generator[Upload | Missing, None, None]:
        """Train clients that begin alike, and yield what they send.

        Those that count as a whole are yielded inside a transaction.
        """


class Round:
    """Runs one round after the other.

    Args:
        clients: the clients' side.
        server: the server's side: the global model and how it moves.
        stages: what else happens, in order.
        memory: what clients remember.
        skips_failures: whether a round goes on without clients whose update cannot be used.
        min_replies: fewest updates of a round in which anybody takes part.
        processes: that train clients of a round; they have exchanged their updates before `step`.

    Attributes:
        record: what is known of the present round, or of the last one until the next begins.
    """

    def __init__(
        self,
        clients: Clients,
        server: Server,
        stages: Stages,
        memory: ClientMemory,
        *,
        processes: Processes,
        skips_failures: bool = False,
        min_replies: int = 0,
    ) -> None:
        self.clients, self.server, self.stages, self.memory = clients, server, stages, memory
        self._processes = processes
        self._skips_failures, self._min_replies = skips_failures, min_replies
        self._parts = [part for part in (server, *stages) if isinstance(part, HasRoundState)]
        self.record = RoundRecord()

    def open(self, number: int) -> None:
        """Begin a round."""
        before = self.record  # of the last round, or of this one if it was broken off
        began_at = before.began_at if before.ended_at is None else before.ended_at
        self.record = RoundRecord(began_at=began_at)
        self.memory.discard()
        for stage in self.stages.having["open"]:
            stage.open(number, self.server.model)
        self.server.open_round(number)

    def train(self, cohort: Sequence[int]) -> None:
        """Train the cohort of the open round, or a part of it, and fold in what its clients send.

        Raises:
            ClientFailure: if a client's update cannot be used and failures are not skipped.
        """
        record, lost_before, ahead = self.record, len(self.record.lost), self.clients.stages_ahead
        work = self.clients.work_of(cohort)
        for stage in self.stages.having["work"]:  # who will send
            work = stage.work(work, record)
        starts = self.stages.down(self.server.model, work)  # what they get
        if lost := record.lost[lost_before:]:  # of nobody else there may be no start
            record.finished += lost
            record.total_bytes_down += starts[0][0].num_bytes * len(lost)
        for start, together in starts:
            with closing(self.clients.train(start, together, self._transaction)) as updates:
                for sent in updates:
                    if isinstance(sent, Missing):
                        self.raise_or_skip(sent.failure)
                        ended = [sent.failure.client_id]
                    else:
                        for upload in ahead.up(sent) if ahead.having["up"] else (sent,):
                            self.server.receive(upload.arrived)
                            record.add(upload.made, num_bytes=upload.num_bytes, error=upload.error)
                        ended = sent.made.client_ids
                    record.finished += ended
                    record.total_bytes_down += sent.start.num_bytes * len(ended)
                    sent = upload = None  # type: ignore[assignment]  # free for the next client
        record.means.reductions |= self.clients.collector.reductions

    def raise_or_skip(self, failure: ClientFailure) -> None:
        """Note why a client's update cannot be used, or raise it."""
        located = f"round {self.server.round_index}, {failure}"
        if not self._skips_failures:
            failure.args = (located,)
            raise failure
        self.record.skipped[failure.client_id] = located

    def step(self) -> None:
        """Step the server.

        Raises:
            RoundFailure: if too few clients sent a valid update, or none has trained.
        """
        record = self.record
        for client in sorted(record.skipped) if not self.stages.hides_clients else ():
            rank_zero_warn(f"skipped: {record.skipped[client]}")
        if record.finished and self.server.num_replies < self._min_replies:
            raise RoundFailure(
                f"round {self.server.round_index}: {self.server.num_replies} of {len(record.finished)} "
                f"clients sent a valid update, min_replies is {self._min_replies}"
            )
        for stage in self.stages.having["settle"]:
            stage.settle(self.record, self._processes)
        self.memory.commit()
        has_replies, having = self.server.num_replies > 0, self.stages.having
        change = self.stages.on_server if having["on_server"] else None
        record.update_norm = float(self.server.close_round(change))
        if has_replies and not record.update_norm and not record.means.names:
            raise RoundFailure(
                f"round {self.server.round_index}: no client has a loss, and the model has not moved: "
                "have training_step return the loss of a batch; None skips the batch"
            )
        for stage in having["stepped"]:
            stage.stepped(self.server.model.params)

    def close(self) -> None:
        """End the round."""
        for stage in self.stages.having["close"]:
            stage.close(self.record)

    @contextmanager
    def _transaction(self) -> Iterator[None]:
        """Undoes the updates that have come inside this block if it raises.

        Clients that train together in slots count as a whole or not at all: if slots meet what they
        cannot run, or a run is interrupted and saved, no half of a group may remain.
        """
        states = [_copied(part.round_state()) for part in self._parts]
        noted, waiting = self.record.state_dict(), self.memory.waiting_keys
        try:
            yield
        except BaseException:  # also an interruption, after which a checkpoint may follow
            for part, state in zip(self._parts, states, strict=True):
                part.load_round_state(state)
            self.record.load_state_dict(noted)
            self.memory.discard(keep=waiting)
            raise


@runtime_checkable
class HasRoundState(Protocol):
    """A part of a round that changes while updates come."""

    def round_state(self) -> Any:
        """Return the state of the open round."""

    def load_round_state(self, state: Any) -> None:
        """Restore what `round_state` returned."""


def _copied(state: Any) -> Any:
    """Return a deep copy; of a tensor in a fifth of the time of `copy.deepcopy`."""
    if isinstance(state, Tensor):
        return state.clone()
    if isinstance(state, dict):
        return {name: _copied(value) for name, value in state.items()}
    return copy.deepcopy(state)
