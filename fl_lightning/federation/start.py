"""How a fit starts: from options, a Trainer, a module and data to the rounds that the loop drives."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any, Protocol

from lightning.fabric.plugins.io.torch_io import TorchCheckpointIO
from lightning.pytorch import LightningModule, Trainer

from fl_lightning.core.errors import raise_together
from fl_lightning.core.freed_memory import keep_freed_memory
from fl_lightning.core.seeds import preserve_global_generators
from fl_lightning.data.federated import FederatedDataModule
from fl_lightning.federation.calendar import Calendar
from fl_lightning.federation.checkpoints.files import AtomicCheckpointIO
from fl_lightning.federation.checks.fit import (
    check_compatible,
    check_data_fits,
    check_module_together,
    check_set_up,
    check_shards,
    check_trainer_together,
)
from fl_lightning.federation.checks.privacy import check_trainer_private
from fl_lightning.federation.fit_rounds import FitRounds
from fl_lightning.federation.hooks import GroupsPassBy, have_rounds_for_batches
from fl_lightning.federation.loop import Rounds, install
from fl_lightning.federation.options import Options
from fl_lightning.federation.run import Run
from fl_lightning.federation.stage import Stages
from fl_lightning.federation.stages.order import run_aggregator, stages_of
from fl_lightning.federation.stages.privacy_run import privacy_at_work
from fl_lightning.federation.visits.local_counts import count_locally, counts_of
from fl_lightning.server.aggregator import Aggregator
from fl_lightning.server.server import Server


def prepare(
    trainer: Trainer, module: LightningModule, options: Options, cleanup: ExitStack
) -> Calendar:
    """Replace batches by groups of clients in Lightning's loop, until the fit is over.

    Args:
        trainer: whose loop is about to be set up.
        module: that trains.
        options: what was asked for.
        cleanup: gives Trainer and data back as they were.

    Raises:
        ConfigurationError: for what cannot be federated, all at once.
    """
    data: FederatedDataModule = trainer.datamodule  # type: ignore[attr-defined]
    raise_together(
        lambda: check_compatible(trainer, module),
        lambda: check_module_together(module, options),
        lambda: check_trainer_private(trainer, options.client_privacy, options.example_privacy),
        lambda: check_shards(data, options.on_client_failure),
    )
    if trainer.strategy.root_device.type == "cpu":
        keep_freed_memory()
    if options.attackers is not None:
        options.attackers.enter(data)
        cleanup.callback(data.poison, [], None)
    calendar = Calendar.of(trainer, module, options)
    planned_batches = int(calendar.num_batches.max(initial=0))
    count_locally(trainer, calendar.planned_steps, planned_batches, cleanup)
    data.train_in_rounds(calendar.groups)
    cleanup.callback(data.train_in_rounds, None)
    for name, value in calendar.settings_of(trainer).items():
        cleanup.callback(setattr, trainer, name, getattr(trainer, name))
        setattr(trainer, name, value)
    cleanup.callback(setattr, trainer, "accumulate_grad_batches", calendar.accumulate)
    if type(trainer.strategy.checkpoint_io) is TorchCheckpointIO:
        trainer.strategy.checkpoint_io = AtomicCheckpointIO()
    return calendar


def begin(trainer: Trainer, options: Options, calendar: Calendar) -> FitRounds:
    """Return the rounds of a fit, on the weights and the optimizer that are now in place.

    Args:
        trainer: set up.
        options: what was asked for.
        calendar: who trains when.

    Raises:
        ConfigurationError: for what does not go together, all at once.
    """
    check_begun(trainer, options)
    private = privacy_at_work(trainer, options, calendar)
    aggregator: Aggregator | None = None if private is None else private.aggregator
    if aggregator is None:
        aggregator = run_aggregator(trainer, options.aggregator, options.attackers)
    run = calendar.run_of(trainer, options, None if private is None else private.draws)
    rounds = FitRounds(
        run,
        options,
        stages_of(run, options, aggregator, calendar.time, private),
        lambda model: Server(model, aggregator, options.server_optimizer, options.server_schedule),
    )
    if options.correction is not None:
        options.correction.check_server(rounds.server.optimizer)
    if isinstance(trainer.strategy.checkpoint_io, AtomicCheckpointIO):
        trainer.strategy.checkpoint_io.files = rounds.memory.files_of_checkpoint
    return rounds


def check_begun(trainer: Trainer, options: Options) -> None:
    """Refuse what is known once Lightning has set up module, optimizers and data, all at once."""
    raise_together(
        lambda: check_set_up(trainer),
        lambda: check_trainer_together(trainer, options),
        lambda: None if options.clients_side else check_data_fits(trainer),  # at sites
    )


def begin_at_site(trainer: Trainer, options: Options, calendar: Calendar) -> tuple[Run, Stages]:
    """Return what trains at a site and what happens in its rounds; who adds up is the server."""
    run = calendar.run_of(trainer, options)
    aggregator = run_aggregator(trainer, options.aggregator, None)
    return run, stages_of(run, options, aggregator, calendar.time, None)


class DrivenRounds(Rounds, Protocol):
    """The rounds that the loop drives, with their run."""

    run: Run


def take_over(trainer: Trainer, rounds: DrivenRounds, cleanup: ExitStack) -> None:
    """Install rounds in Lightning's loop, and show them to hooks, until the fit is over."""
    cleanup.callback(rounds.run.step.use, ())
    counts_of(trainer).planned_batches = 0
    trainer.accumulate_grad_batches = len(rounds.run.groups)  # global_step counts rounds
    install(trainer, rounds)
    cleanup.enter_context(preserve_global_generators())
    owners: tuple[Any, ...] = (rounds.run.module, rounds.run.data)
    for owner in owners:
        cleanup.callback(GroupsPassBy(owner).remove)
    cleanup.callback(have_rounds_for_batches(trainer, rounds.run.groups))
