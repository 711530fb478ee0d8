"""Clients that train together in slots, and count as a whole or not at all.

Clients in slots under a Trainer: whether that is possible, and if so, how.

Slots train any module whose ``training_step`` is a function of tensors: no ``.item()``, no branch
that depends on values, nothing done by Lightning's hooks inside a step. Dropout and augmentation
draw the numbers that they would draw in sequence. What can be read off the Trainer is checked first; the rest is tried on one client, whose update must be the one
of the sequential engine.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from lightning.pytorch import Trainer
from torch import Tensor
from torch.optim import Optimizer
from torchmetrics import Metric

from fl_lightning.client.local_training import LocalTrainer
from fl_lightning.client.work import ClientWork, GroupWork
from fl_lightning.core.errors import ClientFailure, ConfigurationError
from fl_lightning.core.metric_states import MetricStates, metrics_of
from fl_lightning.core.update import ClientUpdate, GlobalModel, Updates
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
from fl_lightning.federation.clients.engine_options import FULL_PRECISIONS, tolerance
from fl_lightning.federation.clients.one_by_one import upload_of
from fl_lightning.federation.clients.spot_check import SpotCheck
from fl_lightning.federation.hooks import NOT_THE_USERS
from fl_lightning.federation.stage import Missing, Stages, Start, Upload
from fl_lightning.federation.transaction import Transaction
from fl_lightning.federation.visits.batches import batch_preparation, has_batch_hooks, takes_index
from fl_lightning.federation.visits.lightning_step import extra_work, step_context
from fl_lightning.federation.visits.local_counts import counts_of
from fl_lightning.kernels import reason_against_direct_layers


class InSlots:
    """Trains those clients of a group that slots can train."""

    def __init__(self, stages: Stages, spot_check: SpotCheck) -> None:
        self._stages, self._spot_check = stages, spot_check

    def train(
        self, slots: SlotEngine, start: Start, work: GroupWork, transaction: Transaction
    ) -> Generator[Upload | Missing, None, GroupWork]:
        """Train clients that begin alike, yield what they send, and return those who have not trained.

        Raises:
            CannotStack: if slots meet what they cannot run.
        """
        stages = self._stages
        stackable, others = slots.split(work)
        by_id = {client.client_id: client for client in stackable} if stages.learns else {}
        check = self._spot_check.begin(stackable)
        again: list[int] = []
        transaction.begin()
        for group in slots.train(start.model, stackable, stages.term, stages.own):
            usable, failures = usable_rows(group)
            # one after the other they may not fail: example by example there may be a 0 / 0
            again.extend(failure.client_id for failure in failures)
            refused: list[ClientFailure] = []
            if stages.learns:
                usable, refused = self._learnt(usable, by_id, start)
            for failure in (*failures, *refused):
                slots.leave_out(failure.client_id)
            for failure in refused:
                yield Missing(start, failure)
            yield upload_of(usable, start, stages)
            for client_id in usable.client_ids if slots.kept else ():
                stages.keep(client_id, slots.kept[client_id])
            check.note(usable, slots.kept)
        check.compare(start.model, start.present)
        transaction.commit()
        is_again = np.isin(stackable.client_ids, again)
        return GroupWork.of([*others, *stackable.where(is_again)]) if again else others

    def _learnt(
        self, updates: Updates, work: dict[int, ClientWork], start: Start
    ) -> tuple[Updates, list[ClientFailure]]:
        """Return the updates from which clients have learnt, and why others could not."""
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


TrainOne = Callable[[ClientWork], ClientUpdate]

# Parameters, gradients and state of all slots should stay in a core's cache: the fastest numbers
# of slots for networks from 8 thousand to 215 thousand parameters lie near this line.
_CACHE_BYTES = 8 * 2**20
MOST_SLOTS = 32
# On a GPU they may fill this part of its memory: activations need the rest.
_SHARE_OF_GPU = 1 / 16
# Of the sizes that clients' batches have, a trial of padding takes about so many.
_MOST_SIZES = 4
_NO_FULL_BATCH = (
    "no client has a full batch (federation.pad_batches pads smaller ones, for a loss that is a mean over "
    "examples)"
)


@dataclass(frozen=True)
class Stacking:
    """How clients are stacked.

    Attributes:
        num_slots: clients at once, ≥ 1.
        padded: whether smaller batches are padded, because the loss is a mean over examples; if not,
            clients without any full batch train one after the other.
        compiled: whether the stacked step is compiled.
        direct: whether layers are computed by `direct_layers`.
        has_pull: whether a correction pulls.
        has_shift: whether a correction shifts gradients.
        whole_because: why batches are not padded although the loss was said to be a mean.
    """

    num_slots: int
    padded: bool = False
    compiled: bool = False
    direct: bool = False
    has_pull: bool = False
    has_shift: bool = False
    whole_because: str = ""


class SlotEngine:
    """Trains the clients of a fit in slots.

    Args:
        trainer: set up for fitting.
        local: the sequential engine, on the same module.
        stacking: how.

    Raises:
        CannotStack: if the optimizer has no stacked form.
    """

    def __init__(self, trainer: Trainer, local: LocalTrainer, stacking: Stacking) -> None:
        self.stacking = stacking
        self._trainer, self._local = trainer, local
        data: FederatedDataModule = trainer.datamodule  # type: ignore[attr-defined]
        self._batch_size = data.full_batch
        prepare, read = batch_preparation(trainer), data.train_batch
        step = StackedStep(
            trainer.lightning_module,
            trainer.optimizers[0],
            takes_index(trainer.lightning_module.training_step),
            StackedOptions(
                stacking.num_slots,
                stacking.padded,
                compiled=stacking.compiled,
                direct=stacking.direct,
                has_pull=stacking.has_pull,
                has_shift=stacking.has_shift,
                **_clipping(trainer),
            ),
            step_context(trainer),
            NOT_THE_USERS,
            lambda: local.round_start.by_step,
        )
        self._own: SlotOwn | None = None
        if local.keeps_apart:
            self._own = SlotOwn(local.own, step.params | step.buffers, lambda: local.own_start)
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
        """Return (whom the slots can train, who must train one after the other)."""
        fits = work.num_steps > 0
        if not self.stacking.padded:
            is_full = np.concatenate([[0], np.cumsum(work.sizes == self._batch_size)])
            fits &= np.diff(is_full[work.first_steps]) > 0
        return work.where(fits), work.where(~fits)

    @property
    def is_compiled(self) -> bool:
        """True if the stacked step is compiled, as far as clients have trained."""
        return self._step.graphs.is_compiled

    def leave_out(self, client: int) -> None:
        """Leave out all examples of a client whose update cannot be used."""
        self._slots.leave_out(client)

    @property
    def kept(self) -> dict[int, Tensor]:
        """Personal parameters of clients that are done, if they keep any, by client."""
        return {} if self._own is None else self._own.kept

    def train(
        self,
        model: GlobalModel,
        work: Sequence[ClientWork],
        term: TermOf | None = None,
        own: OwnOf | None = None,
    ) -> Iterator[Updates]:
        """Train clients and yield their updates as they end.

        Args:
            model: the global model.
            work: theirs.
            term: what they add to their gradients; None for nothing.
            own: what they have for themselves; None for what the global model has.
        """
        if not work:
            return
        counting = counts_of(self._trainer).of_slots(work[0].round_index)
        with counting, self._collector.not_listening_to(self._module):  # a graph is for one `log`
            yield from self._as_far_as_possible(self._slots.train(model, work, term, own))
        names = self._collector.epoch_names
        for rehearsal in self._step.graphs.rehearsals.values():
            for name, metric in rehearsal.metrics.items():
                self._collector.add_metric(name, names.get(name, name), metric)

    def _as_far_as_possible(self, groups: Iterator[Updates]) -> Iterator[Updates]:
        """Turns whatever stops slots into a reason for doing without them.

        What is the user's own mistake will be met again, one client after the other, and told there.
        """
        try:
            yield from groups
        except (CannotStack, ClientFailure, ConfigurationError):
            raise
        except Exception as error:
            raise CannotStack(f"vmap cannot run training_step: {_first_line(error)}") from error

    def whole(self, reason: CannotPad) -> SlotEngine:
        """Return an engine for whole batches instead."""
        stacking = replace(self.stacking, padded=False, whole_because=str(reason))
        return SlotEngine(self._trainer, self._local, stacking)


def raise_if_impossible(
    trainer: Trainer, accumulate: int, one_at_a_time: str | None = None
) -> None:
    """Find what rules out slots before anything runs.

    Args:
        trainer: set up for fitting.
        accumulate: batches per local step.
        one_at_a_time: what the run does for one client at a time; None if nothing.

    Raises:
        CannotStack: saying what it is.
    """
    raise_if_by_hand(trainer)
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


def raise_if_by_hand(trainer: Trainer) -> None:
    """Raise `CannotStack` for a module that steps its optimizers itself."""
    if not trainer.lightning_module.automatic_optimization:
        name = type(trainer.lightning_module).__name__
        raise CannotStack(f"{name} steps its optimizers by hand")


def fitting_slots(trainer: Trainer, num_parameters: int) -> int:
    """Return the power of two of slots that fill a core's cache, or their part of a GPU; 1 to 32."""
    device, room = trainer.strategy.root_device, float(_CACHE_BYTES)
    if device.type == "cuda":
        room = _SHARE_OF_GPU * torch.cuda.get_device_properties(device).total_memory
    num_copies = copies_per_slot(trainer.optimizers[0])
    slots = 2 ** round(math.log2(room / (4 * num_parameters * num_copies)))
    return int(min(MOST_SLOTS, max(1, slots)))


def copies_per_slot(optimizer: Optimizer) -> int:
    """Return how often a slot holds numbers like the parameters: these, a gradient, the state."""
    rules = [stacked_rule(optimizer, group) for group in optimizer.param_groups]
    return 2 + max(rule.num_states for rule in rules if rule is not None)


def agreeing(
    trainer: Trainer,
    local: LocalTrainer,
    stacking: Stacking,
    model: GlobalModel,
    work: Sequence[ClientWork],
    train_one: TrainOne,
) -> Stacking:
    """Train a client both ways and return how slots give the same.

    Args:
        trainer: set up for fitting.
        local: the sequential engine.
        stacking: all else; whether batches that should be padded can be is found, and whether layers
            can be computed directly.
        model: the global model.
        work: of some clients.
        train_one: trains a client sequentially.

    Raises:
        CannotStack: with the operation that slots cannot run, or how the updates differ.
    """
    size = trainer.datamodule.full_batch  # type: ignore[attr-defined]
    full = next((client for client in work if size in client.sizes), None)
    reason, whole_because = CannotStack(_NO_FULL_BATCH), ""
    for padded in (True, False) if stacking.padded else (False,):
        if full is None and not padded:
            break
        sample = _of_sizes(full or work[0], _sizes(work, size) if padded else _two(size))
        tried = replace(stacking, num_slots=2, padded=padded, compiled=False)
        try:
            direct = _is_direct(trainer, local, model, sample, train_one, tried)
        except CannotStack as found:
            reason, whole_because = found, str(found)
        else:
            return replace(stacking, padded=padded, direct=direct, whole_because=whole_because)
    raise reason


def _is_direct(
    trainer: Trainer,
    local: LocalTrainer,
    model: GlobalModel,
    sample: ClientWork,
    train_one: TrainOne,
    stacking: Stacking,
) -> bool:
    """Return whether layers can be computed directly, after a client was trained both ways.

    Raises:
        CannotStack: if its results differ in any case.
    """
    reason = CannotStack("")
    has_direct = reason_against_direct_layers(trainer.lightning_module) is None
    for direct in (True, False) if has_direct else (False,):
        try:
            _compare(trainer, local, model, sample, train_one, replace(stacking, direct=direct))
        except CannotPad:
            raise
        except CannotStack as found:
            reason = found
        except ClientFailure as failure:
            if not stacking.padded:
                raise
            text = f"a batch of another size fails ({_first_line(failure)})"
            raise CannotPad(text) from failure
        else:
            return direct
    raise reason


def _sizes(work: Sequence[ClientWork], full: int) -> list[int]:
    """Return sizes on which padded batches are held to what whole ones come to.

    Example:
        >>> _sizes([ClientWork(0, 17, torch.arange(17), [8, 8, 1]), ClientWork(1, 5, torch.arange(5), [5])], 8)
        [8, 4, 1, 2, 5]
    """
    others = sorted({size for client in work for size in client.sizes})
    some = others[:: max(1, len(others) // _MOST_SIZES)]
    return list(dict.fromkeys([full, (full + 1) // 2, 1, min(2, full), *some]))


def _two(full: int) -> list[int]:
    """Return the sizes of two batches; batch norm has no use for one example."""
    return [full, full // 2] if full >= 4 else [full]


def _of_sizes(client: ClientWork, sizes: list[int]) -> ClientWork:
    """Return a client's work on batches of some sizes, which may share examples."""
    order = torch.cat([client.order[torch.arange(size) % len(client.order)] for size in sizes])
    return client._replace(order=order, sizes=sizes)


def _compare(
    trainer: Trainer,
    local: LocalTrainer,
    model: GlobalModel,
    sample: ClientWork,
    train_one: TrainOne,
    stacking: Stacking,
) -> None:
    metrics = metrics_of(trainer.lightning_module)
    before = MetricStates(metrics)
    try:
        expected, own = train_one(sample), local.kept
        counted = [_numbers(metric) for metric in metrics]
        before.put_back()
        with warnings.catch_warnings():
            # operators that vmap runs client by client: slower than one client after the other
            warnings.filterwarnings("error", message="There is a performance drop")
            slots = SlotEngine(trainer, local, stacking)
            ((found,),) = slots.train(model, [sample])
        recounted = [_numbers(metric) for metric in metrics]
    except (CannotStack, ClientFailure, ConfigurationError):
        raise
    except Exception as error:
        raise CannotStack(f"vmap cannot run training_step: {_first_line(error)}") from error
    finally:
        before.put_back()
    pairs = [("update", expected.delta, found.delta), ("buffers", expected.buffers, found.buffers)]
    kept = slots.kept.get(sample.client_id)
    pairs += [] if kept is None else [("personal parameters", own, kept)]
    for name, value in expected.metrics.items():
        pairs.append((name, value, found.metrics.get(name, torch.tensor(torch.nan))))
    for metric, numbers, others in zip(metrics, counted, recounted, strict=True):
        pairs.append((f"{type(metric).__name__} object", numbers, others))
    for name, value, other in pairs:
        if not _is_close(value, other, trainer.precision):
            raise CannotStack(f"a trial client's {name} was not the sequential one")


def _numbers(metric: Metric) -> Tensor:
    """Return all that a metric holds as one vector."""
    states = [state for value in metric.metric_state.values() for state in _as_list(value)]
    return torch.cat(
        [torch.zeros(0), *(state.detach().float().cpu().flatten() for state in states)]
    )


def _as_list(state: Tensor | list[Tensor]) -> list[Tensor]:
    return state if isinstance(state, list) else [state]


def _is_close(value: Tensor, other: Tensor, precision: str | int | None) -> bool:
    """Return whether numbers differ by a small share, all of the largest or together of the norm."""
    if value.shape != other.shape:
        return False
    share = tolerance(precision)
    if precision not in FULL_PRECISIONS:  # Adam steps either way where rounding is all there is
        return bool((value - other).norm() <= share * value.norm() + 1e-12)
    bound = share * float(value.abs().max()) if value.numel() else 0.0
    return bool(((value - other).abs() <= bound + 1e-12).all())


def _clipping(trainer: Trainer) -> dict[str, Any]:
    if not trainer.gradient_clip_val:
        return {}
    by_value = str(trainer.gradient_clip_algorithm or "norm").endswith("value")
    return {"clip_value" if by_value else "clip_norm": float(trainer.gradient_clip_val)}


def _first_line(error: Exception) -> str:
    text = str(error).strip() or type(error).__name__
    return text.splitlines()[0][:200]
