"""One federated round, from the sampled cohort to the server step. Read this file first.

cohort → down → for every client update: up → receive → the server step

Clients train in the module, in slots or at sites (`Clients`). Each further feature of a round is a
`Stage`. The server aggregates the updates. `fit_rounds` holds what surrounds a round of a fit, such as
masks that change between rounds and several processes.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from contextlib import ExitStack, closing
from typing import Protocol

from lightning.pytorch.utilities import rank_zero_warn

from fl_lightning.client.log_collector import LogCollector
from fl_lightning.client.memory import ClientMemory
from fl_lightning.client.work import GroupWork
from fl_lightning.core.errors import ClientFailure, RoundFailure
from fl_lightning.federation.plan import WorkPlan
from fl_lightning.federation.round_record import RoundRecord
from fl_lightning.federation.stage import Missing, Stages, Start, Upload
from fl_lightning.server.server import Server


class Clients(Protocol):
    """The clients' side of a round: trains clients and yields their updates.

    Attributes:
        plan: draws the work of clients in a round.
        stages_ahead: stages that process each update after `train` yields it.
        collector: collects the values that clients log.
    """

    plan: WorkPlan
    stages_ahead: Stages
    collector: LogCollector

    def train(self, start: Start, work: GroupWork) -> Generator[Upload | Missing, None, None]:
        """Train clients that start from the same model and options, and yield their updates or failures."""


class Round:
    """Runs federated rounds, one after the other.

    Args:
        clients: trains the clients and yields their updates.
        server: holds the global model, aggregates updates and steps.
        stages: further features of a round, in the order in which updates pass them.
        memory: client states that last from round to round.
        skips_failures: whether a round continues without the clients that fail.
        min_replies: fewest valid updates of a round whose cohort is not empty.

    Attributes:
        record: counts and metrics of the open round; between rounds, of the last one.
    """

    def __init__(
        self,
        clients: Clients,
        server: Server,
        stages: Stages,
        memory: ClientMemory,
        *,
        skips_failures: bool = False,
        min_replies: int = 0,
    ) -> None:
        self.clients, self.server, self.stages, self.memory = clients, server, stages, memory
        self._skips_failures, self._min_replies = skips_failures, min_replies
        self.record = RoundRecord()

    def open(self, number: int) -> None:
        """Open a round at the server and in every `Stage`; an interrupted round starts again from its first client."""
        before = self.record  # of the last round, or of this round's interrupted attempt
        began_at = before.began_at if before.ended_at is None else before.ended_at
        self.record = RoundRecord(began_at=began_at)
        self.memory.discard()
        for stage in self.stages.having["open"]:
            stage.open(number, self.server.model)
        self.server.open_round(number)

    def train(self, cohort: Sequence[int]) -> None:
        """Train clients of the open round and aggregate their updates.

        Raises:
            ClientFailure: if a client's update cannot be used and failures are not skipped.
        """
        record, lost_before, ahead = self.record, len(self.record.lost), self.clients.stages_ahead
        plan = self.clients.plan
        work = plan.of(cohort, self.server.round_index)
        for stage in self.stages.having["work"]:  # leaves out clients whose updates will be lost
            work = stage.work(work, record)
        starts = self.stages.down(self.server.model, work)  # the models that clients receive
        if lost := record.lost[lost_before:]:  # these clients have received the model as well
            record.finished += lost
            record.total_bytes_down += starts[0][0].num_bytes * len(lost)
        for start, together in starts:
            with closing(self.clients.train(start, together)) as updates:
                for sent in updates:
                    if isinstance(sent, Missing):
                        self.raise_or_skip(sent.failure)
                        ended = [sent.failure.client_id]
                    else:
                        for upload in ahead.up(sent) if ahead.having["up"] else (sent,):
                            self.server.receive(upload.arrived)
                            counts = plan.num_examples[upload.made.client_ids].tolist()
                            record.add(upload.made, counts, upload.num_bytes, error=upload.error)
                        ended = sent.made.client_ids
                    record.finished += ended
                    record.total_bytes_down += sent.start.num_bytes * len(ended)
                    sent = upload = None  # type: ignore[assignment]  # memory for the next client
        record.means.reductions |= self.clients.collector.reductions

    def raise_or_skip(self, failure: ClientFailure) -> None:
        """Record a client's failure if failures are skipped; else raise it."""
        located = f"round {self.server.round_index + 1}, {failure}"
        if not self._skips_failures:
            failure.args = (located,)
            raise failure
        self.record.skipped[failure.client_id] = located

    def step(self) -> None:
        """Apply the server step: turn the aggregate of the round's updates into the new global model.

        Raises:
            RoundFailure: if too few clients sent a valid update, or none has trained.
        """
        record = self.record
        for client in sorted(record.skipped) if not self.stages.hides_clients else ():
            rank_zero_warn(f"skipped: {record.skipped[client]}")
        if record.finished and self.server.num_replies < self._min_replies:
            raise RoundFailure(
                f"round {self.server.round_index + 1}: {self.server.num_replies} of {len(record.finished)} "
                f"clients sent a valid update, and federation.min_replies is {self._min_replies}: lower it, "
                "or find out why the other clients failed"
            )
        for stage in self.stages.having["before_step"]:
            stage.before_step(self.record)
        has_replies, having = self.server.num_replies > 0, self.stages.having
        change = self.stages.on_server if having["on_server"] else None
        with self.server.reversible():
            record.update_norm = float(self.server.close_round(change))
            if has_replies and not record.update_norm and not record.means.names:
                raise RoundFailure(
                    f"round {self.server.round_index + 1}: no client returned a loss, and the model has not "
                    "changed: return the loss of a batch from training_step (None skips the batch)"
                )
            for stage in having["stepped"]:
                stage.stepped(self.server.model.params)
        self.memory.commit()  # only now: a checkpoint after an error holds no state ahead of its model

    def close(self) -> None:
        """Tell every `Stage` that the round is over; called once the module has the new model."""
        with ExitStack() as closings:  # an error in one stage leaves no other behind the model
            for stage in reversed(self.stages.having["close"]):
                closings.callback(stage.close, self.record)
