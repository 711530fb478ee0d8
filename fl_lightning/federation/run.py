"""The objects that the parts of a run share, made once when a fit starts."""

from __future__ import annotations

import math
from contextlib import suppress
from typing import Any

from lightning.pytorch import LightningModule, Trainer
from torch.amp import GradScaler
from torch.optim import Optimizer

from fl_lightning.client.local_training import LocalTrainer
from fl_lightning.client.log_collector import LogCollector
from fl_lightning.data.federated import FederatedDataModule
from fl_lightning.federation.checkpoints.files import RunMemory
from fl_lightning.federation.groups import RoundGroups
from fl_lightning.federation.hooks import NOT_THE_USERS
from fl_lightning.federation.plan import LocalWork, WorkPlan
from fl_lightning.federation.processes.ranks import Ranks
from fl_lightning.federation.visits.lightning_step import LightningStep
from fl_lightning.federation.visits.local_counts import local_schedules
from fl_lightning.federation.visits.shard_gradient import ShardGradient


class GradientScale:
    """The scale of fp16 gradients, wound back to that of the round's start; nothing where there is none.

    Args:
        scaler: the precision plugin's, or None.

    Attributes:
        is_at_work: whether there is a scaler.
    """

    def __init__(self, scaler: GradScaler | None) -> None:
        self._scaler, self.is_at_work = scaler, scaler is not None
        self._start: dict[str, Any] = self.present()

    def start_round(self) -> None:
        """Begin the round with the present scale."""
        self._start = self.present()

    def wind_back(self) -> None:
        """Return to the round's first scale."""
        self.go_on_from(self._start)

    def present(self) -> dict[str, Any]:
        """Return the present scale, for `go_on_from`."""
        return {} if self._scaler is None else self._scaler.state_dict()

    def load(self, state: dict[str, Any]) -> None:
        """Set the scale with which the next round begins."""
        if self._scaler is not None:
            self._scaler.load_state_dict(state)

    def go_on_from(self, state: dict[str, Any]) -> None:
        """Return to a scale after a client."""
        if self._scaler is None:
            return
        self.load(state)
        # A step that raised left gradients marked as unscaled; before the first step there
        # is nothing to forget, which `update` takes for misuse
        with suppress(AssertionError):
            self._scaler.update(state["scale"])
            self.load(state)


class Run:
    """One fit: who takes part, and what trains.

    Args:
        trainer: about to fit, with its optimizer built and its module on its device.
        groups: who takes part in a round.
        work: how much a client trains in one.
        memory_bytes: of what clients remember that may stay in RAM.

    Attributes:
        trainer: as given.
        groups: as given.
        module: that trains.
        data: whose clients.
        optimizers: of the clients.
        accumulate: batches per local step.
        ranks: the processes.
        memory: what clients remember.
        plan: what each client does.
        collector: what clients log.
        step: one local step.
        by_step: learning-rate schedules that count local steps; None if none does.
        local: the sequential engine.
        scale: of fp16 gradients.
        shard_gradient: gives the gradient of a client's whole shard.
    """

    def __init__(
        self, trainer: Trainer, groups: RoundGroups, work: LocalWork, memory_bytes: float
    ) -> None:
        self.trainer, self.groups, self.accumulate = trainer, groups, work.accumulate
        self.module: LightningModule = trainer.lightning_module
        self.data: FederatedDataModule = trainer.datamodule  # type: ignore[attr-defined]
        self.optimizers: list[Optimizer] = trainer.optimizers
        self.ranks, self.collector = Ranks(trainer), LogCollector()
        self.memory = RunMemory(trainer, self.ranks, memory_bytes)
        self.plan = WorkPlan(self.data, work)
        self.step = LightningStep(trainer, self.collector, work.accumulate)
        self.by_step = local_schedules(trainer)
        self.local = LocalTrainer(
            self.module,
            self.optimizers,
            self.step,
            self.collector,
            [config.scheduler for config in trainer.lr_scheduler_configs],
            self.by_step,
            by_hand=not self.module.automatic_optimization,
            ignore=NOT_THE_USERS,
        )
        self.step.on_new_layout = self.local.homes.note
        self.scale = GradientScale(getattr(trainer.precision_plugin, "scaler", None))
        self.shard_gradient = ShardGradient(self.module, self.local, self.step, self.plan)

    @property
    def num_rounds(self) -> float:
        """How many are planned; infinite if nobody knows."""
        rounds = self.trainer.max_epochs
        return math.inf if rounds is None or rounds < 0 else rounds

    @property
    def round_index(self) -> int:
        """The present round's."""
        return self.trainer.current_epoch
