"""Privacy at work, made for a Trainer's run: of clients, or of their single examples."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
from lightning.pytorch import Trainer

from fl_lightning.data.cohort import CohortSampler, PoissonCohort
from fl_lightning.data.federated import FederatedDataModule
from fl_lightning.federation.example_rounds import ExampleRounds
from fl_lightning.federation.privacy_checks import check_one_mask
from fl_lightning.federation.private_rounds import PrivateRounds
from fl_lightning.federation.ranks import Ranks
from fl_lightning.server.privacy.example import ExampleDP
from fl_lightning.server.privacy.mechanism import Privacy
from fl_lightning.server.privacy.run import LocalSampling, Run
from fl_lightning.server.protected import TakesNoiseShares


def private_rounds(
    trainer: Trainer,
    privacy: Privacy,
    cohort: CohortSampler,
    seed: int,
    aggregator: object,
    cohort_size: int,
) -> PrivateRounds:
    """Return privacy of clients at work.

    Args:
        trainer: set up for fitting.
        privacy: what the user asked for.
        cohort: who takes part.
        seed: the run's.
        aggregator: what the user asked for; a secure sum adds up what clients send with their noise.
        cohort_size: clients of a round, as many as are expected.

    Raises:
        ConfigurationError: if the run cannot be accounted for.
    """
    check_one_mask(trainer)
    secure = aggregator if isinstance(aggregator, TakesNoiseShares) else None
    fewest = None
    if secure is not None and not isinstance(cohort, PoissonCohort):
        fewest = secure.fewest_survivors(cohort_size)
    run = _run(trainer, cohort, seed, fewest_survivors=fewest)
    exact = getattr(aggregator, "exact", False)
    return PrivateRounds(privacy, run, Ranks(trainer), exact=exact, secure=secure)


def example_rounds(
    trainer: Trainer,
    privacy: ExampleDP,
    cohort: CohortSampler,
    seed: int,
    num_steps: npt.NDArray[np.int64],
) -> ExampleRounds:
    """Return privacy of examples at work.

    Args:
        trainer: set up for fitting.
        privacy: what the user asked for.
        cohort: who takes part.
        seed: the run's.
        num_steps: local steps of every client's round, shape (num_clients,).

    Raises:
        ConfigurationError: if the run cannot be accounted for.
    """
    data: FederatedDataModule = trainer.datamodule  # type: ignore[attr-defined]
    local = LocalSampling(data.clients.num_examples, data.batch_size, num_steps)
    return ExampleRounds(privacy, _run(trainer, cohort, seed, local=local))


def _run(
    trainer: Trainer,
    cohort: CohortSampler,
    seed: int,
    *,
    local: LocalSampling | None = None,
    fewest_survivors: int | None = None,
) -> Run:
    rounds, params = trainer.max_epochs, trainer.lightning_module.parameters()
    return Run(
        cohort,
        num_clients=len(trainer.datamodule.clients),  # type: ignore[attr-defined]
        num_rounds=None if rounds is None or rounds < 0 else rounds,
        seed=seed,
        num_coordinates=sum(p.numel() for p in params if p.requires_grad),
        fewest_survivors=fewest_survivors,
        local=local,
    )
