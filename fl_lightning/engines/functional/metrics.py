"""Support for torchmetrics objects in a training step that runs as a function.

Neither `vmap` nor a compiler can run a metric's update. So stand-ins replace the metrics while the step
runs, and the step returns the inputs of its metrics. Afterwards `MetricFeed` updates the metrics with
the examples of all clients, as in sequential training. A metric whose states can be merged over processes
(by sum, cat, min or max) gets the examples of many steps in one update, other metrics step by step.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torchmetrics import Metric, MetricCollection
from torchmetrics.utilities.data import dim_zero_cat, dim_zero_max, dim_zero_min, dim_zero_sum

from fl_lightning.engines.functional import CannotStack

# One update of a metric: its stand-in, positional and keyword arguments.
MetricCall = tuple["StandIn", tuple[Any, ...], dict[str, Any]]


def tensors_of(call: MetricCall) -> list[Tensor]:
    """Return the tensors among the arguments of a recorded call of a metric."""
    _, args, kwargs = call
    return [value for value in (*args, *kwargs.values()) if isinstance(value, Tensor)]


class StandIn(nn.Module):
    """Replaces a torchmetrics object in the module, and records its inputs instead of computing the metric.

    Args:
        metric: a torchmetrics metric or collection.
        path: attribute path of the metric in the module.
    """

    def __init__(self, metric: Metric | MetricCollection, path: str) -> None:
        super().__init__()
        object.__setattr__(self, "metric", metric)  # not a submodule: its states are not the step's
        self.path = path
        self.parts = (
            list(metric.items(keep_base=False, copy_state=False))
            if isinstance(metric, MetricCollection)
            else []
        )
        self.calls: list[MetricCall] | None = None

    def forward(self, *args: Any, **kwargs: Any) -> BatchValue:
        """Record the arguments, and return a placeholder instead of the metric's value on the batch."""
        self.update(*args, **kwargs)
        return BatchValue(type(self.metric).__name__)

    def update(self, *args: Any, **kwargs: Any) -> None:
        """Record the arguments."""
        if self.calls is not None:
            self.calls.append((self, args, kwargs))

    def items(self) -> list[tuple[str, Metric]]:
        """Return (name, metric) for each metric of a collection, for ``log_dict``."""
        return self.parts

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or name in self.__dict__:
            return super().__getattr__(name)
        kind = type(self.metric).__name__
        raise CannotStack(f"training_step uses {name} of {kind} {self.path!r}")


class BatchValue:
    """Placeholder for a metric's value on a batch, which is not computed while many clients train at once."""

    def __init__(self, kind: str) -> None:
        self.kind = kind


class StandIns:
    """Replacements of all torchmetrics objects of a module, which record their inputs.

    Attributes:
        prefixes: prefixes of the names of the metrics' own buffers.

    Example:
        >>> from torchmetrics import SumMetric
        >>> module = nn.ModuleDict({"total": SumMetric()})
        >>> stand_ins = StandIns(module)
        >>> with stand_ins.in_place():
        ...     calls = stand_ins.listen()
        ...     _ = module["total"](2.0)
        >>> calls[0][1], float(module["total"].sum_value)
        ((2.0,), 0.0)
    """

    def __init__(self, module: nn.Module) -> None:
        self._places: list[tuple[nn.Module, str, nn.Module, StandIn]] = []
        self._all: dict[int, StandIn] = {}
        self._visit(module, "", set())
        self.prefixes = tuple(f"{stand_in.path}." for stand_in in self._all.values())

    def _visit(self, module: nn.Module, prefix: str, seen: set[int]) -> None:
        if id(module) in seen:
            return
        seen.add(id(module))
        for name, child in module._modules.items():
            if child is None:
                continue
            if isinstance(child, Metric | MetricCollection):
                stand_in = self._all.setdefault(id(child), StandIn(child, prefix + name))
                self._places.append((module, name, child, stand_in))
            else:
                self._visit(child, f"{prefix}{name}.", seen)

    def __len__(self) -> int:
        return len(self._all)

    @contextlib.contextmanager
    def in_place(self) -> Iterator[None]:
        """Replace the module's torchmetrics objects by their recorders while the block runs."""
        for parent, name, _, stand_in in self._places:
            parent._modules[name] = stand_in
        try:
            yield
        finally:
            for parent, name, metric, _ in self._places:
                parent._modules[name] = metric

    def listen(self) -> list[MetricCall]:
        """Start recording calls of metrics, and return the list to which they will be appended."""
        calls: list[MetricCall] = []
        for stand_in in self._all.values():
            stand_in.calls = calls
        return calls

    def stop_listening(self) -> None:
        """Stop recording, and delete the recorded calls."""
        for stand_in in self._all.values():
            stand_in.calls = None


_ADDING_UP = {dim_zero_sum, dim_zero_cat, dim_zero_max, dim_zero_min}


@dataclass(frozen=True)
class GivenStep:
    """Inputs of all metrics in one step that trains G clients at once.

    Attributes:
        tensors: tensor arguments of the metrics, each of shape (G, B, …), or (G, …) for batch-level values.
        valid: False for padding, bool of shape (G, B).
    """

    tensors: list[Tensor]
    valid: Tensor


@dataclass(frozen=True)
class _Update:
    """One call of a metric's ``update`` in the training step."""

    call: MetricCall
    first: int  # index of its first tensor among the inputs of all metrics
    by_example: (
        list[bool] | None
    )  # whether each tensor has a row per example; None for whole batches

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
    """Updates a module's torchmetrics objects with inputs recorded while clients trained in slots.

    Args:
        full: metric calls of the step on a full batch.
        single: metric calls of the step on one example; None if batches are not padded.
        batch_size: B.

    Raises:
        CannotStack: if a metric's input has neither a row per example nor a single value.
    """

    def __init__(
        self, full: Sequence[MetricCall], single: Sequence[MetricCall] | None, batch_size: int
    ) -> None:
        if single is not None and [c[0] for c in full] != [c[0] for c in single]:
            raise CannotStack("which metrics training_step updates depends on the batch size")
        self._updates: list[_Update] = []
        first = 0
        for number, call in enumerate(full):
            rows = None if single is None else _by_example(call, single[number], batch_size)
            self._updates.append(_Update(_without_values(call), first, rows))
            first += len(tensors_of(call))

    def __len__(self) -> int:
        return len(self._updates)

    def check_same(self, other: MetricFeed) -> None:
        """Raise CannotStack if the step calls other metrics for batches of another size.

        Raises:
            CannotStack: if it does not.
        """
        ours, theirs = (
            [(u.call[0], _constants(u.call)) for u in f._updates] for f in (self, other)
        )
        if ours != theirs:
            raise CannotStack("which metrics training_step updates depends on the batch size")

    def feed(self, steps: Sequence[GivenStep]) -> None:
        """Update the metrics with the inputs recorded in several steps."""
        for update in self._updates:
            if any(bool(step.valid.any()) for step in steps):
                update.feed(steps)
            if isinstance(update.metric, MetricCollection):
                update.metric.items()  # a collection links shared states on access


def _rows(tensor: Tensor, valid: Tensor) -> Tensor:
    """Return the values of all clients' examples along one axis, without padding."""
    return tensor[valid].flatten(0, 1)


def _by_example(full: MetricCall, single: MetricCall, batch_size: int) -> list[bool]:
    stand_in = full[0]
    name = f"{type(stand_in.metric).__name__} {stand_in.path!r}"
    if _constants(full) != _constants(single):
        raise CannotStack(f"{name} gets numbers that depend on the size of the batch")
    found = []
    for many, one in zip(tensors_of(full), tensors_of(single), strict=True):
        is_row = many.shape[:1] == (batch_size,) and one.shape[:1] == (1,)
        is_row = is_row and many.shape[1:] == one.shape[1:]
        if not is_row and (many.ndim or one.ndim):
            raise CannotStack(
                f"{name} gets a tensor of shape {tuple(many.shape)}, which has no row per example"
            )
        found.append(is_row)
    return found


def _constants(call: MetricCall) -> list[Any]:
    _, args, kwargs = call
    values = [*enumerate(args), *kwargs.items()]
    return [(k, "tensor" if isinstance(v, Tensor) else v) for k, v in values]


def _without_values(call: MetricCall) -> MetricCall:
    """Return a recorded call of a metric with empty tensors instead of its inputs, to free memory."""
    empty = torch.empty(0)
    stand_in, args, kwargs = call
    return (
        stand_in,
        tuple(empty if isinstance(v, Tensor) else v for v in args),
        {k: empty if isinstance(v, Tensor) else v for k, v in kwargs.items()},
    )
