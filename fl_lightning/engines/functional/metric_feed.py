"""Updates torchmetrics objects with what the clients in slots have given them.

The object then holds the examples of all clients, as when they train one after the other. One
update with the examples of many steps gives the same as many updates where the object itself says
that its states add up (it would pool those of several processes so); others are updated step by
step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torchmetrics import Metric, MetricCollection
from torchmetrics.utilities.data import dim_zero_cat, dim_zero_max, dim_zero_min, dim_zero_sum

from fl_lightning.engines.cannot_stack import CannotStack
from fl_lightning.engines.functional.metric_calls import MetricCall, tensors_of

_ADDING_UP = {dim_zero_sum, dim_zero_cat, dim_zero_max, dim_zero_min}


@dataclass(frozen=True)
class GivenStep:
    """What one step of all slots gave to metrics.

    Attributes:
        tensors: one per tensor argument, each of shape (G, B, …), or (G, …) of whole batches.
        valid: which examples count, bool of shape (G, B).
    """

    tensors: list[Tensor]
    valid: Tensor


@dataclass(frozen=True)
class _Update:
    """One call of a metric's update in the step; ``first`` of its tensors among all given ones."""

    call: MetricCall
    first: int
    by_example: list[bool] | None  # per tensor, a row an example or one number; None: whole batches

    @property
    def metric(self) -> Metric | MetricCollection:
        metric: Metric | MetricCollection = self.call[0].metric
        return metric

    @property
    def is_pooled(self) -> bool:
        metric = self.metric
        parts = metric.values() if isinstance(metric, MetricCollection) else [metric]
        adds_up = all(p._reductions and set(p._reductions.values()) <= _ADDING_UP for p in parts)
        return adds_up and self.by_example is not None and all(self.by_example)

    def feed(self, steps: Sequence[GivenStep]) -> None:
        if self.is_pooled:
            places = range(self.first, self.first + len(tensors_of(self.call)))
            rows = [[_rows(step.tensors[place], step.valid) for step in steps] for place in places]
            self._update([torch.cat(parts) for parts in rows])
            return
        for step in steps:
            for slot in step.valid.any(1).nonzero().flatten().tolist():
                self._update(self._of_slot(step, slot))

    def _of_slot(self, step: GivenStep, slot: int) -> list[Tensor]:
        count = len(tensors_of(self.call))
        tensors = [t[slot] for t in step.tensors[self.first : self.first + count]]
        if self.by_example is None:
            return tensors
        valid = step.valid[slot]
        return [
            _rows(tensor, valid) if is_by_example else tensor[valid].mean(0)
            for tensor, is_by_example in zip(tensors, self.by_example, strict=True)
        ]

    def _update(self, tensors: list[Tensor]) -> None:
        _, args, kwargs = self.call
        given = iter(tensors)
        filled = [next(given) if isinstance(value, Tensor) else value for value in args]
        by_name = {k: next(given) if isinstance(v, Tensor) else v for k, v in kwargs.items()}
        self.metric.update(*filled, **by_name)


class MetricFeed:
    """Knows which metrics a step updates with what.

    Args:
        full: the calls of the step on a full batch.
        single: the calls on one example of it; None if the step keeps its batch whole.
        batch_size: B.

    Raises:
        CannotStack: if a metric is given something that is neither a row an example nor a mean.
    """

    def __init__(
        self, full: Sequence[MetricCall], single: Sequence[MetricCall] | None, batch_size: int
    ) -> None:
        if single is not None and [c[0] for c in full] != [c[0] for c in single]:
            raise CannotStack("training_step updates other metrics for other sizes of a batch")
        self._updates: list[_Update] = []
        first = 0
        for number, call in enumerate(full):
            rows = None if single is None else _by_example(call, single[number], batch_size)
            self._updates.append(_Update(_without_values(call), first, rows))
            first += len(tensors_of(call))

    def __len__(self) -> int:
        return len(self._updates)

    def check_same(self, other: MetricFeed) -> None:
        """Check that batches of another size are given to the same metrics in the same way.

        Raises:
            CannotStack: if they are not.
        """
        ours, theirs = (
            [(u.call[0], _constants(u.call)) for u in f._updates] for f in (self, other)
        )
        if ours != theirs:
            raise CannotStack("training_step updates other metrics for other sizes of a batch")

    def feed(self, steps: Sequence[GivenStep]) -> None:
        """Update the metrics with some steps' examples."""
        for update in self._updates:
            if any(bool(step.valid.any()) for step in steps):
                update.feed(steps)
            if isinstance(update.metric, MetricCollection):
                update.metric.items()  # metrics that share states learn them when asked for


def _rows(tensor: Tensor, valid: Tensor) -> Tensor:
    """Return the examples that count: the axis of batches of one becomes the axis of examples."""
    return tensor[valid].flatten(0, 1)


def _by_example(full: MetricCall, single: MetricCall, batch_size: int) -> list[bool]:
    stand_in = full[0]
    name = f"{type(stand_in.metric).__name__} {stand_in.path!r}"
    if _constants(full) != _constants(single):
        raise CannotStack(f"{name} is given numbers that depend on the size of the batch")
    found = []
    for many, one in zip(tensors_of(full), tensors_of(single), strict=True):
        is_row = many.shape[:1] == (batch_size,) and one.shape[:1] == (1,)
        is_row = is_row and many.shape[1:] == one.shape[1:]
        if not is_row and (many.ndim or one.ndim):
            raise CannotStack(f"{name} is given a tensor of shape {tuple(many.shape)}")
        found.append(is_row)
    return found


def _constants(call: MetricCall) -> list[Any]:
    _, args, kwargs = call
    values = [*enumerate(args), *kwargs.items()]
    return [(k, "tensor" if isinstance(v, Tensor) else v) for k, v in values]


def _without_values(call: MetricCall) -> MetricCall:
    """Return the call with empty tensors in place of those of a batch, which need not be kept."""
    empty = torch.empty(0)
    stand_in, args, kwargs = call
    return (
        stand_in,
        tuple(empty if isinstance(v, Tensor) else v for v in args),
        {k: empty if isinstance(v, Tensor) else v for k, v in kwargs.items()},
    )
