"""What does not go with a module that steps its optimizers by hand: told before the run starts.

Where ``training_step`` itself goes backward and steps, there is no loss to add to, no gradient of a
loss to take elsewhere, and no step that could be private or accumulated for it.
"""

from __future__ import annotations

from collections.abc import Iterator

from lightning.pytorch import LightningModule, Trainer

from fl_lightning.client.corrections.correction import Correction
from fl_lightning.client.personal.personalisation import Personalisation
from fl_lightning.core.errors import ConfigurationError
from fl_lightning.data.cohorts.cohort import CohortSampler, as_cohort
from fl_lightning.privacy.example import ExampleDP
from fl_lightning.server.aggregator import Aggregator
from fl_lightning.server.robust.rule import RobustRule
from fl_lightning.server.server import as_aggregator


def check_by_hand(
    module: LightningModule,
    *,
    cohort: CohortSampler,
    correction: Correction | None,
    personal: Personalisation | None,
    example_privacy: ExampleDP | None,
) -> None:
    """Refuse options that need the loss which ``training_step`` would return.

    Raises:
        ConfigurationError: with all of them in one sentence.
    """
    if module.automatic_optimization:
        return
    problems = list(_problems(cohort, correction, personal, example_privacy))
    if problems:
        raise ConfigurationError(
            f"{type(module).__name__} steps its optimizers by hand (automatic_optimization = "
            f"False), which does not work with {'; or with '.join(problems)}"
        )


def _problems(
    cohort: CohortSampler,
    correction: Correction | None,
    personal: Personalisation | None,
    example_privacy: ExampleDP | None,
) -> Iterator[str]:
    if example_privacy is not None:
        yield (
            "federation.privacy ExampleDP, which makes every gradient private ahead of its step: use "
            "the privacy of clients, such as CentralDP"
        )
    reason = None if correction is None else correction.reason_against_manual_steps
    if reason is not None:
        yield f"federation.correction {reason}"
    if personal is not None and personal.mixture is not None:
        yield (
            "federation.personal APFL, which takes gradients at a mixture of two models: use Ditto "
            "or Personal"
        )
    if personal is not None and personal.own_epochs is not None:
        yield (
            "federation.personal with own_epochs, which freezes one part after the other: a step of one "
            "optimizer may then have nothing to train. Leave own_epochs out"
        )
    if personal is not None and personal.tuning_steps > 0:
        yield (
            "federation.personal FineTuned, which takes steps of its own on the loss: use Ditto or "
            "Personal"
        )
    if as_cohort(cohort).needs_fresh_losses:
        yield (
            f"federation.cohort {type(cohort).__name__}, which measures the loss of training_step: "
            "set its losses to last_known, or use UniformCohort"
        )


def check_several(trainer: Trainer, aggregator: Aggregator | RobustRule | None) -> None:
    """Refuse aggregators that ask how many steps a client took, where several optimizers count.

    Raises:
        ConfigurationError: with what to use.
    """
    if as_aggregator(aggregator).divides_by_steps and len(trainer.optimizers) > 1:
        raise ConfigurationError(
            f"federation.aggregator {type(aggregator).__name__} divides by the length of a client's "
            f"steps, and {type(trainer.lightning_module).__name__} has {len(trainer.optimizers)} "
            "optimizers with steps of their own: use Mean"
        )
