"""The start of a fit: from options, Trainer, module and data to the rounds that the loop drives.

A round is an epoch of one batch, its clients; the server's step is an optimizer step of Lightning's.
In the order in which Lightning calls: `prepare`, `begin`, `take_over`.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import numpy as np
from lightning.fabric.plugins.io.torch_io import TorchCheckpointIO
from lightning.pytorch import LightningModule, Trainer

from fl_lightning.core.errors import raise_together
from fl_lightning.core.processes import keep_freed_memory
from fl_lightning.core.seeds import Integers, preserve_global_generators
from fl_lightning.data.cohorts.population import ClientIds, Population
from fl_lightning.data.federated import FederatedDataModule
from fl_lightning.data.shards import batches_of_steps, local_work
from fl_lightning.federation.checkpoints.files import AtomicCheckpointIO
from fl_lightning.federation.checks.fit import (
    check_cohort_size,
    check_compatible,
    check_data_fits,
    check_module_together,
    check_set_up,
    check_shards,
    check_trainer_together,
    check_trusted,
    check_update_weights,
    check_validation_interval,
)
from fl_lightning.federation.checks.privacy import check_local_steps, check_trainer_private
from fl_lightning.federation.fit_rounds import FitRounds
from fl_lightning.federation.hooks import keep_cohorts_from_hooks
from fl_lightning.federation.loop import install
from fl_lightning.federation.options import Options
from fl_lightning.federation.plan import DrawsBatches, LocalWork
from fl_lightning.federation.processes.ranks import Ranks, shares
from fl_lightning.federation.round_cohorts import CohortBatch, RoundCohorts
from fl_lightning.federation.run import Run
from fl_lightning.federation.stage import Stages
from fl_lightning.federation.stages.asynchrony import ArrivingCohort
from fl_lightning.federation.stages.devices import simulated_time
from fl_lightning.federation.stages.example_rounds import ExampleRounds
from fl_lightning.federation.stages.order import run_aggregator, stages_of
from fl_lightning.federation.stages.privacy_ledger import PrivateStage
from fl_lightning.federation.stages.private_rounds import PrivateRounds
from fl_lightning.federation.visits.local_counts import count_locally, counts_of
from fl_lightning.privacy.mechanism import AccountedRun, LocalSampling
from fl_lightning.server.protected import FEWEST_CLIENTS, Terms
from fl_lightning.server.server import Server, as_aggregator


def prepare(
    trainer: Trainer, module: LightningModule, options: Options, cleanup: ExitStack
) -> Calendar:
    """Check a fit's settings, and make its data module yield rounds instead of batches; ``cleanup`` undoes this.

    Raises:
        ConfigurationError: for settings that cannot be federated, all at once.
    """
    data: FederatedDataModule = trainer.datamodule  # type: ignore[attr-defined]
    raise_together(
        lambda: check_compatible(trainer, module),
        lambda: check_module_together(module, options),
        lambda: check_trainer_private(trainer, options),
        lambda: check_shards(data, options.on_client_failure),
        lambda: check_update_weights(data, options.parts, options.aggregator),
    )
    if trainer.strategy.root_device.type == "cpu":
        keep_freed_memory()
    if options.attackers is not None:
        options.attackers.enter(data)
        cleanup.callback(data.poison, [], None)
    calendar = Calendar(trainer, options)
    planned_batches = int(calendar.num_batches.max(initial=0))
    count_locally(
        trainer,
        calendar.planned_steps,
        planned_batches,
        cleanup,
        has_late_clients=options.asynchronous is not None,
    )
    data.train_in_rounds(calendar.cohorts)
    cleanup.callback(data.train_in_rounds, None)
    # so that Lightning counts rounds; the limit counts clients
    limit = 1.0 if trainer.limit_train_batches else trainer.limit_train_batches
    for name, value in {"log_every_n_steps": 1, "limit_train_batches": limit}.items():
        cleanup.callback(setattr, trainer, name, getattr(trainer, name))
        setattr(trainer, name, value)
    cleanup.callback(setattr, trainer, "accumulate_grad_batches", calendar.accumulate)
    if type(trainer.strategy.checkpoint_io) is TorchCheckpointIO:
        trainer.strategy.checkpoint_io = AtomicCheckpointIO()
    return calendar


class Calendar:
    """Schedule of one fit: the clients of each round, how much each of them trains, and simulated time.

    Args:
        trainer: the Trainer, whose data are set up.
        options: the options of the federation.

    Raises:
        ConfigurationError: for cohorts that can never be large enough, and validation that would never run.

    Attributes:
        cohorts: the clients of each round.
        num_steps: local steps of every client's round, shape (num_clients,).
        num_batches: local batches of every client's round, shape (num_clients,).
        accumulate: batches of a local step; an epoch's last step takes those that are left.
        fleet: the clients' simulated devices, see `simulated_time`.
        arrivals: order of arrivals at an asynchronous server, see `simulated_time`.
    """

    def __init__(self, trainer: Trainer, options: Options) -> None:
        data: FederatedDataModule = trainer.datamodule  # type: ignore[attr-defined]
        accumulate, sizes = trainer.accumulate_grad_batches, data.clients.num_examples
        drop_last = data.drop_last and options.example_privacy is None
        per_epoch = local_work(sizes, data.batch_size, drop_last=drop_last, num_epochs=1)
        self.accumulate: int = accumulate
        self.num_steps: Integers = (
            np.full_like(per_epoch, options.local_steps)
            if options.local_steps
            else (options.local_epochs or 1) * -(-per_epoch // accumulate)
        )
        self.num_batches = batches_of_steps(self.num_steps, per_epoch, accumulate)
        self.fleet, self.arrivals = simulated_time(options, self.num_steps)
        cohort, aggregator = options.cohort, as_aggregator(options.aggregator)
        if options.asynchronous is not None:
            cohort = ArrivingCohort(self.arrivals, options.asynchronous.buffer_size)
        fewest, privacy = 1, options.client_privacy
        if aggregator.protection is not None:
            fewest = max(FEWEST_CLIENTS, (privacy and privacy.min_shares) or 0)
        ranks = trainer.world_size

        def share(ids: ClientIds) -> ClientIds:
            """Return the part of a cohort that this process trains."""
            return ids[shares(self.num_batches[ids], ranks)[trainer.global_rank]]

        self.cohorts = RoundCohorts(
            cohort,
            Population(sizes),
            options.seed,
            share=None if ranks == 1 else share,
            limit=trainer.limit_train_batches or 1.0,  # with 0 Lightning does not train
            fewest=fewest,
        )
        most = self.cohorts.num_clients if options.cohort.has_fixed_size else len(sizes)
        raise_together(
            lambda: check_validation_interval(trainer),
            lambda: check_cohort_size(most, options.min_replies, options.aggregator),
            lambda: check_trusted(options.aggregator, options.cohort, len(sizes)),
        )
        if aggregator.protection is not None:
            terms = Terms(most_clients=most, seed=options.seed, num_processes=ranks)
            aggregator.protection.begin(terms)

    @property
    def planned_steps(self) -> int:
        """Local steps per round as learning-rate schedules count them: the largest number that a client takes."""
        return max(1, int(self.num_steps.max(initial=0)))

    def run_of(
        self, trainer: Trainer, options: Options, examples: DrawsBatches | None = None
    ) -> Run:
        """Return the shared objects (`Run`) of the fit that a Trainer is about to begin."""
        work = LocalWork(
            options.local_steps, options.local_epochs, self.accumulate, options.seed, examples
        )
        return Run(trainer, self.cohorts, work, options.client_memory_gb * 1e9)


def begin(trainer: Trainer, options: Options, calendar: Calendar) -> FitRounds:
    """Build the server, the stages and the clients' side of a fit from the module's weights and optimizer.

    Raises:
        ConfigurationError: for settings that conflict, all at once.
    """
    check_begun(trainer, options)
    private = private_stage(trainer, options, calendar)
    aggregator = None if private is None else private.aggregator
    if aggregator is None:
        aggregator = run_aggregator(trainer, options.aggregator, options.attackers)
    run = calendar.run_of(trainer, options, None if private is None else private.draws)
    rounds = FitRounds(
        run,
        options,
        stages_of(run, options, aggregator, calendar.fleet, calendar.arrivals, private),
        lambda model: Server(model, aggregator, options.server_optimizer, options.server_schedule),
    )
    if options.correction is not None:
        options.correction.check_server(rounds.server.optimizer)
    if isinstance(trainer.strategy.checkpoint_io, AtomicCheckpointIO):
        trainer.strategy.checkpoint_io.files = lambda: rounds.memory.files_of_checkpoint
    return rounds


def check_begun(trainer: Trainer, options: Options) -> None:
    """Check module, optimizers and data once Lightning has set them up; raise all errors at once."""
    raise_together(
        lambda: check_set_up(trainer),
        lambda: check_trainer_together(trainer, options),
        lambda: None if options.clients_side else check_data_fits(trainer),  # at sites
    )


def begin_at_site(trainer: Trainer, options: Options, calendar: Calendar) -> tuple[Run, Stages]:
    """Return a remote site's run and stages: the site trains clients for a server elsewhere, which aggregates."""
    run = calendar.run_of(trainer, options)
    aggregator = run_aggregator(trainer, options.aggregator, None)
    return run, stages_of(run, options, aggregator, calendar.fleet, calendar.arrivals, None)


def private_stage(trainer: Trainer, options: Options, calendar: Calendar) -> PrivateStage | None:
    """Return the stage that makes a run differentially private, or None if no privacy is set.

    Raises:
        ConfigurationError: if the run cannot be accounted for.
    """
    if options.privacy is None:
        return None
    data: FederatedDataModule = trainer.datamodule  # type: ignore[attr-defined]
    aggregator, fewest, local = as_aggregator(options.aggregator), None, None
    if options.example_privacy is not None:
        check_local_steps(trainer, calendar.accumulate)
        local = LocalSampling(data.clients.num_examples, data.batch_size, calendar.num_steps)
    secure = aggregator.noise_shares
    if secure is not None and options.cohort.has_fixed_size:
        fewest = secure.fewest_survivors(calendar.cohorts.num_clients)
    rounds, params = trainer.max_epochs, trainer.lightning_module.parameters()
    run = AccountedRun(
        options.cohort,
        num_clients=len(data.clients),
        num_rounds=None if rounds is None or rounds < 0 else rounds,
        seed=options.seed,
        num_coordinates=sum(p.numel() for p in params if p.requires_grad),
        fewest_survivors=fewest,
        local=local,
    )
    if options.example_privacy is not None:
        return ExampleRounds(options.example_privacy, run)
    assert options.client_privacy is not None
    return PrivateRounds(
        options.client_privacy,
        run,
        Ranks(trainer),
        exact=aggregator.exact,
        secure=secure,
        has_memory=options.clients_remember,
        at_sites=options.clients_side is not None,
    )


def take_over(
    trainer: Trainer, train: Callable[[CohortBatch], None], run: Run, cleanup: ExitStack
) -> None:
    """Install the federated rounds in the Trainer's fit loop and hooks; ``cleanup`` restores them."""
    cleanup.callback(run.step.use, ())
    counts_of(trainer).planned_batches = 0
    trainer.accumulate_grad_batches = 1  # global_step counts rounds
    install(trainer, train)
    filters = list(warnings.filters)  # not `catch_warnings`, which would also restore `showwarning`
    cleanup.callback(setattr, warnings, "filters", filters)
    # schedules step once a round, also where no client of this process has stepped the optimizer
    warnings.filterwarnings("ignore", "Detected call of `lr_scheduler.step")
    # a warning about single steps: a federation's checkpoint holds the round's global model
    warnings.filterwarnings("ignore", "Using ModelCheckpoint with manual optimization")
    cleanup.enter_context(preserve_global_generators())
    owners: tuple[Any, ...] = (run.module, run.data)
    for owner in owners:
        keep_cohorts_from_hooks(owner, cleanup)
