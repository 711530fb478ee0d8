"""What the parts of a run have in common, made once when a fit starts."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from lightning.pytorch import LightningModule, Trainer

from fl_lightning.client.corrections.correction import Correction
from fl_lightning.client.local_training import LocalTrainer
from fl_lightning.client.log_collector import LogCollector
from fl_lightning.client.personal.personalisation import Personalisation
from fl_lightning.data.federated import FederatedDataModule
from fl_lightning.federation.checkpoints.run_memory import RunMemory
from fl_lightning.federation.client_work import LocalWork, WorkPlan
from fl_lightning.federation.execution.engine_options import EngineOptions
from fl_lightning.federation.groups import RoundGroups
from fl_lightning.federation.hooks import NOT_THE_USERS
from fl_lightning.federation.processes.ranks import Ranks
from fl_lightning.federation.stages.client_scaler import ClientScaler
from fl_lightning.federation.visits.lightning_step import LightningStep


@dataclass(frozen=True, kw_only=True)
class RunOptions:
    """What a run does, as far as its parts have to know; names are those of `Federation`.

    Attributes:
        accumulate: batches per local step.
        client_memory_bytes: of what clients remember, kept in RAM.
    """

    accumulate: int
    on_client_failure: Literal["raise", "skip"]
    min_replies: int
    seed: int
    engine: EngineOptions
    correction: Correction | None = None
    personal: Personalisation | None = None
    client_memory_bytes: float
    client_state: Sequence[str] = ()


@dataclass(frozen=True, kw_only=True)
class Run:
    """One fit: what is asked for, who takes part, and what trains.

    Attributes:
        trainer: set up, with its optimizer built and its module on its device.
        options: what a round does.
        groups: who takes part in a round.
        ranks: the processes.
        memory: what clients remember.
        plan: what each client does.
        collector: what clients log.
        step: one local step.
        local: the sequential engine.
        scaler: the fp16 scale.
    """

    trainer: Trainer
    options: RunOptions
    groups: RoundGroups
    ranks: Ranks
    memory: RunMemory
    plan: WorkPlan
    collector: LogCollector
    step: LightningStep
    local: LocalTrainer
    scaler: ClientScaler

    @classmethod
    def of(cls, trainer: Trainer, options: RunOptions, groups: RoundGroups, work: LocalWork) -> Run:
        """Return the run of a Trainer that is about to fit."""
        module, collector, ranks = trainer.lightning_module, LogCollector(), Ranks(trainer)
        step = LightningStep(trainer, collector, options.accumulate)
        local = LocalTrainer(
            module,
            trainer.optimizers,
            step,
            collector,
            [config.scheduler for config in trainer.lr_scheduler_configs],
            by_hand=not module.automatic_optimization,
            ignore=NOT_THE_USERS,
        )
        return cls(
            trainer=trainer,
            options=options,
            groups=groups,
            ranks=ranks,
            memory=RunMemory(trainer, ranks, options.client_memory_bytes),
            plan=WorkPlan(trainer.datamodule, work),  # type: ignore[attr-defined]
            collector=collector,
            step=step,
            local=local,
            scaler=ClientScaler(getattr(trainer.precision_plugin, "scaler", None)),
        )

    @property
    def module(self) -> LightningModule:
        """What trains."""
        return self.trainer.lightning_module

    @property
    def data(self) -> FederatedDataModule:
        """Whose clients they are."""
        return self.trainer.datamodule  # type: ignore[attr-defined, no-any-return]

    @property
    def num_rounds(self) -> float:
        """How many are planned; infinite if nobody knows."""
        rounds = self.trainer.max_epochs
        return math.inf if rounds is None or rounds < 0 else rounds

    @property
    def round_index(self) -> int:
        """The present round's."""
        return self.trainer.current_epoch
