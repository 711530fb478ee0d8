"""How a fit starts: from options, a Trainer, a module and data to the rounds that the loop drives.

Privacy, of clients or of their single examples, is made here too, as it must know who trains when.
"""

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
from fl_lightning.federation.checks.privacy import check_local_steps, check_trainer_private
from fl_lightning.federation.fit_rounds import FitRounds
from fl_lightning.federation.hooks import GroupsPassBy, have_rounds_for_batches
from fl_lightning.federation.loop import Rounds, install
from fl_lightning.federation.options import Options
from fl_lightning.federation.processes.ranks import Ranks
from fl_lightning.federation.run import Run
from fl_lightning.federation.stage import Stages
from fl_lightning.federation.stages.example_rounds import ExampleRounds
from fl_lightning.federation.stages.order import run_aggregator, stages_of
from fl_lightning.federation.stages.privacy_ledger import PrivateStage
from fl_lightning.federation.stages.private_rounds import PrivateRounds
from fl_lightning.federation.visits.local_counts import count_locally, counts_of
from fl_lightning.privacy.example import ExampleDP
from fl_lightning.privacy.mechanism import Privacy
from fl_lightning.privacy.run import AccountedRun, LocalSampling
from fl_lightning.server.aggregator import Aggregator
from fl_lightning.server.server import Server, as_aggregator


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


def privacy_at_work(trainer: Trainer, options: Options, calendar: Calendar) -> PrivateStage | None:
    """Return what makes a run's rounds private; None if nothing was asked for.

    Args:
        trainer: set up for fitting.
        options: what was asked for.
        calendar: who trains when.

    Raises:
        ConfigurationError: if the run cannot be accounted for.
    """
    if (of_examples := options.example_privacy) is not None:
        check_local_steps(trainer, calendar.accumulate)
        return _example_rounds(trainer, of_examples, options, calendar)
    if (of_clients := options.client_privacy) is not None:
        return _private_rounds(trainer, of_clients, options, calendar)
    return None


def _private_rounds(
    trainer: Trainer, privacy: Privacy, options: Options, calendar: Calendar
) -> PrivateRounds:
    aggregator = as_aggregator(options.aggregator)
    secure = aggregator.noise_shares
    fewest = None
    if secure is not None and options.cohort.has_fixed_size:
        fewest = secure.fewest_survivors(calendar.groups.num_clients)
    run = _accounted(trainer, options, fewest_survivors=fewest)
    return PrivateRounds(
        privacy,
        run,
        Ranks(trainer),
        exact=aggregator.exact,
        secure=secure,
        has_memory=options.clients_remember,
        at_sites=options.clients_side is not None,
    )


def _example_rounds(
    trainer: Trainer, privacy: ExampleDP, options: Options, calendar: Calendar
) -> ExampleRounds:
    data: FederatedDataModule = trainer.datamodule  # type: ignore[attr-defined]
    local = LocalSampling(data.clients.num_examples, data.batch_size, calendar.num_steps)
    return ExampleRounds(privacy, _accounted(trainer, options, local=local))


def _accounted(
    trainer: Trainer,
    options: Options,
    *,
    local: LocalSampling | None = None,
    fewest_survivors: int | None = None,
) -> AccountedRun:
    rounds, params = trainer.max_epochs, trainer.lightning_module.parameters()
    return AccountedRun(
        options.cohort,
        num_clients=len(trainer.datamodule.clients),  # type: ignore[attr-defined]
        num_rounds=None if rounds is None or rounds < 0 else rounds,
        seed=options.seed,
        num_coordinates=sum(p.numel() for p in params if p.requires_grad),
        fewest_survivors=fewest_survivors,
        local=local,
    )
