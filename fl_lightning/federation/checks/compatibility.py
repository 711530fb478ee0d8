"""What a federated run cannot work with: told before it starts, all at once, with the way out."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from lightning.pytorch import LightningModule, Trainer, callbacks
from lightning.pytorch.strategies import SingleDeviceStrategy
from torch import nn
from torch.optim import Optimizer

from fl_lightning.core.errors import ConfigurationError
from fl_lightning.data.federated import FederatedDataModule
from fl_lightning.federation.processes.strategy import FederatedStrategy

_CALLBACKS = {
    callbacks.GradientAccumulationScheduler: "set accumulate_grad_batches, which counts a client's batches",
    callbacks.StochasticWeightAveraging: "it averages a client's steps, and every round starts from the "
    "server's model: average rounds with a server optimizer instead",
    callbacks.LearningRateFinder: "find the rate in a central run, without the federation block",
    callbacks.BatchSizeFinder: "find the size in a central run, without the federation block",
}
_AVERAGES_STEPS = (
    "averages after steps, and a federation's are rounds: subclass WeightAveraging, with should_update "
    "true for an epoch_idx and a decay meant for rounds"
)


def check_compatible(trainer: Trainer, module: LightningModule) -> None:
    """Refuse combinations that would give a wrong result.

    Raises:
        ConfigurationError: one line for each of them.
    """
    problems = [*_data_problems(trainer), *_module_problems(module), *_trainer_problems(trainer)]
    if problems:
        raise ConfigurationError("; ".join(problems))


def _data_problems(trainer: Trainer) -> Iterator[str]:
    data = trainer.datamodule  # type: ignore[attr-defined]
    if not isinstance(data, FederatedDataModule):
        given = "no data module" if data is None else type(data).__name__
        yield (
            f"a federation needs a FederatedDataModule, got {given}: wrap yours as "
            "FederatedDataModule(source=…, num_clients=…)"
        )


def _module_problems(module: LightningModule) -> Iterator[str]:
    name = type(module).__name__
    if "dataloader_iter" in inspect.signature(module.training_step).parameters:
        yield f"{name}.training_step takes a dataloader_iter: take (batch, batch_idx) instead"


def check_strategy(trainer: Trainer) -> None:
    """Refuse strategies that train in step; to be asked before the Trainer launches processes.

    Raises:
        ConfigurationError: if the Trainer's strategy would exchange gradients or shard the model.
    """
    problems = list(_strategy_problems(trainer))
    if problems:
        raise ConfigurationError("; ".join(problems))


def _strategy_problems(trainer: Trainer) -> Iterator[str]:
    if not isinstance(trainer.strategy, (SingleDeviceStrategy, FederatedStrategy)):
        yield (
            f"trainer.strategy {type(trainer.strategy).__name__} keeps {trainer.world_size} "
            "processes in step, where clients train apart: set trainer.strategy to federated, or "
            "trainer.devices to 1 and trainer.strategy to auto"
        )


def _trainer_problems(trainer: Trainer) -> Iterator[str]:
    yield from _strategy_problems(trainer)
    if trainer.accumulate_grad_batches < 1:
        yield (
            "trainer.accumulate_grad_batches must be at least 1 batch, "
            f"got {trainer.accumulate_grad_batches}"
        )
    if trainer.gradient_clip_val is not None and trainer.gradient_clip_val < 0:
        yield (
            f"trainer.gradient_clip_val must not be negative, got {trainer.gradient_clip_val}: it "
            "is the largest norm (or value) of a gradient; 0 or null is no clipping"
        )
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        for kind, advice in _CALLBACKS.items():
            if isinstance(callback, kind):
                yield f"{kind.__name__} does not work with a federation: {advice}"
        averaging = getattr(callbacks, "WeightAveraging", ())  # of newer Lightning
        if isinstance(callback, averaging) and _is_lightnings(callback.should_update):
            yield f"{type(callback).__name__} {_AVERAGES_STEPS}"
    if trainer.overfit_batches:  # type: ignore[attr-defined]
        yield "trainer.overfit_batches does not work with a federation: use limit_train_batches"


def check_validation_interval(trainer: Trainer, num_groups: int) -> None:
    """Refuse to validate less often than once per round, by a count of what a round consists of.

    Raises:
        ConfigurationError: naming the setting that counts rounds.
    """
    interval = trainer.val_check_interval
    counts_in_round = isinstance(interval, int) and trainer.check_val_every_n_epoch is not None
    if counts_in_round and interval > num_groups and trainer.limit_val_batches > 0:
        raise ConfigurationError(
            f"trainer.val_check_interval counts the batches of a round, which are groups of "
            f"clients: it must be at most {num_groups} here, got {interval}. To validate every N "
            "rounds set trainer.check_val_every_n_epoch to N"
        )


def check_set_up(trainer: Trainer) -> None:
    """Refuse what is known only once Lightning has set up the module.

    Raises:
        ConfigurationError: for layers that exchange statistics.
    """
    if any(isinstance(child, nn.SyncBatchNorm) for child in trainer.lightning_module.modules()):
        raise ConfigurationError(
            "SyncBatchNorm averages over processes, where clients train apart: set "
            "trainer.sync_batchnorm to false"
        )


# of what is added to a gradient
ADDED_TO_LOSS = (
    "is added to the gradient of what is minimised, and the clients' optimizer has maximize: leave that "
    "out and return the negative loss"
)


def any_maximises(optimizers: Iterable[Optimizer]) -> bool:
    """Return whether an optimizer goes up."""
    groups = (group for each in optimizers for group in each.param_groups)
    return any(group.get("maximize") for group in groups)


def _is_lightnings(method: Callable[..., Any]) -> bool:
    return method.__module__.startswith("lightning.")
