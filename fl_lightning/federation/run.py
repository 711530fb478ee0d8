"""The objects that the parts of a run share, made once when a fit starts."""

from __future__ import annotations

import math
from dataclasses import dataclass

from lightning.pytorch import LightningModule, Trainer
from torch.optim import Optimizer

from fl_lightning.client.local_training import LocalTrainer
from fl_lightning.client.log_collector import LogCollector
from fl_lightning.client.state.round_start import LocalSchedules
from fl_lightning.data.federated import FederatedDataModule
from fl_lightning.federation.calendar import Calendar
from fl_lightning.federation.checkpoints.run_memory import RunMemory
from fl_lightning.federation.groups import RoundGroups
from fl_lightning.federation.hooks import NOT_THE_USERS
from fl_lightning.federation.options import Options
from fl_lightning.federation.plan import DrawsBatches, LocalWork, WorkPlan
from fl_lightning.federation.processes.ranks import Ranks
from fl_lightning.federation.stages.client_scaler import ClientScaler
from fl_lightning.federation.visits.lightning_step import LightningStep
from fl_lightning.federation.visits.local_counts import local_schedules
from fl_lightning.federation.visits.shard_gradient import ShardGradient


@dataclass(frozen=True, kw_only=True)
class Run:
    """One fit: what is asked for, who takes part, and what trains.

    Attributes:
        trainer: set up, with its optimizer built and its module on its device.
        options: what was asked for.
        groups: who takes part in a round.
        accumulate: batches per local step.
        ranks: the processes.
        memory: what clients remember.
        plan: what each client does.
        collector: what clients log.
        step: one local step.
        local: the sequential engine.
        scaler: the fp16 scale.
        by_step: learning-rate schedules that count local steps; None if none does.
    """

    trainer: Trainer
    options: Options
    groups: RoundGroups
    accumulate: int
    ranks: Ranks
    memory: RunMemory
    plan: WorkPlan
    collector: LogCollector
    step: LightningStep
    local: LocalTrainer
    scaler: ClientScaler
    by_step: LocalSchedules | None

    @classmethod
    def of(
        cls,
        trainer: Trainer,
        options: Options,
        calendar: Calendar,
        examples: DrawsBatches | None = None,
    ) -> Run:
        """Return the run of a Trainer that is about to fit.

        Args:
            trainer: set up.
            options: what was asked for.
            calendar: who trains when.
            examples: draws clients' batches by coins, for privacy; None for passes over their shards.
        """
        module, collector, ranks = trainer.lightning_module, LogCollector(), Ranks(trainer)
        accumulate = calendar.accumulate
        work = LocalWork(
            options.local_steps, options.local_epochs, accumulate, options.seed, examples
        )
        step, by_step = LightningStep(trainer, collector, accumulate), local_schedules(trainer)
        local = LocalTrainer(
            module,
            trainer.optimizers,
            step,
            collector,
            [config.scheduler for config in trainer.lr_scheduler_configs],
            by_step,
            by_hand=not module.automatic_optimization,
            ignore=NOT_THE_USERS,
        )
        step.on_new_layout = local.note_homes
        return cls(
            trainer=trainer,
            options=options,
            groups=calendar.groups,
            accumulate=accumulate,
            ranks=ranks,
            memory=RunMemory(trainer, ranks, options.client_memory_gb * 1e9),
            plan=WorkPlan(trainer.datamodule, work),  # type: ignore[attr-defined]
            collector=collector,
            step=step,
            local=local,
            scaler=ClientScaler(getattr(trainer.precision_plugin, "scaler", None)),
            by_step=by_step,
        )

    @property
    def module(self) -> LightningModule:
        """The module that trains."""
        return self.trainer.lightning_module

    @property
    def optimizers(self) -> list[Optimizer]:
        """Of the clients."""
        return self.trainer.optimizers

    @property
    def shard_gradient(self) -> ShardGradient:
        """Gives the gradient of a client's whole shard."""
        return ShardGradient(self.module, self.local, self.step, self.plan)

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
