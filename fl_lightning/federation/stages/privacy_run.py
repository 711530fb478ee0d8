"""Privacy in a Trainer's run: what it goes with, how it is made, what is said of it.

Of clients or of their single examples: which of the two is asked here and nowhere else.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
from lightning.pytorch import Trainer

from fl_lightning.client.corrections.correction import Correction
from fl_lightning.client.personal.personalisation import Personalisation
from fl_lightning.core.errors import ConfigurationError
from fl_lightning.data.cohorts.cohort import CohortSampler, as_cohort
from fl_lightning.data.federated import FederatedDataModule
from fl_lightning.federation.checks.examples import (
    check_examples_private,
    check_local_steps,
    warn_of_unprotected,
)
from fl_lightning.federation.checks.privacy import (
    check_inputs,
    check_nothing_else,
    check_one_mask,
    check_private,
    check_whole_cohorts,
    warn_of_releases,
)
from fl_lightning.federation.execution.engine_options import EngineOptions
from fl_lightning.federation.processes.ranks import Ranks
from fl_lightning.federation.round import Round
from fl_lightning.federation.stages.example_rounds import ExampleRounds
from fl_lightning.federation.stages.private_rounds import PrivateRounds
from fl_lightning.privacy.example import ExampleDP
from fl_lightning.privacy.mechanism import Privacy
from fl_lightning.privacy.protected import TakesNoiseShares
from fl_lightning.privacy.run import LocalSampling, Run
from fl_lightning.server.aggregator import Aggregator
from fl_lightning.server.robust.collect import RobustRule
from fl_lightning.server.server import as_aggregator
from fl_lightning.updates.path import Step


def check_privacy(
    privacy: Privacy | ExampleDP | None,
    *,
    cohort: CohortSampler,
    aggregator: Aggregator | RobustRule | None,
    correction: Correction | None,
    personal: Personalisation | None,
    updates: Sequence[Step],
    asynchronous: object,
    attackers: object,
    engine: EngineOptions,
) -> None:
    """Refuse options of a federation for which nothing is proved.

    Raises:
        ConfigurationError: naming them.
    """
    if isinstance(privacy, ExampleDP):
        check_examples_private(
            privacy, cohort, aggregator, correction, personal, asynchronous, engine
        )
    elif privacy is not None:
        check_private(privacy, cohort, aggregator, correction, updates)
        check_nothing_else(asynchronous, attackers)


def check_trainer(privacy: Privacy | ExampleDP | None, trainer: Trainer) -> None:
    """Refuse settings of Trainer and data under which ε would not hold; to be asked before set-up.

    Raises:
        ConfigurationError: naming them.
    """
    if privacy is not None:
        check_inputs(trainer)
    if protects_clients(privacy):
        check_whole_cohorts(trainer)


def protects_clients(privacy: Privacy | ExampleDP | None) -> bool:
    """Return whether it is clients whose taking part is hidden."""
    return privacy is not None and not isinstance(privacy, ExampleDP)


def privacy_at_work(
    trainer: Trainer,
    privacy: Privacy | ExampleDP | None,
    cohort: CohortSampler,
    seed: int,
    aggregator: Aggregator | RobustRule | None,
    *,
    cohort_size: int,
    num_steps: npt.NDArray[np.int64],
    accumulate: int,
) -> PrivateRounds | ExampleRounds | None:
    """Return what makes a run's rounds private; None if nothing was asked for.

    Args:
        trainer: set up for fitting.
        privacy: what the user asked for.
        cohort: who takes part.
        seed: the run's.
        aggregator: what the user asked for.
        cohort_size: clients of a round, as many as are expected.
        num_steps: local steps of every client's round, shape (num_clients,).
        accumulate: batches of a local step.

    Raises:
        ConfigurationError: if the run cannot be accounted for.
    """
    if privacy is None:
        return None
    if isinstance(privacy, ExampleDP):
        check_local_steps(trainer, accumulate)
        return example_rounds(trainer, privacy, cohort, seed, num_steps)
    return private_rounds(trainer, privacy, cohort, seed, aggregator, cohort_size)


def announce_privacy(
    trainer: Trainer,
    privacy: Privacy | ExampleDP | None,
    private: PrivateRounds | ExampleRounds | None,
    rounds: Round,
) -> None:
    """Say before the first round what is promised and what is not; stop where nothing is left."""
    if privacy is None or private is None:
        return
    private.announce_cost()
    if isinstance(privacy, ExampleDP):
        warn_of_unprotected(trainer, privacy)
    else:
        warn_of_releases(
            trainer,
            privacy,
            num_clients=len(trainer.datamodule.clients),  # type: ignore[attr-defined]
            num_buffers=rounds.server.model.buffers.numel(),
            has_memory=rounds.stages.remembers,
        )
    private.ledger.stop_within_budget(trainer, trainer.current_epoch)


def count_on(
    private: PrivateRounds | ExampleRounds | None, earlier: PrivateRounds | ExampleRounds | None
) -> None:
    """Count what rounds of an earlier fit of the same Trainer have spent.

    Args:
        private: of the fit that begins; None if nothing is private.
        earlier: of the same Federation's fit before it; None if there was none.

    Raises:
        ConfigurationError: if nobody here knows what they cost, or these cost something else.
    """
    if private is None:
        return
    if earlier is None:
        raise ConfigurationError(
            "federation.privacy: this Trainer has trained before, with another Federation or "
            "without privacy, and what that cost is not known here: keep to one Federation, go on "
            "from a private run's checkpoint with ckpt_path, or begin with a new Trainer"
        )
    private.load_state_dict(earlier.state_dict())


def private_rounds(
    trainer: Trainer,
    privacy: Privacy,
    cohort: CohortSampler,
    seed: int,
    aggregator: Aggregator | RobustRule | None,
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
    if secure is not None and as_cohort(cohort).has_fixed_size:
        fewest = secure.fewest_survivors(cohort_size)
    run = _run(trainer, cohort, seed, fewest_survivors=fewest)
    exact = as_aggregator(aggregator).exact
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
