"""A round, from the clients that are asked to the server's step. Read this first.

    plan → what clients get → local training → what they send → the server folds it in
    all have sent → processes meet → the server steps → memories count → the next round

`Round` is what the loop drives. In several processes there are as many of them, which train
different clients, meet once per round and then step the same. What else happens in a round is a
`Stage`; how clients train is `Training`'s; how updates become one is the server's.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn
from torch import Tensor

from fl_lightning.core.errors import ClientFailure, ConfigurationError, RoundFailure
from fl_lightning.core.update import GlobalModel, Updates
from fl_lightning.federation.groups import ClientGroup
from fl_lightning.federation.processes.exchange import Meeting
from fl_lightning.federation.round_record import RoundRecord
from fl_lightning.federation.run import Run
from fl_lightning.federation.stage import Sent, Stages, Start
from fl_lightning.federation.stages.cost import cost_line
from fl_lightning.federation.training import Training
from fl_lightning.server.server import Server


class Round:
    """Runs the rounds of one fit, one after the other.

    Args:
        run: what is asked for, who takes part, and what trains.
        stages: what else happens, in order.
        make_server: of the first global model.
        clients_side: makes the clients' side; None for clients that train here.

    Attributes:
        run: as given.
        stages: as given.
        clients: the clients' side.
        server: the server's side: the global model and how it moves.
        memory: what clients remember.
        record: what is known of the present round, or of the last one until the next begins.
        is_kept_by_lightning: whether the checkpoint's weights hold every bit of the server's model.
    """

    def __init__(
        self,
        run: Run,
        stages: Stages,
        make_server: Callable[[GlobalModel], Server],
        clients_side: Callable[[Run, Stages], Training] | None = None,
    ) -> None:
        self.run, self.stages, self.memory = run, stages, run.memory
        self.clients = (clients_side or Training)(run, stages)
        for stage in stages:
            stage.check_buffers(self.clients.num_known_state)
        self.server = make_server(run.local.read())
        self.record = RoundRecord()
        self._meeting = Meeting(run, stages)
        self._has_come = self._cost_is_told = False
        self._place()

    # One group of clients after the other …

    def train_group(self, group: ClientGroup) -> None:
        """Train some clients of the present round and fold in their updates.

        Afterwards the module holds the global model again, whatever happened.

        Raises:
            ClientFailure: if a client's update cannot be used and failures are not skipped. Of
                several processes all raise it, when they meet.
        """
        began = time.perf_counter()
        if not self._has_begun and self.clients.settle_state(group, self.run.ranks):
            self.follow_state()
        self._open()
        try:
            with self.clients.metrics_kept_apart():
                self.clients.settle_engine(self.server.model, group, self.run.ranks)
                if self._meeting.failure is None:
                    # after an interruption some of the group are done, the last that were noted
                    finished = set(self.record.finished[-len(group) :])
                    self._train([client for client in group if client not in finished])
        except (ClientFailure, ConfigurationError) as failure:
            self._meeting.fail(failure)
        finally:
            self.clients.restore(self.server.model)
        if not self.run.trainer.is_last_batch:
            self.run.groups.advance()
        self.record.seconds += time.perf_counter() - began

    def _train(self, clients: Sequence[int]) -> None:
        already_lost = len(self.record.lost)
        work = self.stages.work(self.clients.work_of(clients), self.record)  # who will send
        starts = self.stages.down(self.server.model, work)  # what they get
        if lost := self.record.lost[already_lost:]:
            self.finish(lost, starts[0][0].num_bytes)
        for start, together in starts:
            self.clients.train(start, together, self)  # who hands what they send to `receive`

    def receive(self, updates: Updates, start: Start) -> None:
        """Have updates go their way, and fold in what arrives."""
        if self.stages.buffers_stay:
            updates = replace(updates, buffers=updates.buffers[:, :0])
        for sent in self.stages.up(updates, start):
            self.take(sent)

    def take(self, sent: Sent) -> None:
        """Fold in updates that have arrived."""
        self.server.receive(sent.arrived)
        self.record.means.reductions |= self.run.collector.reductions
        self.record.add(sent.made, num_bytes=sent.num_bytes, error=sent.error)

    def skip(self, failure: ClientFailure) -> None:
        """Note why a client's update cannot be used, or raise it."""
        located = f"round {self.run.round_index}, {failure}"
        if self.run.options.on_client_failure == "raise":
            failure.args = (located,)
            raise failure
        self.record.skipped[failure.client_id] = located

    def finish(self, clients: Sequence[int], num_bytes: int) -> None:
        """Note that clients are done, and how many bytes each was sent."""
        self.record.finish(list(clients), num_bytes=num_bytes)

    @contextmanager
    def all_or_nothing(self) -> Iterator[None]:
        """Have the updates inside the block count as a whole, or not at all if it fails."""
        parts = [self.server, *self.stages]
        before, noted = [_copied(part.round_state()) for part in parts], self.record.state_dict()
        waiting = self.memory.clients.waiting_keys
        try:
            yield
        except BaseException:  # also an interruption, after which a checkpoint may follow
            for part, state in zip(parts, before, strict=True):
                part.load_round_state(state)
            self.record.load_state_dict(noted)
            self.memory.clients.discard(keep=waiting)
            raise

    # … and then the server.

    def close_round(self) -> None:
        """Step the server and put the new model into the module.

        Raises:
            ClientFailure: in all processes, if a client failed in one.
            RoundFailure: if fewer clients than ``min_replies`` sent a valid update.
        """
        self._open()  # there may have been no client
        self.record, began = self._meeting.hold(self.record, self.server)
        self._check_replies()
        for stage in self.stages:
            stage.settle(self.record)
        # in a checkpoint it would tell who took part; no cohort that goes with privacy depends on it
        if not (self.stages.hides_clients or self.stages.hides_round):
            self._note_clients()
        self.memory.clients.commit()
        self.record.update_norm = float(self.server.close_round(self.stages.on_server))
        for stage in self.stages:
            stage.stepped(self.server.model.params)
        with self.clients.metrics_kept_apart():
            self.record.pooled = self.run.collector.collect_metrics()
        self._has_come = False
        self.run.local.end_round(self.server.model)
        self.run.groups.advance()  # only now: a round that failed is no finished one
        self.record.seconds += time.perf_counter() - began
        for stage in self.stages:
            stage.close(self.record)

    def _check_replies(self) -> None:
        record, wanted = self.record, self.run.options.min_replies
        for client in sorted(record.skipped) if not self.stages.hides_clients else ():
            rank_zero_warn(f"skipped: {record.skipped[client]}")
        if record.num_sampled and self.server.num_replies < wanted:
            raise RoundFailure(
                f"round {self.run.round_index}: {self.server.num_replies} of "
                f"{record.num_sampled} clients sent a valid update, min_replies is {wanted}"
            )

    def _note_clients(self) -> None:
        """Keep what the round has shown of its clients, for cohorts that choose by it."""
        self.run.groups.population.note(
            self.record.finished,
            round_index=self.run.round_index,
            losses=self.record.means.by_client("train/loss"),
            durations=self.record.durations,
        )

    # Between rounds.

    @property
    def _has_begun(self) -> bool:
        """Whether the present round has; the open one of a checkpoint may have been broken off."""
        return self.server.is_open and self.server.round_index == self.run.round_index

    def _open(self) -> None:
        self.follow_masks()
        if not self._has_come:  # by now, unlike in the constructor, Lightning has restored both
            self.clients.start_round()
            self._has_come = True
        if not self._has_begun:
            self.record = RoundRecord(began_at=self.record.ended_at or 0.0)
            if self._module_has_all:  # hooks between rounds may have changed it
                self.server.replace_model(self.run.local.read())
            number = self.run.round_index
            self.memory.clients.discard()
            for stage in self.stages:
                stage.open(number, self.server.model)
            self.server.open_round(number)
        if not self._cost_is_told:  # not before hooks have changed the model for the last time
            self._cost_is_told = True
            self._announce()

    def _announce(self) -> None:
        num_clients = self.run.groups.num_clients
        num_bytes = self.stages.more_bytes(self.server.model, num_clients)
        line = cost_line(*num_bytes, num_clients=num_clients, num_rounds=self.run.num_rounds)
        rank_zero_info(f"bytes: {line}")
        for stage in self.stages:
            for line in stage.announce():
                rank_zero_info(line)

    def follow_state(self) -> None:
        """Have the server hold what is known to be clients' state now."""
        buffers = self.run.local.buffers.read()
        for stage in self.stages:
            stage.check_buffers(buffers.numel())
        self.server.replace_buffers(buffers)
        self._note_where_it_is_kept()

    def follow_masks(self) -> None:
        """Have other coordinates travel from here on if masks changed between rounds.

        Raises:
            ConfigurationError: if they may not change.
        """
        if not self.run.local.has_new_masks or self._has_begun:
            return
        before, kept = self.run.local.space, self.is_kept_by_lightning
        self.clients.renew_space()
        after = self.run.local.space
        if (after.names, after.mask_fingerprint()) == (before.names, before.mask_fingerprint()):
            return  # the same ones were set again, as resuming does
        positions = after.positions_in(before)
        model = self.run.local.read()
        if not kept:  # the server's has bits that the module lacks
            old = self.server.model
            known = old.params[positions.clamp(min=0)]
            model = GlobalModel(torch.where(positions >= 0, known, model.params), old.buffers)
        for stage in self.stages:
            stage.relocate(positions)
        self.server.relocate(model, positions)
        self._place()

    def _place(self) -> None:
        for stage in self.stages:
            stage.place(self.run.local.space)
        self._note_where_it_is_kept()

    def _note_where_it_is_kept(self) -> None:
        spaces = (self.run.local.space, self.run.local.buffers)
        saved = self.run.module.state_dict().keys()
        self._module_has_all = all(s.is_lossless and saved >= set(s.names) for s in spaces)
        # Lightning loads a checkpoint's weights before it makes a module one of double precision
        self.is_kept_by_lightning = self._module_has_all and all(
            s.dtype == torch.float32 for s in spaces
        )

    def in_progress_bar(self, name: str) -> bool:
        """Return whether a logged value is shown beside the progress bar."""
        return name == "train/loss" or name in self.run.collector.prog_bar


def _copied(state: Any) -> Any:
    """Return what `copy.deepcopy` does, of a tensor in a fifth of the time."""
    if isinstance(state, Tensor):
        return state.clone()
    if isinstance(state, dict):
        return {name: _copied(value) for name, value in state.items()}
    return copy.deepcopy(state)
