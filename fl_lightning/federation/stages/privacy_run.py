"""Privacy in a Trainer's run: what it goes with, how it is made, what is said of it.

Of clients, or of their single examples.
"""

from __future__ import annotations

from lightning.pytorch import Trainer

from fl_lightning.data.cohorts.cohort import as_cohort
from fl_lightning.data.federated import FederatedDataModule
from fl_lightning.federation.calendar import Calendar
from fl_lightning.federation.checks.privacy import check_local_steps
from fl_lightning.federation.options import Options
from fl_lightning.federation.processes.ranks import Ranks
from fl_lightning.federation.stages.example_rounds import ExampleRounds
from fl_lightning.federation.stages.privacy_ledger import PrivateStage
from fl_lightning.federation.stages.private_rounds import PrivateRounds
from fl_lightning.privacy.example import ExampleDP
from fl_lightning.privacy.mechanism import Privacy
from fl_lightning.privacy.run import AccountedRun, LocalSampling
from fl_lightning.server.server import as_aggregator


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
    if secure is not None and as_cohort(options.cohort).has_fixed_size:
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
