"""Who trains in which round of a fit, how Lightning counts it, and which rounds move nothing.

A round is an epoch, a group of clients a batch, the server's step an optimizer step of Lightning's.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from lightning.pytorch import LightningModule, Trainer
from torch.optim import Optimizer

from fl_lightning.core.errors import raise_together
from fl_lightning.data.cohorts.population import Population
from fl_lightning.data.federated import FederatedDataModule
from fl_lightning.data.shards import batches_of_steps, local_work
from fl_lightning.federation.checks.fit import (
    check_cohort_size,
    check_trusted,
    check_validation_interval,
)
from fl_lightning.federation.clients.engine_options import (
    num_short_clients,
    trains_in_large_groups,
)
from fl_lightning.federation.groups import RoundGroups, Share
from fl_lightning.federation.options import Options
from fl_lightning.federation.plan import DrawsBatches, LocalWork
from fl_lightning.federation.run import Run
from fl_lightning.federation.stages.devices import VirtualTime
from fl_lightning.privacy.mechanism import Privacy
from fl_lightning.server.aggregator import Aggregator
from fl_lightning.server.protected import FEWEST_CLIENTS, Terms
from fl_lightning.server.server import as_aggregator


@dataclass(frozen=True)
class Calendar:
    """The rounds of one fit.

    Attributes:
        groups: of clients, round by round.
        num_steps: local steps of every client's round, shape (num_clients,).
        num_batches: batches of it, likewise.
        accumulate: batches of a local step; an epoch's last step takes those that are left.
        time: what is simulated of it.
        fewest_clients: of a cohort whose updates are not to be seen; a smaller one would show them.
    """

    groups: RoundGroups
    num_steps: npt.NDArray[np.int64]
    num_batches: npt.NDArray[np.int64]
    accumulate: int
    time: VirtualTime
    fewest_clients: int

    @property
    def planned_steps(self) -> int:
        """Local steps of a round by which schedules count: those of the client with the most."""
        return max(1, int(self.num_steps.max(initial=0)))

    @classmethod
    def of(cls, trainer: Trainer, module: LightningModule, options: Options) -> Calendar:
        """Return the calendar of a Trainer whose data are set up.

        Raises:
            ConfigurationError: for cohorts that can never be large enough, and validation that would
                never come.
        """
        data: FederatedDataModule = trainer.datamodule  # type: ignore[attr-defined]
        accumulate, population = (
            trainer.accumulate_grad_batches,
            Population(data.clients.num_examples),
        )
        per_epoch = _batches_per_epoch(options, data)
        num_steps = (
            np.full_like(per_epoch, options.local_steps)
            if options.local_steps
            else (options.local_epochs or 1) * -(-per_epoch // accumulate)
        )
        batches = batches_of_steps(num_steps, per_epoch, accumulate)
        time = VirtualTime.of(
            options.devices,
            options.asynchronous,
            num_steps,
            options.seed,
            elsewhere=options.clients_side is not None,
        )
        aggregator = as_aggregator(options.aggregator)
        fewest = _fewest_clients(aggregator, options.client_privacy)
        groups = RoundGroups(
            time.cohort or options.cohort,
            population,
            options.seed,
            share=_share(trainer, batches),
            clients_per_group=_clients_per_group(trainer, module, options, data),
            restarts=options.client_privacy is not None
            or aggregator.restarts
            or any(stage.restarts for stage in options.stages),
            limit=trainer.limit_train_batches or 1.0,  # with 0 Lightning does not train
            fewest=fewest,
        )
        fixed = options.cohort.has_fixed_size
        most = groups.num_clients if fixed else population.num_clients
        raise_together(
            lambda: check_validation_interval(trainer, len(groups)),
            lambda: check_cohort_size(most, options.min_replies, options.aggregator),
            lambda: check_trusted(options.aggregator, options.cohort, population.num_clients),
        )
        if aggregator.protection is not None:
            terms = Terms(most_clients=most, seed=options.seed, num_processes=trainer.world_size)
            aggregator.protection.begin(terms)
        return cls(groups, num_steps, batches, accumulate, time, fewest)

    def run_of(
        self, trainer: Trainer, options: Options, examples: DrawsBatches | None = None
    ) -> Run:
        """Return the run of a Trainer that is about to fit.

        Args:
            trainer: set up.
            options: what was asked for.
            examples: draws clients' batches by coins, for privacy; None for passes over their shards.
        """
        work = LocalWork(
            options.local_steps, options.local_epochs, self.accumulate, options.seed, examples
        )
        return Run.of(trainer, self.groups, work, options.client_memory_gb * 1e9)

    def settings_of(self, trainer: Trainer) -> dict[str, Any]:
        """Return settings of the Trainer under which Lightning counts rounds."""
        settings: dict[str, Any] = {"log_every_n_steps": 1}
        if trainer.limit_train_batches:  # which counts clients and not groups of them
            settings["limit_train_batches"] = 1.0
        return settings


def _batches_per_epoch(options: Options, data: FederatedDataModule) -> npt.NDArray[np.int64]:
    return local_work(
        data.clients.num_examples,
        data.batch_size,
        drop_last=data.drop_last and options.example_privacy is None,
        num_epochs=1,
    )


def _fewest_clients(aggregator: Aggregator, privacy: Privacy | None) -> int:
    if aggregator.protection is None:
        return 1
    shares = None if privacy is None else privacy.min_shares
    return max(FEWEST_CLIENTS, shares or 0)


def _share(trainer: Trainer, batches: npt.NDArray[np.int64]) -> Share | None:
    """Return which part of every cohort this process trains; None for the whole."""
    if trainer.world_size == 1:
        return None
    return Share(batches, trainer.global_rank, trainer.world_size)


def _clients_per_group(
    trainer: Trainer, module: LightningModule, options: Options, data: FederatedDataModule
) -> int:
    """Return how many clients make up a group."""
    if options.clients_per_group is not None:
        return options.clients_per_group
    per_epoch = data.clients.num_examples.mean() / data.batch_size
    of_steps = (options.local_steps or 0) * trainer.accumulate_grad_batches
    per_client = float(of_steps or per_epoch * (options.local_epochs or 1))
    rounds: float | None = trainer.max_epochs
    rounds = math.inf if rounds is None or rounds < 0 else rounds
    cohort = options.cohort.expected_size(len(data.clients))
    by_hand = not module.automatic_optimization  # never in slots
    if not by_hand and trains_in_large_groups(
        options.execution, module, trainer.strategy.root_device, rounds * cohort * per_client
    ):
        return cohort
    interval = trainer.val_check_interval  # counts groups; 1.0, unlike 1, is the whole round
    if isinstance(interval, int) or interval != 1.0:
        return 1
    return num_short_clients(module, max(1.0, per_client), data.batch_size)


_NOTHING = 1e-9  # of the rate at the beginning; torch's cosines end at 1e-18 as well as at 0


def idle_lines(
    number: int, options: Options, calendar: Calendar, clients: Optimizer | None, server: Optimizer
) -> Iterator[str]:
    """Give what to tell before a round in which nobody trains or nothing moves.

    Args:
        number: of the round that begins.
        options: what was asked for.
        calendar: who trains when.
        clients: their optimizer, as its schedule left it; None if its rate moves from step to step.
        server: its optimizer, likewise.
    """
    if num_left_out := calendar.groups.num_left_out(number):
        yield (
            f"round {number}: a cohort of {num_left_out} is too small for "
            f"{type(options.aggregator).__name__}, which hides updates among those of "
            f"{calendar.fewest_clients} clients or more: nobody trains, the model stays as it is"
        )
    pairs = (("the clients' one", clients), ("the server's", server))
    if idle := [whose for whose, made in pairs if made is not None and _is_zero(made)]:
        noise = "; the noise of privacy is all that is left" if options.privacy is not None else ""
        yield (
            f"round {number}: a learning rate is 0, so nothing moves ({' and '.join(idle)}){noise}. "
            "Have the schedule reach 0 after the last round"
        )


def _is_zero(optimizer: Optimizer) -> bool:
    return all(
        float(group["lr"]) <= _NOTHING * float(group.get("initial_lr", 1.0))
        for group in optimizer.param_groups
    )
