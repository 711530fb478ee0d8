"""A round's calendar: broadcast, local training, aggregation, server step.

`RoundRunner` is what the loop drives. In several processes there are as many of them, which train
different clients, meet once per round and then step the same. It owns the server and everything
that a checkpoint inside a round must hold; the clients' work is `GroupTraining`'s.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from typing import Any

import torch
from lightning.fabric.utilities import move_data_to_device
from lightning.pytorch import Trainer
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn
from torch import Tensor

from fl_lightning.client.local_training import GlobalModel
from fl_lightning.core.errors import ClientFailure, ConfigurationError, RoundFailure
from fl_lightning.core.space import Space
from fl_lightning.federation.checkpoints.run_memory import RunMemory
from fl_lightning.federation.checkpoints.run_state import RunState
from fl_lightning.federation.group_training import GroupTraining
from fl_lightning.federation.groups import ClientGroup, RoundGroups
from fl_lightning.federation.intake import Intake
from fl_lightning.federation.interruption import interruption_of
from fl_lightning.federation.processes.exchange import (
    Failure,
    Report,
    first_failure,
    logged_metrics,
    merged_record,
    pool_metrics,
)
from fl_lightning.federation.processes.ranks import Ranks
from fl_lightning.federation.round_options import RoundOptions
from fl_lightning.federation.round_record import RoundRecord
from fl_lightning.federation.stages.corrector import Corrector
from fl_lightning.federation.stages.cost import cost_line
from fl_lightning.federation.stages.example_rounds import ExampleRounds
from fl_lightning.federation.stages.private_rounds import PrivateRounds
from fl_lightning.federation.stages.secure_rounds import SecureRounds
from fl_lightning.privacy.protected import Protected
from fl_lightning.server.aggregator import Aggregator
from fl_lightning.server.server import Server, ServerOptimizer, ServerSchedule
from fl_lightning.updates.path import UpdatePath


class RoundRunner:
    """Runs the rounds of one fit.

    Args:
        trainer: set up, with its optimizer built and its module on its device.
        options: what a round does.
        aggregator: how updates become one.
        groups: learns when a group is done.
        server_optimizer: how the global model moves.
        server_schedule: how its learning rate does.
        private: makes every round's aggregate private, or clients' local steps; nothing if None.

    Attributes:
        clients: the clients' part.
        server: the global model and how it moves.
        corrector: what clients add to their objective, and what is known for that.
        memory: what clients remember.
        record: what is known of the present round, or of the last one until the next begins.
        private: as given.
    """

    def __init__(
        self,
        trainer: Trainer,
        options: RoundOptions,
        groups: RoundGroups,
        aggregator: Aggregator,
        server_optimizer: ServerOptimizer,
        server_schedule: ServerSchedule | None = None,
        private: PrivateRounds | ExampleRounds | None = None,
    ) -> None:
        self.private = private
        self._private_sum = private if isinstance(private, PrivateRounds) else None
        self._trainer = trainer
        self._options = options
        self._groups = groups
        self._module = trainer.lightning_module
        self._ranks = Ranks(trainer)
        self._interruption = interruption_of(trainer)
        self._failure: Failure | None = None
        self._is_noted = self._cost_is_told = False
        self.memory = RunMemory(trainer, self._ranks, options.client_memory_bytes)
        self.corrector = Corrector(
            options.correction,
            self.memory.clients,
            options.num_clients,
            self._module,
            trainer.optimizers,
            aggregator,
        )
        self._path = UpdatePath(options.updates, options.seed)
        self._intake = Intake(
            self._path,
            self.memory.clients,
            self.corrector,
            sends_buffers=self._private_sum is None,
            sends_deltas=not isinstance(aggregator, Protected),
        )
        self.clients = GroupTraining(
            trainer, options, self.corrector, self._intake, self.memory.clients
        )
        self._place(self.clients.local.space)
        self.server = Server(
            self.clients.local.read(), aggregator, server_optimizer, server_schedule
        )
        self._secure = None
        if isinstance(aggregator, Protected):
            self._secure = SecureRounds(aggregator, trainer, self.clients.num_known_state)
        self.record = RoundRecord()
        self._is_kept_by_lightning = self._can_be_kept_by_lightning()
        self._state = RunState(
            module=self._module,
            options=options,
            clients=self.clients,
            server=self.server,
            corrector=self.corrector,
            memory=self.memory,
            groups=groups,
            ranks=self._ranks,
            path=self._path,
            private=private,
            secure=self._secure,
        )

    def _place(self, space: Space) -> None:
        """Tell what looks at tensors of which ones the vectors are made."""
        self._path.place(space.shapes)
        self.clients.broadcast.place(space.shapes)

    def _can_be_kept_by_lightning(self) -> bool:
        """Return whether the checkpoint's weights hold every bit of the server's model."""
        spaces = (self.clients.local.space, self.clients.local.buffers)
        saved = self._module.state_dict().keys()
        return all(
            s.is_lossless and s.dtype == torch.float32 and saved >= set(s.names) for s in spaces
        )

    def train_group(self, group: ClientGroup) -> None:
        """Train some clients of the present round and fold in their updates.

        Afterwards the module holds the global model again, whatever happened.

        Raises:
            ClientFailure: if a client's update cannot be used and failures are not skipped. Of
                several processes all raise it, when they meet.
        """
        began = time.perf_counter()
        if not self._has_begun and self.clients.settle_state(group, self._ranks):
            self._follow_state()
        self._open_round()
        try:
            with self.clients.metrics_kept_apart():
                self.clients.settle_engine(self.server.model, group, self._ranks)
                if self._failure is None:
                    # after an interruption some of the group are done, the last that were noted
                    finished = set(self.record.finished[-len(group) :])
                    waiting = [client for client in group if client not in finished]
                    self.clients.train(waiting, self.server, self.record)
        except (ClientFailure, ConfigurationError) as failure:
            if self._ranks.size == 1:
                raise
            self._failure = failure
        finally:
            self.clients.restore(self.server.model)
        if not self._trainer.is_last_batch:
            self._groups.advance()
        self.record.seconds += time.perf_counter() - began

    def close_round(self) -> None:
        """Step the server and put the new model into the module.

        Raises:
            ClientFailure: in all processes, if a client failed in one.
            RoundFailure: if fewer clients than ``min_replies`` sent a valid update.
        """
        self._open_round()  # there may have been no client
        self._check_constants()
        reports = self._ranks.gather(self._report()) if self._ranks.size > 1 else []
        began = time.perf_counter()  # waiting for other processes is no work
        if reports:
            self._take_in(reports)
        shows_clients = self.private is None or self.private.ledger.shows_clients
        if shows_clients:
            for client in sorted(self.record.skipped):
                rank_zero_warn(f"skipped: {self.record.skipped[client]}")
        self._check_replies()
        if shows_clients:  # and no cohort that goes with privacy depends on what clients did
            self._note_clients()
        self.memory.clients.commit()
        self.corrector.close_round()
        if self._secure is not None:
            self._secure.miss(self.record)
        # privacy of clients goes with corrections that leave the aggregate as it is
        self.record.update_norm = float(
            self.server.close_round(self._private_sum or self.corrector)
        )
        if self._secure is not None:
            self._secure.note(self.record)
        with self.clients.metrics_kept_apart():
            self.record.pooled = self.clients.collector.collect_metrics()
        self.clients.scaler.end_round()
        self._is_noted = False
        self.clients.local.end_round(self.server.model)
        self._groups.advance()  # only now: a round that failed is no finished one
        self.record.seconds += time.perf_counter() - began
        if self.private is not None:
            self.private.note(self.record)

    def _check_constants(self) -> None:
        try:
            self.clients.local.check_constants()
        except ConfigurationError as failure:
            if self._ranks.size == 1:
                raise
            self._failure = self._failure or failure

    def _follow_state(self) -> None:
        """Have the server hold what is known to be clients' state now."""
        buffers = self.clients.local.buffers.read()
        if self._secure is not None:
            self._secure.refuse_buffers(buffers.numel())
        self.server.replace_buffers(buffers)
        self._is_kept_by_lightning = self._can_be_kept_by_lightning()

    def _note_clients(self) -> None:
        """Let the clock go on, and keep what the round has shown of its clients."""
        record, number = self.record, self._trainer.current_epoch
        if self._options.versions is not None:
            step = self._options.versions.step(number)
            record.durations, record.ended_at = dict(step.durations), step.seconds
        elif self._options.fleet is not None:
            record.ended_at = record.began_at + max(record.durations.values(), default=0.0)
        self._groups.population.note(
            record.finished,
            round_index=number,
            losses=record.means.by_client("train/loss"),
            durations=record.durations,
        )

    def _report(self) -> Report:
        states = self.clients.collector.metric_states(self._module)
        return Report(
            failure=self._failure,
            record=self.record.state_dict(),
            scaler=self.clients.scaler.state_dict(),
            logged=logged_metrics(self.clients.collector, self._module),
            metric_states=move_data_to_device(states, "cpu"),
            prog_bar=self.clients.collector.prog_bar,
            memories=self.memory.waiting(),
            stops=self._interruption is not None and self._interruption.is_asked,
        )

    def _take_in(self, reports: Sequence[Report]) -> None:
        """Know and have what all processes know and have of this round."""
        failure = first_failure(reports)
        if failure is not None:
            own = self._failure  # knows its cause
            raise own if own is not None and own.args == failure.args else failure
        if self._interruption is not None and any(report.stops for report in reports):
            self._interruption.agree()
        self.record = merged_record(reports)
        self.clients.scaler.merge(report.scaler for report in reports)
        pool_metrics(reports, self.clients.collector, self._module)
        self.server.reduce(self._ranks.all_reduce, self._ranks.gather)
        self.corrector.reduce(self._ranks.all_reduce)
        self.memory.share([report.memories for report in reports], self.clients.local.space.device)

    def in_progress_bar(self, name: str) -> bool:
        """Return whether a logged value is shown beside the progress bar."""
        return name == "train/loss" or name in self.clients.collector.prog_bar

    @property
    def has_memory(self) -> bool:
        """Whether clients remember something between rounds."""
        keeps_own = self.clients.personal.kind is not None
        return self._path.has_memory or self.corrector.correction.remembers or keeps_own

    @property
    def _has_begun(self) -> bool:
        """Whether the present round has; the open one of a checkpoint may have been broken off."""
        return self.server.is_open and self.server.round_index == self._trainer.current_epoch

    def _open_round(self) -> None:
        self.follow_masks()
        if not self._is_noted:  # by now, unlike in the constructor, Lightning has restored both
            self.clients.start_round()
            self._is_noted = True
        if not self._has_begun:
            self.record = RoundRecord(began_at=self.record.ended_at or 0.0)
            if self._is_kept_by_lightning:  # hooks between rounds may have changed it
                self.server.replace_model(self.clients.local.read())
            if self.private is not None:
                self.private.open_round(self._trainer.current_epoch)
            self.server.open_round(self._trainer.current_epoch)
            self.memory.clients.discard()
            self.corrector.open_round(self.server.model.params)
            if self._options.versions is not None:
                self._options.versions.open_round(self._trainer.current_epoch, self.server.model)
        if not self._cost_is_told:  # not before hooks have changed the model for the last time
            self._tell_cost()

    def _tell_cost(self) -> None:
        self._cost_is_told = True
        rounds, like = self._trainer.max_epochs, self.server.model.params
        line = cost_line(
            self._path,
            self.clients.broadcast,
            self.server.model,
            num_clients=self._groups.num_clients,
            num_rounds=math.inf if rounds is None or rounds < 0 else rounds,
            protected=None if self._secure is None else self._secure.aggregator,
            more=(self._intake.more_bytes_up(like), self.corrector.bytes_down(like)),
        )
        rank_zero_info(f"bytes: {line}")
        if self._secure is not None:
            rank_zero_info(self._secure.announcement())

    def follow_masks(self) -> None:
        """Have other coordinates travel from here on if masks changed between rounds.

        Raises:
            ConfigurationError: if they may not change.
        """
        if self.clients.local.has_new_masks and not self._has_begun:
            self._renew_space()

    def _renew_space(self) -> None:
        before = self.clients.local.space
        self.clients.renew_space()
        after = self.clients.local.space
        if (after.names, after.mask_fingerprint()) == (before.names, before.mask_fingerprint()):
            return  # the same ones were set again, as resuming does
        if self._options.versions is not None and self._options.versions.keeps_any:
            raise ConfigurationError(
                "federation: asynchronous does not work with masks that change during the run: "
                "clients at work would send other entries than the server expects"
            )
        positions = after.positions_in(before)
        self.server.relocate(self._model_at(positions), positions)
        self._intake.relocate(positions)
        self._place(after)
        self._is_kept_by_lightning = self._can_be_kept_by_lightning()

    def _model_at(self, positions: Tensor) -> GlobalModel:
        """Return the global model at other coordinates, see `Server.relocate`."""
        module = self.clients.local.read()
        if self._is_kept_by_lightning:
            return module
        old = self.server.model  # has bits that the module lacks
        params = torch.where(positions >= 0, old.params[positions.clamp(min=0)], module.params)
        return GlobalModel(params, old.buffers)

    def _check_replies(self) -> None:
        record, wanted = self.record, self._options.min_replies
        if record.num_sampled and self.server.num_replies < wanted:
            raise RoundFailure(
                f"round {self._trainer.current_epoch}: {self.server.num_replies} of "
                f"{record.num_sampled} clients sent a valid update, min_replies is {wanted}"
            )

    def state_dict(self) -> dict[str, Any]:
        """Return everything but the model, which is among the checkpoint's weights, see `RunState`."""
        state = self._state.state_dict(self.record)
        if not self._is_kept_by_lightning:
            state["model"] = vars(self.server.model)
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a checkpoint, taken between rounds or inside one.

        Raises:
            ConfigurationError: if the checkpoint is of another model or of another seed.
        """
        self._state.check(state)
        self._follow_state()
        if "model" in state:
            self.server.replace_model(GlobalModel(**state["model"]))
            self.clients.local.restore(self.server.model)
        if self.clients.add_named_state(inside=state["inside"]):
            self._follow_state()
        self._state.load_state_dict(state, self.record)
