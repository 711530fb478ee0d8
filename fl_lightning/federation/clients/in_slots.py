"""Clients that train together in slots: whether that is possible under a Trainer, and their updates.

Slots train any module whose ``training_step`` is a function of tensors: no ``.item()``, no branch
on values, no hooks of Lightning inside a step. Dropout and augmentation draw the same numbers as in
sequential training. `raise_if_impossible` checks the Trainer; the rest is tried on one client, see
`Trial`. If slots fail, the round begins anew without them.
"""

from __future__ import annotations

import math
from collections.abc import Generator, Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from lightning.pytorch import Trainer
from torch import Tensor

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
    usable_rows,
)
from fl_lightning.federation.clients.one_by_one import without_buffers
from fl_lightning.federation.clients.spot_check import FULL_PRECISIONS, SpotCheck
from fl_lightning.federation.hooks import NOT_THE_USERS
from fl_lightning.federation.stage import Missing, Stages, Start, Upload
from fl_lightning.federation.stages.corrector import Corrector
from fl_lightning.federation.stages.personaliser import Personaliser
from fl_lightning.federation.visits.lightning_step import extra_work, step_context
from fl_lightning.federation.visits.local_counts import counts_of
from fl_lightning.federation.visits.visiting import batch_preparation, has_batch_hooks, takes_index
from fl_lightning.updates.message import bytes_up

# Parameters, gradients and optimizer state of all slots should fit a core's cache: the fastest numbers
# of slots for networks from 8 thousand to 215 thousand parameters lie near this line.
_CACHE_BYTES = 8 * 2**20
MOST_SLOTS = 32
# Without a compiler a step has milliseconds of overhead, which this many times the slots share.
_TIMES_NOT_COMPILED = 4
# Fraction of a GPU's memory that slots may fill: activations need the rest.
_SHARE_OF_GPU = 1 / 16


class SlotEngine:
    """Trains the clients of a fit in slots.

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
        """Return a clause on why batches are not padded, or on clients that padding would help."""
        if self.stacking.whole_because:
            return f", of whole batches because {self.stacking.whole_because}"
        without = len(self.split(GroupWork.of(work))[1])
        if not without or not may_pad:
            return ""
        return (
            f", {without} of {len(work)} clients one after the other because none of their batches is "
            "full (federation.pad_batches pads them, for a loss that is a mean over examples)"
        )

    @property
    def is_compiled(self) -> bool:
        """True if the stacked step is compiled, as far as clients have trained."""
        return self._step.graphs.is_compiled

    def leave_out(self, client: int) -> None:
        """Remove a client that trains now from metrics, because its update cannot be used."""
        self._slots.leave_out(client)

    @property
    def kept(self) -> dict[int, Tensor]:
        """Personal tensors of clients that are done, by client; empty without any."""
        return {} if self._own is None else self._own.kept

    def train(
        self,
        model: GlobalModel,
        work: Sequence[ClientWork],
        term: TermOf | None = None,
        own: OwnOf | None = None,
    ) -> Iterator[Updates]:
        """Train clients and yield their updates.

        Args:
            model: the global model.
            work: the clients' work.
            term: from a client to the term that it adds to its gradients; None for no term.
            own: from a client to its personal tensors; None for those of the global model.
        """
        if not work:
            return
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
        """Turn any exception in slots into `CannotStack`.

        A mistake of the user will be raised again by sequential training.
        """
        try:
            yield from updates
        except (CannotStack, ClientFailure, ConfigurationError):
            raise
        except Exception as error:
            raise cannot_run(error) from error

    def whole(self, reason: CannotPad) -> SlotEngine:
        """Return slots that train whole batches, without padding."""
        stacking = replace(self.stacking, padded=False, whole_because=str(reason))
        return SlotEngine(self._trainer, self._local, stacking)


class InSlots:
    """Trains those clients in slots that slots can train."""

    def __init__(self, stages: Stages, spot_check: SpotCheck) -> None:
        self._stages, self._spot_check = stages, spot_check

    def train(
        self, slots: SlotEngine, start: Start, work: GroupWork
    ) -> Generator[Upload | Missing, None, GroupWork]:
        """Train clients with the same start, yield their updates, and return the work left to do.

        Raises:
            CannotStack: if slots cannot run a step.
        """
        stages = self._stages
        stackable, others = slots.split(work)
        by_id = {client.client_id: client for client in stackable} if stages.learns else {}
        check, personal = self._spot_check, stages.first(Personaliser)
        correction = stages.first(Corrector)
        term = None if correction is None else correction.term
        own = None if personal is None else personal.tensors_of
        check.begin(stackable)
        again: list[int] = []
        for trained in slots.train(start.model, stackable, term, own):
            usable, failures = usable_rows(trained)
            # they train again sequentially: example by example there may be a 0 / 0
            again.extend(failure.client_id for failure in failures)
            refused: list[ClientFailure] = []
            if stages.learns:
                usable, refused = self._learnt(usable, by_id, start)
            for failure in (*failures, *refused):
                slots.leave_out(failure.client_id)
            for failure in refused:
                yield Missing(start, failure)
            sent = without_buffers(usable) if stages.is_private else usable
            yield Upload(start, sent, sent, bytes_up(sent))
            if personal is not None and slots.kept:
                for client_id in usable.client_ids:
                    personal.store(client_id, slots.kept[client_id])
            check.note(usable, slots.kept)
        check.compare(start.model, start.present)
        is_again = np.isin(stackable.client_ids, again)
        return GroupWork.of([*others, *stackable.where(is_again)]) if again else others

    def _learnt(
        self, updates: Updates, work: dict[int, ClientWork], start: Start
    ) -> tuple[Updates, list[ClientFailure]]:
        """Store clients' new states; return the updates of those that have one, and the failures of others."""
        rows, failures = [], []
        for row, update in enumerate(updates):
            try:
                learnt = self._stages.learn(update, work[update.client_id], start)
            except ClientFailure as failure:
                failures.append(failure)
            else:
                learnt()
                rows.append(row)
        return updates.rows(rows) if failures else updates, failures


def raise_if_impossible(
    trainer: Trainer, accumulate: int, one_at_a_time: str | None = None
) -> None:
    """Raise if slots are impossible, before any step.

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
        raise CannotStack(f"the precision is {trainer.precision}")
    if one_at_a_time is not None:
        raise CannotStack(one_at_a_time)
    if extra := extra_work(trainer):
        raise CannotStack(extra)
    if has_batch_hooks(trainer):
        raise CannotStack("module or data module have hooks around batches")


def fitting_slots(trainer: Trainer, num_parameters: int, *, compiled: bool) -> int:
    """Return the number of slots that fill a core's cache or their part of a GPU, a power of two to 32.

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
    """Return the reason why slots cannot run a step that raised an error."""
    if isinstance(error, torch.OutOfMemoryError):
        return CannotStack("the device has too little memory for so many slots (federation.slots)")
    text = str(error).strip() or type(error).__name__
    return CannotStack(f"vmap cannot run training_step: {text.splitlines()[0][:200]}")
