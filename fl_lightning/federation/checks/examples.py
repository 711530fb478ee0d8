"""What goes with differential privacy of examples, and what does not."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from lightning.pytorch import Trainer
from lightning.pytorch.utilities import rank_zero_warn

from fl_lightning.core.errors import ConfigurationError
from fl_lightning.data.federated import FederatedDataModule
from fl_lightning.engines import check_examples_apart
from fl_lightning.federation.checks.privacy import shown_by
from fl_lightning.federation.execution.engine_options import FULL_PRECISIONS
from fl_lightning.federation.visits.batches import has_batch_hooks
from fl_lightning.federation.visits.lightning_step import extra_work
from fl_lightning.privacy.example import ExampleDP


def check_local_steps(trainer: Trainer, accumulate: int) -> None:
    """Refuse local steps that do more with a batch than to sum up its examples' gradients.

    Args:
        trainer: set up for fitting.
        accumulate: batches per local step.

    Raises:
        ConfigurationError: one line for each.
    """
    check_examples_apart(trainer.lightning_module)
    problems = list(_step_problems(trainer, accumulate))
    if problems:
        raise ConfigurationError("federation.privacy ExampleDP: " + "; ".join(problems))


def _step_problems(trainer: Trainer, accumulate: int) -> Iterator[str]:
    if accumulate > 1:
        yield (
            f"a local step of {accumulate} batches is no sample of its own: set "
            "accumulate_grad_batches to 1 and the batch size to their product (gradients are taken "
            "in chunks that fit the memory)"
        )
    if trainer.precision not in FULL_PRECISIONS:
        yield (
            f"trainer.precision {trainer.precision} rounds gradients before they are clipped: set "
            "it to 32-true or 64-true"
        )
    if extra := extra_work(trainer):
        yield f"local steps are clipped sums and noise, and nothing else, here {extra}"
    if has_batch_hooks(trainer):
        yield (
            "module or data module have hooks around batches, which may mix examples: do it in the "
            "data set or in training_step"
        )
    data: FederatedDataModule = trainer.datamodule  # type: ignore[attr-defined]
    indices = data.clients.flat.indices
    if repeated := indices.size - np.unique(indices).size:
        yield (
            f"shards repeat or share {repeated} of their examples, each of which ε counts once: use "
            "a partition that gives every example to one client, once"
        )
    if data.draws_by_weight:
        yield (
            "the loader's sampler draws examples by weight or with replacement, and ε counts on equal "
            "chances: use another, or set data.ignore_sampler to true"
        )
    if data.has_own_collate:
        yield (
            "the loader's collate_fn makes a batch of examples, and may mix them: do it in the data "
            "set or in training_step"
        )


def warn_of_unprotected(trainer: Trainer, privacy: ExampleDP) -> None:
    """Name what is released and not covered, in one warning."""
    names = shown_by(trainer.callbacks)  # type: ignore[attr-defined]
    if privacy.log_unprotected:
        names.append("training loss, metrics and norms in the logs (log_unprotected: false)")
    names.append("how many examples each client has")
    rank_zero_warn("privacy: ε covers updates and models, and not: " + "; ".join(names))
    counts = trainer.datamodule.clients.num_examples  # type: ignore[attr-defined]
    most = int(counts.max())
    if privacy.delta >= 1 / most:
        rank_zero_warn(
            f"privacy: delta = {privacy.delta:g} is not below 1 / {most} examples of a client: a "
            "mechanism that publishes one of them could have it. Set it to a tenth of that or less"
        )
    if not privacy.secure_noise:
        rank_zero_warn(
            "privacy: secure_noise is false, so who knows the seed can take the noise off again"
        )
