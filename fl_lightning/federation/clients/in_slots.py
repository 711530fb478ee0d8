"""Slots under a Trainer: whether they are possible, how many, and the updates of clients in them.

Slots train any module whose ``training_step`` is a function of tensors: no ``.item()``, no branch
on values, no hooks of Lightning inside a step. Dropout and augmentation draw the same numbers as in
sequential training. `raise_if_impossible` checks the Trainer; the rest is tried on one client, see
`Trial`. If slots fail, the round begins anew without them.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from lightning.pytorch import Trainer
from torch import Tensor, nn

from fl_lightning.client.local_training import LocalTrainer
from fl_lightning.client.work import ClientWork, GroupWork
from fl_lightning.core.errors import ClientFailure, ConfigurationError
from fl_lightning.core.update import GlobalModel, Updates
from fl_lightning.data.federated import FederatedDataModule
from fl_lightning.engines import (
    CannotPad,
    CannotStack,
    OwnOf,
    SlotOwn,
    SlotTrainer,
    StackedOptions,
    StackedStep,
    TermOf,
    stacked_rule,
)
from fl_lightning.federation.clients.spot_check import FULL_PRECISIONS
from fl_lightning.federation.hooks import NOT_THE_USERS
from fl_lightning.federation.stage import Stage, Stages, overridden
from fl_lightning.federation.visits.lightning_step import extra_work, step_context
from fl_lightning.federation.visits.local_counts import counts_of
from fl_lightning.federation.visits.visiting import batch_preparation, has_batch_hooks, takes_index

# Parameters, gradients and optimizer state of all slots should fit a core's cache. For networks of 8 to 215
# thousand parameters, the fastest number of slots needs about this much memory.
_CACHE_BYTES = 8 * 2**20
MOST_SLOTS = 32
# Slots that are not compiled are this many times as many: a step has milliseconds of overhead, which they share.
_TIMES_NOT_COMPILED = 4
# Fraction of a GPU's memory that slots may fill: activations need the rest.
_SHARE_OF_GPU = 1 / 16


class SlotEngine:
    """Trains clients in slots: each step trains many clients at once, as one stacked batch under vmap.

    Args:
        trainer: a Trainer, set up for fitting.
        local: the sequential engine, on the same module.
        stacking: options of the slots; clipping is the Trainer's.

    Raises:
        CannotStack: if the optimizer has no stacked form.
    """

    def __init__(self, trainer: Trainer, local: LocalTrainer, stacking: StackedOptions) -> None:
        self.stacking = replace(stacking, **_clipping(trainer))
        self._trainer, self._local = trainer, local
        data: FederatedDataModule = trainer.datamodule  # type: ignore[attr-defined]
        self._batch_size = data.full_batch
        prepare, read = batch_preparation(trainer), data.train_batch
        step = StackedStep(
            trainer.lightning_module,
            trainer.optimizers[0],
            takes_index(trainer.lightning_module.training_step),
            self.stacking,
            step_context(trainer),
            NOT_THE_USERS,
            lambda: local.round_start.by_step,
        )
        self._own: SlotOwn | None = None
        if local.keeps_apart:
            self._own = SlotOwn(
                local.personal, step.params | step.buffers, lambda: local.personal_start
            )
        self._slots = SlotTrainer(
            step,
            local.space,
            local.buffers,
            read if prepare is None else lambda indices: prepare(read(indices)),
            self._batch_size,
            local.collector.epoch_names,
            reads_at_random=not data.reads_by_index,
            own=self._own,
            integers=lambda: local.integer_start,
        )
        self._step, self._collector = step, local.collector
        self._module = trainer.lightning_module

    def split(self, work: GroupWork) -> tuple[GroupWork, GroupWork]:
        """Return (work of clients that slots can train, work of clients that must train sequentially)."""
        fits = work.num_steps > 0
        if not self.stacking.padded:
            is_full = np.concatenate([[0], np.cumsum(work.sizes == self._batch_size)])
            fits &= np.diff(is_full[work.first_steps]) > 0
        return work.where(fits), work.where(~fits)

    def remark(self, work: Sequence[ClientWork], *, may_pad: bool) -> str:
        """Return a clause for the log: why batches are not padded, or how many clients need padding for slots."""
        if self.stacking.whole_because:
            return f", of whole batches because {self.stacking.whole_because}"
        without = len(self.split(GroupWork.of(work))[1])
        if not without or not may_pad:
            return ""
        return (
            f", {without} of {len(work)} clients sequentially because none of their batches is full "
            "(federation.pad_batches pads them, for a loss that is a mean over examples)"
        )

    @property
    def is_compiled(self) -> bool:
        """True if the stacked steps that have run so far are compiled."""
        return self._step.graphs.is_compiled

    def leave_out(self, client: int) -> None:
        """Remove a client whose update cannot be used from the metrics of the clients that trained together with it."""
        self._slots.leave_out(client)

    @property
    def kept(self) -> dict[int, Tensor]:
        """New personal tensors of the clients that have trained in slots, by client; empty without personalisation."""
        return {} if self._own is None else self._own.kept

    def train(
        self,
        model: GlobalModel,
        work: Sequence[ClientWork],
        term: TermOf | None = None,
        own: OwnOf | None = None,
    ) -> Iterator[Updates]:
        """Train clients in slots, several at once, and yield their updates.

        Args:
            model: the global model.
            work: the clients' work.
            term: maps a client to the term that it adds to its gradients; None for no term.
            own: maps a client to its personal tensors; None for those of the global model.
        """
        if not work:
            return
        if replace(self.stacking, **_clipping(self._trainer)) != self.stacking:
            raise CannotStack("trainer.gradient_clip_val has changed since slots were chosen")
        counting = counts_of(self._trainer).of_slots(work[0].round_index)
        with (
            counting,
            self._collector.not_listening_to(self._module),
        ):  # a compiled graph holds the `log` that it was made with
            yield from self._as_far_as_possible(self._slots.train(model, work, term, own))
        names = self._collector.epoch_names
        for rehearsal in self._step.graphs.rehearsals.values():
            for name, metric in rehearsal.metrics.items():
                self._collector.add_metric(name, names.get(name, name), metric)

    def _as_far_as_possible(self, updates: Iterator[Updates]) -> Iterator[Updates]:
        """Convert exceptions in slots to `CannotStack`; sequential training then raises the user's own errors again."""
        try:
            yield from updates
        except (CannotStack, ClientFailure, ConfigurationError):
            raise
        except Exception as error:
            raise cannot_run(error) from error

    def whole(self, reason: CannotPad) -> SlotEngine:
        """Return the same slot engine without padding of smaller batches."""
        stacking = replace(self.stacking, padded=False, whole_because=str(reason))
        return SlotEngine(self._trainer, self._local, stacking)


def raise_if_impossible(
    trainer: Trainer, accumulate: int, one_at_a_time: str | None = None
) -> None:
    """Raise if the Trainer's settings rule out slots (many clients trained at once); no step is tried.

    Args:
        trainer: a Trainer, set up for fitting.
        accumulate: batches per local step.
        one_at_a_time: reason why the run needs one client at a time; None without one.

    Raises:
        CannotStack: with the reason.
    """
    if not trainer.lightning_module.automatic_optimization:
        name = type(trainer.lightning_module).__name__
        raise CannotStack(f"{name} steps its optimizers by hand")
    optimizer = trainer.optimizers[0]
    if any(stacked_rule(optimizer, group) is None for group in optimizer.param_groups):
        raise CannotStack(f"{type(optimizer).__name__} with these options has no stacked form")
    if accumulate > 1:
        raise CannotStack("a local step accumulates several batches")
    if trainer.precision not in (*FULL_PRECISIONS, "bf16-mixed"):
        raise CannotStack(f"slots do not support trainer.precision {trainer.precision}")
    if one_at_a_time is not None:
        raise CannotStack(one_at_a_time)
    if extra := extra_work(trainer):
        raise CannotStack(extra)
    if has_batch_hooks(trainer):
        raise CannotStack("module or data module have hooks around batches")


def pads(asked: bool | None, module: nn.Module) -> bool:
    """Return whether smaller batches may be padded: the option, else the module's ``loss_is_mean``.

    The attribute of a class does not hold for a subclass that overrides ``training_step``.
    """
    if asked is not None:
        return asked
    for space in (vars(module), *map(vars, type(module).__mro__)):
        if "loss_is_mean" in space:
            return bool(space["loss_is_mean"])
        if "training_step" in space:
            break
    return False


def one_at_a_time(
    trainer: Trainer, local: LocalTrainer, stages: Stages, own_stages: Sequence[Stage]
) -> str | None:
    """Return why the configuration must train one client at a time; None if it need not.

    Args:
        trainer: a Trainer, set up for fitting.
        local: the sequential engine.
        stages: the run's stages.
        own_stages: the user's own among them.
    """
    if stages.one_at_a_time is not None:
        return stages.one_at_a_time
    for stage in own_stages:
        if overridden(stage, "around", "steps"):
            return f"the stage {type(stage).__name__} acts while one client trains"
    buffers = dict(trainer.lightning_module.named_buffers())
    frozen = [name for name in local.buffers.names if name not in buffers]
    return f"its clients change the frozen parameter {frozen[0]}" if frozen else None


def fitting_slots(trainer: Trainer, num_parameters: int, *, compiled: bool) -> int:
    """Return the number of slots that fit a core's cache or a part of a GPU's memory, a power of two up to 32.

    On a CPU it is four times as large if slots are not compiled.
    """
    device, room = trainer.strategy.root_device, float(_CACHE_BYTES)
    if device.type == "cuda":
        room = _SHARE_OF_GPU * torch.cuda.get_device_properties(device).total_memory
    optimizer = trainer.optimizers[0]
    rules = [stacked_rule(optimizer, group) for group in optimizer.param_groups]
    # a slot holds its parameters, a gradient, the optimizer's state
    num_copies = 2 + max(rule.num_states for rule in rules if rule is not None)
    slots = 2 ** round(math.log2(room / (4 * num_parameters * num_copies)))
    times = 1 if compiled or device.type == "cuda" else _TIMES_NOT_COMPILED
    return int(min(MOST_SLOTS, max(1, slots))) * times


def _clipping(trainer: Trainer) -> dict[str, Any]:
    bound = float(trainer.gradient_clip_val) if trainer.gradient_clip_val else None
    by_value = str(trainer.gradient_clip_algorithm or "norm").endswith("value")
    return {"clip_value": bound if by_value else None, "clip_norm": None if by_value else bound}


def cannot_run(error: Exception) -> CannotStack:
    """Return a `CannotStack` with the reason why slots cannot run a step, given the error that it raised."""
    if isinstance(error, torch.OutOfMemoryError):
        return CannotStack("the device has too little memory for so many slots (federation.slots)")
    text = str(error).strip() or type(error).__name__
    return CannotStack(f"vmap cannot run training_step: {text.splitlines()[0][:200]}")
