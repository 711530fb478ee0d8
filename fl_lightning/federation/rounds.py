"""A round: broadcast, local training, aggregation, server step.

`RoundRunner` is what the loop drives. It owns the server and the local trainer of one fit and
everything that a checkpoint inside a round must hold.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, Literal

import torch
from lightning.pytorch import Trainer
from lightning.pytorch.utilities import rank_zero_warn

from fl_lightning.client.local_training import GlobalModel, LocalTrainer, SizedBatch
from fl_lightning.client.log_collector import LogCollector
from fl_lightning.client.slot_training import ClientWork, usable_rows
from fl_lightning.core.errors import ClientFailure, ConfigurationError, RoundFailure
from fl_lightning.core.metric_states import MetricStates, metrics_of
from fl_lightning.core.seeds import (
    derive_seed,
    seed_global_generators,
    torch_generator,
)
from fl_lightning.core.update import ClientUpdate
from fl_lightning.data.federated import FederatedDataModule
from fl_lightning.data.shards import local_order
from fl_lightning.federation.client_scaler import ClientScaler
from fl_lightning.federation.engine import EngineChooser, EngineOptions
from fl_lightning.federation.groups import ClientGroup, RoundGroups
from fl_lightning.federation.lightning_step import LightningStep
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
        self._data: FederatedDataModule = trainer.datamodule  # type: ignore[attr-defined]
        self._clients, self._batch_size = self._data.clients, self._data.batch_size
        self._drop_last = self._data.drop_last
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
        self._engine = EngineChooser(trainer, self._local, options.engine, options.accumulate)

    def train_group(self, group: ClientGroup) -> None:
        """Train some clients of the present round and fold in their updates.

        Afterwards the module holds the global model again, whatever happened.

        Raises:
            ClientFailure: if a client's update cannot be used and failures are not skipped.
        """
        began = time.perf_counter()
        self._open_round()
        work = [self._work_of(client) for client in group if client not in self._finished]
        try:
            with self._collector.listening_to(self._module):
                self._engine.choose(self.server.model, work, self._try_one)
            if self._engine.slots is not None:
                work = self._train_in_slots(self._engine.slots, work)
            with self._collector.listening_to(self._module):
                for client in work:
                    self._train_client(client)
        finally:
            self._local.restore(self.server.model)
            self._scaler.wind_back()
        self._groups.advance()
        self.record.seconds += time.perf_counter() - began

    def close_round(self) -> None:
        """Step the server and put the new model into the module.

        Raises:
            RoundFailure: if fewer clients than ``min_replies`` sent a valid update.
        """
        began = time.perf_counter()
        self._open_round()  # there may have been no client
        self._check_replies()
        self.record.update_norm = float(self.server.close_round())
        self.record.pooled = self._collector.collect_metrics()
        self._scaler.end_round()
        self._is_noted = False
        self._finished.clear()
        self._local.restore(self.server.model)
        self.record.seconds += time.perf_counter() - began

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
        rank_zero_warn(f"skipped: {located}")

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
            batches=self._steps_of(work),
        )

    def _work_of(self, client: int) -> ClientWork:
        options, shard = self._options, self._clients[client]
        if not len(shard):
            return ClientWork(client, 0, shard, [])
        order, sizes = local_order(
            shard,
            self._batch_size,
            torch_generator(options.seed, "shuffle", self._trainer.current_epoch, client),
            num_epochs=options.local_epochs,
            num_batches=options.local_steps and options.local_steps * options.accumulate,
            drop_last=self._drop_last,
        )
        return ClientWork(client, len(shard), order, sizes)

    def _steps_of(self, work: ClientWork) -> Iterator[Sequence[SizedBatch]]:
        """Yield the batches of every local step, built when they are needed."""
        indices = iter(work.batches)
        while chunk := list(islice(indices, self._options.accumulate)):
            yield [(self._data.train_batch(batch), len(batch)) for batch in chunk]

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
        are saved; otherwise the server's own model is kept as well.
        """
        state = {
            "space": self._local.space.fingerprint(),
            "seed": self._options.seed,
            "server": self.server.state_dict(),
            "record": self.record.state_dict(),
            "scaler": self._scaler.state_dict(),
            "metrics": self._collector.metric_states(self._module),
            "finished": sorted(self._finished),
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
        if "model" in state:
            self.server.replace_model(GlobalModel(**state["model"]))
            self._local.restore(self.server.model)
        self.server.load_state_dict(state["server"])
        self.record = RoundRecord.from_state_dict(state["record"])
        self._scaler.load_state_dict(state["scaler"])
        self._collector.load_metric_states(self._module, state["metrics"])
        self._finished = set(state["finished"])
        self._engine.load_state_dict(state["engine"])


def _check_same(what: str, saved: Any, present: Any) -> None:
    if saved != present:
        raise ConfigurationError(
            f"the checkpoint belongs to a run with another {what} ({saved} instead of {present}): "
            "resume with the configuration of the run that wrote it, or start without ckpt_path"
        )
