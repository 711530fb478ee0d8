"""A round: broadcast, local training, aggregation, server step.

`RoundRunner` is what the loop drives. In several processes there are as many of them, which train
different clients, meet once per round and then step the same. It owns the server and the local
trainer of one fit and everything that a checkpoint inside a round must hold.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from lightning.fabric.utilities import move_data_to_device
from lightning.pytorch import Trainer
from lightning.pytorch.utilities import rank_zero_warn

from fl_lightning.client.local_training import GlobalModel, LocalTrainer
from fl_lightning.client.log_collector import LogCollector
from fl_lightning.client.slot_training import ClientWork, usable_rows
from fl_lightning.core.errors import ClientFailure, ConfigurationError, RoundFailure
from fl_lightning.core.metric_states import MetricStates, kept_apart, metrics_of
from fl_lightning.core.seeds import (
    derive_seed,
    seed_global_generators,
)
from fl_lightning.core.update import ClientUpdate
from fl_lightning.federation.client_scaler import ClientScaler
from fl_lightning.federation.client_work import LocalWork, WorkPlan
from fl_lightning.federation.engine import EngineChooser, EngineOptions
from fl_lightning.federation.groups import ClientGroup, RoundGroups
from fl_lightning.federation.lightning_step import LightningStep
from fl_lightning.federation.meeting import (
    Failure,
    Report,
    first_failure,
    logged_metrics,
    merged_record,
    pool_metrics,
)
from fl_lightning.federation.ranks import Ranks
from fl_lightning.federation.round_record import RoundRecord
from fl_lightning.federation.slot_engine import SlotEngine
from fl_lightning.server.aggregators import Aggregator
from fl_lightning.server.server import Server, ServerOptimizer


@dataclass(frozen=True, kw_only=True)
class RoundOptions:
    """What a round does; the fields are those of `Federation`."""

    local_steps: int | None
    local_epochs: int | None
    accumulate: int
    on_client_failure: Literal["raise", "skip"]
    min_replies: int
    seed: int
    engine: EngineOptions


class RoundRunner:
    """Runs the rounds of one fit.

    Args:
        trainer: set up, with its optimizer built and its module on its device.
        options: what a round does.
        aggregator: how updates become one.
        groups: learns when a group is done.
        server_optimizer: how the global model moves.
    """

    def __init__(
        self,
        trainer: Trainer,
        options: RoundOptions,
        groups: RoundGroups,
        aggregator: Aggregator,
        server_optimizer: ServerOptimizer,
    ) -> None:
        self._trainer = trainer
        self._options = options
        self._groups = groups
        self._metrics = metrics_of(trainer.lightning_module)
        self._module = trainer.lightning_module
        self._plan = WorkPlan(
            trainer.datamodule,  # type: ignore[attr-defined]
            LocalWork(options.local_steps, options.local_epochs, options.accumulate, options.seed),
        )
        self._collector = LogCollector()
        self.step = LightningStep(trainer, self._collector, options.accumulate)
        self._local = LocalTrainer(self._module, trainer.optimizers[0], self.step, self._collector)
        self._scaler = ClientScaler(getattr(trainer.precision_plugin, "scaler", None))
        self.server = Server(self._local.read(), aggregator, server_optimizer)
        self.record = RoundRecord()
        spaces = (self._local.space, self._local.buffers)
        saved = self._module.state_dict().keys()
        self._is_kept_by_lightning = all(
            s.is_lossless and s.dtype == torch.float32 and saved >= set(s.names) for s in spaces
        )
        self._is_noted = False
        self._finished: set[int] = set()  # clients of the open round, for the case of interruption
        self._engine = EngineChooser(
            trainer, self._local, self.step, options.engine, options.accumulate
        )
        self._ranks = Ranks(trainer)
        self._failure: Failure | None = None
        self._skipped: dict[int, str] = {}

    def train_group(self, group: ClientGroup) -> None:
        """Train some clients of the present round and fold in their updates.

        Afterwards the module holds the global model again, whatever happened.

        Raises:
            ClientFailure: if a client's update cannot be used and failures are not skipped. Of
                several processes all raise it, when they meet.
        """
        began = time.perf_counter()
        self._open_round()
        try:
            with kept_apart(self._metrics):
                self._settle_engine(group)
                if self._failure is None:
                    self._train_clients([c for c in group if c not in self._finished])
        except (ClientFailure, ConfigurationError) as failure:
            if self._ranks.size == 1:
                raise
            self._failure = failure
        finally:
            self._local.restore(self.server.model)
            self._scaler.wind_back()
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
        reports = self._ranks.gather(self._report()) if self._ranks.size > 1 else []
        began = time.perf_counter()  # waiting for other processes is no work
        if reports:
            self._take_in(reports)
        self._warn_of_skipped()
        self._check_replies()
        self.record.update_norm = float(self.server.close_round())
        with kept_apart(self._metrics):
            self.record.pooled = self._collector.collect_metrics()
        self._scaler.end_round()
        self._is_noted = False
        self._finished.clear()
        self._local.restore(self.server.model)
        self._groups.advance()  # only now: a round that failed is no finished one
        self.record.seconds += time.perf_counter() - began

    def _report(self) -> Report:
        states = self._collector.metric_states(self._module)
        return Report(
            failure=self._failure,
            skipped=self._skipped,
            record=self.record.state_dict(),
            scaler=self._scaler.state_dict(),
            logged=logged_metrics(self._collector, self._module),
            metric_states=move_data_to_device(states, "cpu"),
            prog_bar=self._collector.prog_bar,
        )

    def _take_in(self, reports: Sequence[Report]) -> None:
        """Know and have what all processes know and have of this round."""
        failure = first_failure(reports)
        if failure is not None:
            own = self._failure  # knows its cause
            raise own if own is not None and own.args == failure.args else failure
        self.record = merged_record(reports)
        self._scaler.merge(report.scaler for report in reports)
        pool_metrics(reports, self._collector, self._module)
        self._skipped = {c: words for r in reports for c, words in r.skipped.items()}
        self.server.reduce(self._ranks.all_reduce)

    def _warn_of_skipped(self) -> None:
        for client in sorted(self._skipped):
            rank_zero_warn(f"skipped: {self._skipped[client]}")
        self._skipped = {}

    def in_progress_bar(self, name: str) -> bool:
        """Return whether a logged value is shown beside the progress bar."""
        return name == "train/loss" or name in self._collector.prog_bar

    def _open_round(self) -> None:
        if not self._is_noted:  # by now, unlike in the constructor, Lightning has restored both
            self._local.start_round()
            self._scaler.start_round()
            self._is_noted = True
        if not self.server.is_open:
            self.record = RoundRecord()
            if self._is_kept_by_lightning:  # hooks between rounds may have changed it
                self.server.replace_model(self._local.read())
            self.server.open_round()

    def _work_of(self, clients: Sequence[int]) -> list[ClientWork]:
        round_index = self._trainer.current_epoch
        return [self._plan.of(client, round_index) for client in clients]

    def _settle_engine(self, group: ClientGroup) -> None:
        """Choose the engine before the first clients train; several processes take one and all."""
        if self._engine.is_settled:
            return
        if self._ranks.rank == 0:
            with self._collector.listening_to(self._module):
                self._engine.choose(self.server.model, self._work_of(group), self._try_one)
        choice = self._ranks.gather(self._engine.state_dict())[0]
        if self._ranks.rank > 0:
            self._engine.load_state_dict(choice)

    def _train_clients(self, clients: Sequence[int]) -> None:
        work = self._work_of(clients)
        if self._engine.slots is not None:
            work = self._train_in_slots(self._engine.slots, work)
        with self._collector.listening_to(self._module):
            for client in work:
                self._train_client(client)

    def _train_client(self, work: ClientWork) -> None:
        seed_global_generators(self._seed_of("local training", work.client_id))
        metrics = MetricStates(self._metrics)
        try:
            update = self._local_update(work)
        except BaseException as error:  # also an interruption, after which a checkpoint may follow
            metrics.put_back()
            self._scaler.wind_back()
            if not isinstance(error, ClientFailure):
                raise
            self._skip_or_raise(error)
        else:
            self._scaler.end_client()
            self.server.receive(update)
            self.record.add(update)
            self.record.total_bytes_up += self._num_bytes
        self._finish([work.client_id])

    def _train_in_slots(self, slots: SlotEngine, work: Sequence[ClientWork]) -> list[ClientWork]:
        """Train those clients that slots can train and return the others."""
        stackable, others = slots.split(work)
        before = copy.deepcopy((self.server.state_dict(), self.record.state_dict()))
        skipped = dict(self._skipped)
        try:
            for update in slots.train(self.server.model, stackable):
                usable, failures = usable_rows(update)
                for failure in failures:
                    self._skip_or_raise(failure)
                self.server.receive_group(usable)
                self.record.add_group(usable)
                self.record.total_bytes_up += self._num_bytes * len(usable.client_ids)
        except BaseException:  # the group counts as a whole or not at all
            self.server.load_state_dict(before[0])
            self.record = RoundRecord.from_state_dict(before[1])
            self._skipped = skipped
            raise
        self._finish([client.client_id for client in stackable])
        return others

    def _finish(self, clients: list[int]) -> None:
        self.record.num_sampled += len(clients)
        self.record.total_bytes_down += self._num_bytes * len(clients)
        self._finished.update(clients)

    def _skip_or_raise(self, failure: ClientFailure) -> None:
        located = f"round {self._trainer.current_epoch}, {failure}"
        if self._options.on_client_failure == "raise":
            failure.args = (located,)
            raise failure
        self.record.num_skipped += 1
        self._skipped[failure.client_id] = located

    def _try_one(self, work: ClientWork) -> ClientUpdate:
        """Train a client without consequences."""
        seed_global_generators(self._seed_of("local training", work.client_id))
        metrics = MetricStates(self._metrics)
        try:
            return self._local_update(work)
        finally:
            metrics.put_back()

    def _local_update(self, work: ClientWork) -> ClientUpdate:
        return self._local.train(
            self.server.model,
            client_id=work.client_id,
            num_examples=work.num_examples,
            batches=self._plan.steps(work),
        )

    def _check_replies(self) -> None:
        record, wanted = self.record, self._options.min_replies
        if record.num_sampled and self.server.num_replies < wanted:
            raise RoundFailure(
                f"round {self._trainer.current_epoch}: {self.server.num_replies} of "
                f"{record.num_sampled} clients sent a valid update, min_replies is {wanted}"
            )

    def _seed_of(self, purpose: str, client: int) -> int:
        return derive_seed(self._options.seed, purpose, self._trainer.current_epoch, client)

    @property
    def _num_bytes(self) -> int:
        return self._local.space.num_bytes + self._local.buffers.num_bytes

    def state_dict(self) -> dict[str, Any]:
        """Return everything but the model, which is among the checkpoint's weights.

        That holds only for single precision (others are rounded on the way) and for buffers that
        are saved; otherwise the server's own model is kept as well. Of several processes one writes
        the checkpoint: it leaves out the open round, which is then trained again from its start.
        """
        open_here = self.server.is_open and self._ranks.size == 1
        state = {
            "space": self._local.space.fingerprint(),
            "seed": self._options.seed,
            "server": self.server.state_dict(with_round=open_here),
            "record": self.record.state_dict(),
            "scaler": self._scaler.state_dict() if open_here else {},
            "metrics": self._collector.metric_states(self._module) if open_here else {},
            "finished": sorted(self._finished) if open_here else [],
            "prog_bar": sorted(self._collector.prog_bar),
            "ranks": self._ranks.size,
            "groups": len(self._groups),
            "inside": self.server.is_open,
            "engine": self._engine.state_dict(),
        }
        if not self._is_kept_by_lightning:
            state["model"] = vars(self.server.model)
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a checkpoint, taken between rounds or inside one.

        Raises:
            ConfigurationError: if the checkpoint is of another model or of another seed.
        """
        _check_same("model", state["space"], self._local.space.fingerprint())
        _check_same("seed", state["seed"], self._options.seed)
        if state["inside"]:
            _check_same("number of processes", state["ranks"], self._ranks.size)
            _check_same("number of groups of clients", state["groups"], len(self._groups))
        if "model" in state:
            self.server.replace_model(GlobalModel(**state["model"]))
            self._local.restore(self.server.model)
        self.server.load_state_dict(state["server"])
        self.record = RoundRecord.from_state_dict(state["record"])
        self._scaler.load_state_dict(state["scaler"])
        self._collector.load_metric_states(self._module, state["metrics"])
        self._finished = set(state["finished"])
        self._collector.prog_bar |= set(state["prog_bar"])
        self._engine.load_state_dict(state["engine"])


def _check_same(what: str, saved: Any, present: Any) -> None:
    if saved != present:
        raise ConfigurationError(
            f"the checkpoint belongs to a run with another {what} ({saved} instead of {present}): "
            "resume with the configuration of the run that wrote it, or start without ckpt_path"
        )
