"""Visits: a module takes steps on a client's batches, and everything is restored.

Code that measures, tunes or rehearses in the training module uses `visiting`, which lists what is
restored.

A batch is prepared as in Lightning's loops: conversion by the precision plugin, overridden hooks around
the transfer, and the transfer itself.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, Literal

from lightning.pytorch import Trainer
from lightning.pytorch.plugins.precision import Precision
from torch import Tensor, nn

from fl_lightning.client.local_step import SizedBatch
from fl_lightning.client.log_collector import LogCollector
from fl_lightning.client.state.attributes import Attributes
from fl_lightning.core.metrics import MetricStates, kept_apart, metrics_of
from fl_lightning.core.modules import modes_kept
from fl_lightning.core.seeds import Integers, preserve_global_generators
from fl_lightning.data.federated import FederatedDataModule
from fl_lightning.data.shards import FlatShards
from fl_lightning.data.training_set import Read
from fl_lightning.federation.hooks import BATCH_HOOKS, NOT_THE_USERS, overrides
from fl_lightning.federation.visits.local_counts import note_step

StepOf = Literal["train", "validation", "test"]
# The name of each step, and of the precision plugin's context for it.
_STEPS = {
    "train": ("training_step", "train_step_context"),
    "validation": ("validation_step", "val_step_context"),
    "test": ("test_step", "test_step_context"),
}


class Visit:
    """Runs a module's steps outside Lightning's loops, with the same precision, device and batch hooks.

    Args:
        trainer: the Trainer, with its module on its device.
        kind: the kind of step.
        logs: receives the module's ``self.log``.
        before: the module's state at the visit's start; None if it will not be restored.

    Attributes:
        logs: the values that steps logged.
        size: examples in the current or last batch.
    """

    def __init__(
        self, trainer: Trainer, kind: StepOf, logs: LogCollector, before: Attributes | None
    ) -> None:
        step, context = _STEPS[kind]
        self.module, self._trainer = trainer.lightning_module, trainer
        self._step = getattr(self.module, step)
        self._context = getattr(trainer.precision_plugin, context)
        self._takes_index = takes_index(self._step)
        self._prepare = batch_preparation(trainer)
        self._before = before
        self.logs, self.size = logs, 0

    def steps(self, batches: Iterable[SizedBatch]) -> Iterator[Any]:
        """Run a step on every batch and yield its output.

        Args:
            batches: batches as they were read, with their numbers of examples.
        """
        self.size = 0
        for index, (batch, self.size) in enumerate(batches):
            yield self.step(self.prepared(batch), index)

    def step(self, batch: Any, index: int) -> Any:
        """Run one step on a prepared batch and return its output."""
        self.logs.batch_size = self.size
        note_step(self._trainer, index)
        arguments = (batch, index) if self._takes_index else (batch,)
        with self._context():
            return self._step(*arguments)

    def prepared(self, batch: Any) -> Any:
        """Convert a batch as it was read to the input of a step, by hooks, precision and device."""
        return batch if self._prepare is None else self._prepare(batch)

    def changed(self) -> set[str]:
        """Return the names of parameters, buffers and attributes that have changed since the visit's start."""
        assert self._before is not None, "a visit in place does not remember it"
        return {path.removeprefix("self.") for path in self._before.changes()}


@dataclass(frozen=True)
class ExampleOwners:
    """Training examples grouped by owner: by client, or in a central run under a single owner.

    Attributes:
        shards: indices of each owner's examples.
        read: function from indices, shape (B,), to a batch.
        batch_size: examples per batch.
        tick: called after every batch.
    """

    shards: FlatShards
    read: Read
    batch_size: int
    tick: Callable[[], None] = lambda: None

    def batches(self, visit: Visit, indices: Tensor) -> Iterator[Any]:
        """Yield the examples at given indices as batches, ready for a step of the module."""
        for part in indices.split(self.batch_size):
            if len(part):
                yield visit.prepared(self.read(part))
                self.tick()

    def num_batches(self, counts: Integers) -> int:
        """Return the total number of batches of owners with the given numbers of examples."""
        return int((-(-counts // self.batch_size)).sum())


def clients_as_owners(data: FederatedDataModule) -> ExampleOwners:
    """Return a federation's training examples, grouped by client."""
    # the reader on access, because remote data have none
    return ExampleOwners(data.clients, lambda some: data.evaluation_batch(some), data.batch_size)


@contextmanager
def visiting(
    trainer: Trainer,
    kind: StepOf = "train",
    *,
    mode: Literal["train", "eval"] | None = None,
    logs: LogCollector | None = None,
    in_place: bool = False,
) -> Iterator[Visit]:
    """Run steps of a Trainer's module inside this block, and restore everything afterwards.

    However the block ends, these are restored:

    - the mode of the module and of each of its parts,
    - the states of its torchmetrics objects; inside, they exchange nothing between processes,
    - the gradients of its parameters, the same tensors; inside, there are none at first,
    - the global generators of torch, NumPy and Python, which the block may seed,
    - ``module.log``; inside, it is ``logs``, whose uncollected values are discarded,
    - parameters, their ``requires_grad`` and buffers, and the module's attributes (`Attributes`).

    The precision's context surrounds single steps only. Visits may be nested.

    Args:
        trainer: the Trainer, with its module on its device.
        kind: the kind of step.
        mode: mode of the module inside the block; None leaves it unchanged.
        logs: receives the values that steps log; None for a new collector.
        in_place: do not restore parameters, buffers and attributes.

    Raises:
        ConfigurationError: if the module keeps an iterator, which cannot be wound back.
    """
    module = trainer.lightning_module
    logs, metrics = LogCollector() if logs is None else logs, metrics_of(module)
    before = None if in_place else Attributes(module, ignore=NOT_THE_USERS, tensors=True)
    with ExitStack() as stack:
        if before is not None:
            stack.callback(before.put_back)
        stack.callback(MetricStates(metrics).put_back)
        stack.enter_context(kept_apart(metrics))
        stack.enter_context(preserve_global_generators())
        stack.enter_context(modes_kept(module))
        stack.enter_context(_gradients_kept(module))
        stack.callback(logs.discard)
        stack.enter_context(logs.listening_to(module))
        if mode is not None:
            module.train(mode == "train")
        yield Visit(trainer, kind, logs, before)


@contextmanager
def _gradients_kept(module: nn.Module) -> Iterator[None]:
    """Remove the module's gradients inside the block, and put them back afterwards."""
    gradients = [(param, param.grad) for param in module.parameters()]
    for param, _ in gradients:
        param.grad = None
    try:
        yield
    finally:
        for param, gradient in gradients:
            param.grad = gradient


_BEFORE = "on_before_batch_transfer"
_TRANSFER = ("transfer_batch_to_device", "on_after_batch_transfer")


def batch_preparation(trainer: Trainer) -> Callable[[Any], Any] | None:
    """Return a function that applies batch hooks, precision and device to a batch; None if nothing is to be done."""
    module, data = trainer.lightning_module, trainer.datamodule  # type: ignore[attr-defined]
    precision, strategy = trainer.precision_plugin, trainer.strategy
    before = next(
        (o.on_before_batch_transfer for o in (data, module) if overrides(o, _BEFORE)), None
    )
    converts = type(precision).convert_input is not Precision.convert_input
    moves = strategy.root_device.type != "cpu" or any(
        overrides(owner, hook) for owner in (module, data) for hook in _TRANSFER
    )
    if before is None and not converts and not moves:
        return None

    def prepare(batch: Any) -> Any:
        batch = precision.convert_input(batch)
        if before is not None:
            batch = before(batch, 0)
        # after a fit the module is back on the CPU, the strategy still on its device
        return strategy.batch_to_device(batch, module.device, dataloader_idx=0)

    return prepare


def has_batch_hooks(trainer: Trainer) -> bool:
    """Return whether module or data module override hooks around batches."""
    owners = trainer.lightning_module, trainer.datamodule  # type: ignore[attr-defined]
    return any(overrides(owner, hook) for owner in owners for hook in BATCH_HOOKS)


def takes_index(step: Callable[..., Any]) -> bool:
    """Return whether a step takes ``(batch, batch_idx)``; Lightning also allows ``(batch)``."""
    return len(inspect.signature(step).parameters) > 1
