"""Checks of Trainer, module and data against the options of a federation, before a fit starts.

All errors are raised together, each with a remedy. `Options` checks the values of options; conflicts
between parts follow from their traits, see `fl_lightning.core.traits`.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch
from lightning.pytorch import LightningModule, Trainer, callbacks
from lightning.pytorch.strategies import SingleDeviceStrategy
from torch import nn
from torch.optim import Optimizer

from fl_lightning.core.errors import ConfigurationError, raise_together
from fl_lightning.core.seeds import preserve_global_generators
from fl_lightning.core.traits import NO_TRAITS, Trait, Traits, check_together
from fl_lightning.data.cohorts.cohort import Cohort
from fl_lightning.data.federated import FederatedDataModule
from fl_lightning.federation.options import Options, traits_of
from fl_lightning.federation.processes.strategy import FederatedStrategy
from fl_lightning.federation.stage import Stage
from fl_lightning.federation.stages.client_masks import OWN_MASKS, client_masks
from fl_lightning.server.aggregator import Aggregator
from fl_lightning.server.robust.rule import RobustRule

_CALLBACKS = {
    callbacks.GradientAccumulationScheduler: "set accumulate_grad_batches, which counts a client's batches",
    callbacks.StochasticWeightAveraging: "it averages a client's steps, and every round starts from the "
    "server's model: average rounds with a server optimizer instead",
    callbacks.LearningRateFinder: "find the rate in a central run, without the federation block",
    callbacks.BatchSizeFinder: "find the size in a central run, without the federation block",
}
_OPTIONS = {
    "overfit_batches": "use limit_train_batches",
    "reload_dataloaders_every_n_epochs": "clients' examples are divided once, before the first round: set "
    "it to 0, and change examples over rounds in training_step, e.g. by current_epoch",
}
_AVERAGES_STEPS = (
    "averages weights after steps, and a step of a federation is a round: subclass WeightAveraging, with a "
    "should_update that returns True for an epoch_idx, and a decay per round"
)


def check_compatible(trainer: Trainer, module: LightningModule) -> None:
    """Raise for a module, data or Trainer settings that federated training does not support."""
    problems = [*_module_problems(trainer, module), *_trainer_problems(trainer)]
    if problems:
        raise ConfigurationError("; ".join(problems))


def _module_problems(trainer: Trainer, module: LightningModule) -> Iterator[str]:
    data, name = trainer.datamodule, type(module).__name__  # type: ignore[attr-defined]
    if not isinstance(data, FederatedDataModule):
        given = "no data module" if data is None else type(data).__name__
        yield (
            f"data: a federation needs a FederatedDataModule, got {given}: wrap yours as "
            "FederatedDataModule(source=…, num_clients=…)"
        )
    if "dataloader_iter" in inspect.signature(module.training_step).parameters:
        yield f"{name}.training_step takes a dataloader_iter: take (batch, batch_idx) instead"


def check_strategy(trainer: Trainer) -> None:
    """Raise for strategies that synchronise gradients; to be called before processes are launched."""
    problems = list(_strategy_problems(trainer))
    if problems:
        raise ConfigurationError("; ".join(problems))


def _strategy_problems(trainer: Trainer) -> Iterator[str]:
    if not isinstance(trainer.strategy, (SingleDeviceStrategy, FederatedStrategy)):
        yield (
            f"trainer.strategy {type(trainer.strategy).__name__} synchronises gradients of {trainer.world_size} "
            "processes, but clients train independently: set trainer.strategy to federated, or trainer.devices "
            "to 1 and trainer.strategy to auto"
        )


def _trainer_problems(trainer: Trainer) -> Iterator[str]:
    yield from (*_strategy_problems(trainer), *_callback_problems(trainer))
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
    for option, advice in _OPTIONS.items():
        if getattr(trainer, option):
            yield f"trainer.{option} does not work with a federation: {advice}"


def _callback_problems(trainer: Trainer) -> Iterator[str]:
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        for kind, advice in _CALLBACKS.items():
            if isinstance(callback, kind):
                yield f"{kind.__name__} does not work with a federation: {advice}"
        averaging = getattr(callbacks, "WeightAveraging", ())  # of newer Lightning
        is_lightnings = isinstance(callback, averaging) and (
            callback.should_update.__module__.startswith("lightning.")
        )
        if is_lightnings:
            yield f"{type(callback).__name__} {_AVERAGES_STEPS}"


def check_validation_interval(trainer: Trainer) -> None:
    """Raise if ``val_check_interval`` is not 1, the number of batches of a round."""
    interval = getattr(trainer, "val_check_interval", 1)  # missing if it is a time
    counts_in_round = trainer.check_val_every_n_epoch is not None and trainer.limit_val_batches > 0
    if counts_in_round and interval != 1:
        raise ConfigurationError(
            f"trainer.val_check_interval counts the batches of an epoch, and a round is an epoch of one "
            f"batch: it must be 1 here, got {interval}. To validate every N rounds set "
            "trainer.check_val_every_n_epoch to N"
        )


def check_set_up(trainer: Trainer) -> None:
    """Raise if the module, once set up, has synchronised batch norm."""
    if any(isinstance(child, nn.SyncBatchNorm) for child in trainer.lightning_module.modules()):
        raise ConfigurationError(
            "SyncBatchNorm averages over processes, but clients train independently: set "
            "trainer.sync_batchnorm to false"
        )


# end of an error about an option that adds a term to gradients
ADDED_TO_LOSS = (
    "is added to the gradient of a loss that is minimised, and the clients' optimizer has maximize=True: leave "
    "maximize out, and return the negative loss"
)


def any_maximises(optimizers: Iterable[Optimizer]) -> bool:
    """Return whether any optimizer has ``maximize=True``."""
    groups = (group for each in optimizers for group in each.param_groups)
    return any(group.get("maximize") for group in groups)


BY_HAND = Traits(
    breaks={Trait.RETURNED_LOSS: "steps its optimizers by hand (automatic_optimization = False)"}
)
SEVERAL = Traits(breaks={Trait.ONE_OPTIMIZER: "takes steps of different lengths"})
RATES_BY_STEP = Traits(
    breaks={Trait.ONE_RATE: "has a learning-rate schedule that changes it from step to step"},
    instead={Trait.ONE_RATE: "set the schedule's interval to 'epoch'"},
)
_SHARED_SCALE = Traits(
    needs={Trait.SIMULATION: "has one loss scale for all clients, which sites do not exchange"},
    instead={Trait.SIMULATION: "use bf16-mixed or 32-true"},
)
NETWORK = {"a network": Traits(breaks={Trait.SIMULATION: "has its clients at sites"})}
HIDDEN = {
    "this run over a network": Traits(breaks={Trait.CLEAR_SUMS: "hides what single clients send"})
}


def check_module_together(module: LightningModule, options: Options) -> None:
    """Raise if the federation's options conflict with the module, e.g. with manual optimization."""
    check_together({**options.parts, **_of_module(module)})


def check_trainer_together(trainer: Trainer, options: Options) -> None:
    """Raise if the federation's options conflict with a Trainer's optimizers, learning-rate schedules or masks."""
    parts = {**options.parts, **_of_module(trainer.lightning_module), **_of_masks(trainer)}
    if len(trainer.optimizers) > 1:
        name = f"the model with {len(trainer.optimizers)} optimizers"
        parts[name] = SEVERAL
    configs = (
        trainer.lr_scheduler_configs if trainer.lightning_module.automatic_optimization else ()
    )
    if any(config.interval == "step" for config in configs):
        parts["the model's optimizer"] = RATES_BY_STEP
    check_together(parts)


def check_simple(
    module: Any,
    data: FederatedDataModule,
    stages: Sequence[Stage],
    cohort: Cohort,
    aggregator: Aggregator,
) -> None:
    """Raise if options of rounds without a Trainer conflict with each other, with the module or with the data."""
    if aggregator.protection is not None:
        raise ConfigurationError(
            f"SimpleFederation cannot hide updates from the server: use Federation for {type(aggregator).__name__}"
        )
    parts = {type(part).__name__: traits_of(part) for part in (cohort, aggregator, *stages)}
    most = len(data.clients)
    if cohort.has_fixed_size:
        most = cohort.expected_size(most)
    raise_together(
        lambda: check_together(parts | _of_module(module)),
        lambda: check_shards(data, "raise"),
        lambda: check_update_weights(data, parts, aggregator),
        lambda: check_cohort_size(most, 0, aggregator),
        lambda: check_trusted(aggregator, cohort, len(data.clients)),
    )


def network_parts(trainer: Trainer, module: Any, options: Options) -> dict[str, Traits]:
    """Return what each option, callback and setting of a run over a network needs and breaks, by name."""
    parts = {**options.parts, **_of_module(module), **_of_masks(trainer), **NETWORK}
    others = trainer.callbacks  # type: ignore[attr-defined]
    parts |= {type(each).__name__: traits_of(each) for each in others}
    if options.hides_clients:
        parts |= HIDDEN
    if trainer.precision == "16-mixed":
        parts["trainer.precision 16-mixed"] = _SHARED_SCALE
    return parts


def _of_module(module: Any) -> dict[str, Traits]:
    traits = getattr(module, "federation_traits", NO_TRAITS)
    by_hand = not getattr(module, "automatic_optimization", True)
    return {f"model {type(module).__name__}": traits | BY_HAND if by_hand else traits}


def _of_masks(trainer: Trainer) -> dict[str, Traits]:
    return {} if client_masks(trainer) is None else {"a callback": OWN_MASKS}


def check_shards(data: FederatedDataModule, on_client_failure: str) -> None:
    """Raise if clients have no examples, unless failing clients are skipped."""
    empty = np.flatnonzero(data.clients.num_examples == 0)
    if len(empty) and on_client_failure == "raise":
        shown = ", ".join(map(str, empty[:5])) + (", …" if len(empty) > 5 else "")
        raise ConfigurationError(
            f"{len(empty)} of {len(data.clients)} clients have no training example "
            f"(client {shown}): use fewer clients or a partition with min_examples, or skip "
            "them with federation.on_client_failure: skip"
        )


UPDATE_WEIGHT = Traits(
    needs={Trait.EXAMPLE_WEIGHTS: "gives updates other weights than their numbers of examples"},
    breaks=dict.fromkeys(
        (Trait.PRIVATE_CLIENTS, Trait.PRIVATE_EXAMPLES),
        "is a sum over clients' examples, which ε does not cover",
    ),
    instead=dict.fromkeys(
        (Trait.EXAMPLE_WEIGHTS, Trait.PRIVATE_CLIENTS, Trait.PRIVATE_EXAMPLES),
        "leave update_weight out",
    ),
)


def check_update_weights(
    data: FederatedDataModule, parts: Mapping[str, Traits], aggregator: Aggregator | None
) -> None:
    """Raise if ``data.update_weight`` conflicts with other options, or exceeds the aggregator's limit."""
    if data.update_weight is None:
        return
    check_together({"data.update_weight": UPDATE_WEIGHT, **parts})
    largest, most = int(data.update_weights.max()), getattr(aggregator, "max_examples", None)
    if most is not None and largest > most:
        raise ConfigurationError(
            f"data.update_weight: the largest weight of a client is {largest}, and {type(aggregator).__name__} "
            f"allows at most {most}: set its max_examples to {largest}, or leave update_weight out"
        )


def check_cohort_size(most: int, min_replies: int, aggregator: Aggregator | None) -> None:
    """Raise if no cohort can have as many clients as ``min_replies`` or the aggregator requires."""
    if min_replies > most:
        raise ConfigurationError(
            f"federation.min_replies is {min_replies}, but a round has at most {most} clients: lower it, or raise "
            "the cohort's size"
        )
    if isinstance(aggregator, RobustRule) and aggregator.min_updates > most:
        raise ConfigurationError(
            f"federation.aggregator {aggregator} needs at least {aggregator.min_updates} updates, but a round "
            f"has at most {most}: raise the cohort's size, or lower num_attackers"
        )


def check_trusted(aggregator: Aggregator | None, cohort: Cohort, num_clients: int) -> None:
    """Raise if the client that `FLTrust` trusts would be missing from some cohorts."""
    if not isinstance(aggregator, RobustRule) or aggregator.trusted_client is None:
        return
    is_drawn = cohort.is_uniform or cohort.coin is not None
    if is_drawn and cohort.expected_size(num_clients) < num_clients:
        raise ConfigurationError(
            f"federation.aggregator {type(aggregator).__name__} needs the update of client "
            f"{aggregator.trusted_client} in every round, which {cohort} would often leave out: let all clients "
            "take part (federation.cohort: null)"
        )


# number of examples to check, evenly spaced over all clients
_EXAMPLES = 64


@runtime_checkable
class ChecksBatches(Protocol):
    """A module that can check whether a training batch suits it (`check_batch`)."""

    def check_batch(self, batch: Any) -> None:
        """Raise if the module cannot train on a batch."""


def check_data_fits(trainer: Trainer) -> None:
    """Check some training examples by the module's `check_batch`, if it has one; nothing is drawn or changed."""
    module = trainer.lightning_module
    data: FederatedDataModule = trainer.datamodule  # type: ignore[attr-defined]
    if not isinstance(module, ChecksBatches):
        return
    indices = torch.from_numpy(data.clients.indices)
    if not len(indices):
        return
    chosen = indices[:: max(1, len(indices) // _EXAMPLES)].long()
    with preserve_global_generators():
        module.check_batch(data.train_batch(chosen))
