"""torchmetrics objects in a training step that runs as a function: what they are given comes out.

A metric's own update counts classes, checks values and keeps lists: nothing that `vmap` or a
compiler could run. So while the step runs, stand-ins take the metrics' places in the module and
return what the metrics would have been given among the step's outputs; the metrics themselves are
updated from that afterwards, see `MetricFeed`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn
from torchmetrics import Metric, MetricCollection

from fl_lightning.engines.cannot_stack import CannotStack

# One update of a metric: its stand-in, and what it was given.
MetricCall = tuple["StandIn", tuple[Any, ...], dict[str, Any]]


def tensors_of(call: MetricCall) -> list[Tensor]:
    """Return the tensors among a metric's arguments."""
    _, args, kwargs = call
    return [value for value in (*args, *kwargs.values()) if isinstance(value, Tensor)]


class StandIn(nn.Module):
    """In a metric's place: notes what it is given.

    Args:
        metric: a metric or a collection of some.
        path: where in the module it is.
    """

    def __init__(self, metric: Metric | MetricCollection, path: str) -> None:
        super().__init__()
        object.__setattr__(self, "metric", metric)  # its tensors are none of the step's
        self.path = path
        self.parts = (
            list(metric.items(keep_base=False, copy_state=False))
            if isinstance(metric, MetricCollection)
            else []
        )
        self.calls: list[MetricCall] | None = None

    def forward(self, *args: Any, **kwargs: Any) -> BatchValue:
        """Note the arguments; the value of one batch is not known here."""
        self.update(*args, **kwargs)
        return BatchValue(type(self.metric).__name__)

    def update(self, *args: Any, **kwargs: Any) -> None:
        """Note the arguments."""
        if self.calls is not None:
            self.calls.append((self, args, kwargs))

    def items(self) -> list[tuple[str, Metric]]:
        """Return the metrics of a collection, for ``log_dict``."""
        return self.parts

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or name in self.__dict__:
            return super().__getattr__(name)
        kind = type(self.metric).__name__
        raise CannotStack(f"training_step uses {name} of {kind} {self.path!r}")


class BatchValue:
    """What a metric's call returns: nothing that a step could use."""

    def __init__(self, kind: str) -> None:
        self.kind = kind


class StandIns:
    """The stand-ins for all metrics of a module.

    Attributes:
        prefixes: with which the names of metrics' own buffers begin.

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
        """Put them where the metrics are, while the block runs."""
        for parent, name, _, stand_in in self._places:
            parent._modules[name] = stand_in
        try:
            yield
        finally:
            for parent, name, metric, _ in self._places:
                parent._modules[name] = metric

    def listen(self) -> list[MetricCall]:
        """Return a list to which they add the calls from here on."""
        calls: list[MetricCall] = []
        for stand_in in self._all.values():
            stand_in.calls = calls
        return calls

    def stop_listening(self) -> None:
        """Let calls pass unnoticed, and keep nothing of a step."""
        for stand_in in self._all.values():
            stand_in.calls = None
