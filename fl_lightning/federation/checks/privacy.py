"""Checks of Trainer, module and data under differential privacy, of clients or of examples."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Protocol, runtime_checkable

import numpy as np
from lightning.pytorch import Trainer
from lightning.pytorch.utilities import rank_zero_warn

from fl_lightning.core.errors import ConfigurationError
from fl_lightning.data.federated import FederatedDataModule
from fl_lightning.engines import check_examples_apart
from fl_lightning.federation.clients.spot_check import FULL_PRECISIONS
from fl_lightning.federation.options import Options
from fl_lightning.federation.visits.lightning_step import extra_work
from fl_lightning.federation.visits.visiting import has_batch_hooks


@runtime_checkable
class ReleasesUnprotected(Protocol):
    """A callback, or a transform of inputs, that shows data of clients without noise."""

    @property
    def unprotected(self) -> str:
        """Text on which client data this object shows without noise, and where; empty if it shows none."""


def shown_by(owners: Iterable[object]) -> list[str]:
    """Describe the client data that callbacks or transforms reveal without noise."""
    showing = (owner for owner in owners if isinstance(owner, ReleasesUnprotected))
    return [owner.unprotected for owner in showing if owner.unprotected]


def check_trainer_private(trainer: Trainer, options: Options) -> None:
    """Raise for settings of Trainer and data under which ε would not hold; called before set-up."""
    if options.privacy is None:
        return
    data: FederatedDataModule = trainer.datamodule  # type: ignore[attr-defined]
    for transform in data.transforms:
        if shown_by([transform]):
            raise ConfigurationError(
                f"federation.privacy: {type(transform).__name__} in data.transforms computes statistics from all "
                "clients' inputs, without clipping or noise: use Normalize with given numbers instead"
            )
    limit = trainer.limit_train_batches  # as a whole number 1 is a client
    is_whole = limit == 0 or (isinstance(limit, float) and limit == 1.0)
    if options.client_privacy is not None and not is_whole:
        raise ConfigurationError(
            f"federation.privacy: trainer.limit_train_batches {limit} (also set by fast_dev_run) drops the clients "
            "with the highest ids from a cohort, which is then no random sample: set it to 1.0, and use a smaller "
            "cohort"
        )


def check_monitors(trainer: Trainer, unprotected: set[str]) -> None:
    """Raise if a learning-rate schedule monitors a metric without noise; warn of callbacks that monitor such metrics.

    To be called at a round's end, before Lightning's schedules step.
    """
    for config in trainer.lr_scheduler_configs:
        if config.reduce_on_plateau and config.monitor in unprotected:
            raise ConfigurationError(
                f"federation.privacy: ReduceLROnPlateau sets the learning rate by {config.monitor}, a metric of "
                "clients without noise, so that later models depend on it: monitor a metric of the server's "
                "validation data, or use a schedule over rounds"
            )
    looking = [
        f"{type(callback).__name__} ({callback.monitor})"
        for callback in trainer.callbacks  # type: ignore[attr-defined]
        if getattr(callback, "monitor", None) in unprotected
    ]
    if looking:  # Python shows the same warning only once
        rank_zero_warn(
            "privacy: ε does not cover that metrics of clients without noise decide when training ends or which "
            "models are kept: " + ", ".join(looking)
        )


def check_local_steps(trainer: Trainer, accumulate: int) -> None:
    """Raise if a local step does more with a batch than sum its examples' gradients, as example privacy assumes."""
    check_examples_apart(trainer.lightning_module)
    problems = list(_step_problems(trainer, accumulate))
    if problems:
        raise ConfigurationError("federation.privacy ExampleDP: " + "; ".join(problems))


def _step_problems(trainer: Trainer, accumulate: int) -> Iterator[str]:
    if accumulate > 1:
        yield (
            f"a local step of {accumulate} batches is not one random sample: set accumulate_grad_batches to 1 and "
            "the batch size to their product (gradients are computed in chunks that fit the memory)"
        )
    if trainer.precision not in FULL_PRECISIONS:
        yield (
            f"trainer.precision {trainer.precision} rounds gradients before they are clipped: set "
            "it to 32-true or 64-true"
        )
    if extra := extra_work(trainer):
        yield f"a local step must be a clipped sum plus noise and nothing else, but {extra}"
    if has_batch_hooks(trainer):
        yield (
            "hooks around batches in module or data module may mix examples: move them to the data set or to "
            "training_step"
        )
    data: FederatedDataModule = trainer.datamodule  # type: ignore[attr-defined]
    indices = data.clients.indices
    if repeated := indices.size - np.unique(indices).size:
        yield (
            f"{repeated} examples occur more than once in the clients' shards, and ε counts each once: use a "
            "partition that assigns every example to one client, once"
        )
    if data.draw_weights is not None:
        yield (
            "the loader's sampler draws examples by weight or with replacement, and ε assumes equal "
            "probabilities: use another sampler, or set data.ignore_sampler to true"
        )
    if data.training.has_own_collate:
        yield (
            "the loader's collate_fn may mix examples: do its work in the data set or in training_step"
        )
