"""A user's ``training_step`` as a pure function: tensors in, loss and logged values out."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.attention import SDPBackend, sdpa_kernel
from torchmetrics import Metric

from fl_lightning.client.state.tensors import memory_of
from fl_lightning.engines.functional import CannotStack
from fl_lightning.engines.functional.draws import (
    Draw,
    DrawRecorder,
    DropoutWatch,
    ReplayedDraws,
    small_attention,
)
from fl_lightning.engines.functional.metrics import (
    BatchValue,
    MetricCall,
    StandIn,
    StandIns,
    tensors_of,
)
from fl_lightning.kernels import direct_layers, other_forwards

Tensors = dict[str, Tensor]
# Logged values by name, with their batch sizes if given to `log`.
Logged = dict[str, tuple[Tensor, float | None]]
# Number of steps that the client has taken, set while a training step runs as a function.
STEPS_IN_SLOTS: list[Tensor] = []
# Makes the context manager in which a training step runs, e.g. autocast.
StepContext = Callable[[], AbstractContextManager[Any]]
# Name of the loss among logged values; no module can log under it
OWN_LOSS = ""


@dataclass(frozen=True)
class StepResult:
    """Result of a training step: its loss, the values it logs, and the inputs of its metrics.

    Attributes:
        loss: scalar loss.
        logged: logged values, detached.
        given: tensors passed to torchmetrics objects, detached, in the order of the calls.
    """

    loss: Tensor
    logged: Logged
    given: list[Tensor]


@dataclass(frozen=True)
class Observed:
    """Observed side effects of a training step: random draws, dropout, and calls of metrics.

    Attributes:
        draws: random draws of the step.
        has_dropout: True if the step calls a dropout function, even if dropout is disabled.
        calls: calls of torchmetrics objects in the step.
        metrics: torchmetrics objects that the step logs, by name.
    """

    draws: list[Draw]
    has_dropout: bool
    calls: list[MetricCall]
    metrics: dict[str, Metric]


class TrainingStep:
    """A module's ``training_step`` as a function of parameters, buffers and batch.

    Args:
        module: the LightningModule.
        takes_index: whether ``training_step`` has a second parameter.
        direct: use the C operators of `direct_layers` for its layers.
        context: makes the context manager in which the step runs, such as autocast.

    Attributes:
        stand_ins: replacements of the module's metrics while the step runs.
    """

    def __init__(
        self,
        module: nn.Module,
        takes_index: bool,
        *,
        direct: bool = False,
        context: StepContext = nullcontext,
    ) -> None:
        self.stand_ins = StandIns(module)
        self._forwards = dict(direct_layers(module, viewable=True)) if direct else {}
        self._wrapper, self._log = _StepAsForward(module), _Log()
        self._takes_index, self._context = takes_index, context

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Replace the module's ``log``, metrics and slow operators, so that the step can be called in the block."""
        attention = sdpa_kernel(SDPBackend.MATH)  # vmap would run fused kernels client by client
        own = vars(self._wrapper.module)
        before = own.get("log")
        own["log"] = self._log.log
        try:
            stand_ins, forwards = self.stand_ins.in_place(), other_forwards(self._forwards)
            with stand_ins, forwards, attention, small_attention():
                yield
        finally:
            if before is None:
                del own["log"]
            else:
                own["log"] = before

    def __call__(
        self,
        tensors: Mapping[str, Tensor],
        batch: Any,
        count: Tensor,
        draws: Sequence[Tensor] = (),
    ) -> StepResult:
        """Run the step on given tensors; only inside `in_place`.

        Args:
            tensors: parameters and buffers by name.
            batch: argument of ``training_step``.
            count: number of steps that the client has taken.
            draws: random numbers, in the order in which the step draws them.

        Raises:
            CannotStack: if the step does something that slots do not support.
        """
        loss, logged, calls, _ = self._run(tensors, batch, count, draws)
        given = [tensor.detach() for call in calls for tensor in tensors_of(call)]
        return StepResult(loss, {OWN_LOSS: (loss.detach(), None), **logged}, given)

    def _take_over_rebound(self, tensors: Mapping[str, Tensor], inner: Tensors) -> None:
        """Copy new values into buffers that the step has assigned anew (``self.n = self.n + 1``)."""
        pairs = ((name, inner.get(f"module.{name}", old)) for name, old in tensors.items())
        for name, new in [(n, new.clone()) for n, new in pairs if new is not tensors[n]]:
            old, buffers = tensors[name], dict(self._wrapper.module.named_buffers())
            if name not in buffers or (new.shape, new.dtype) != (old.shape, old.dtype):
                raise CannotStack(
                    f"training_step replaces the buffer {name} by a tensor of another shape or dtype"
                )
            old.copy_(new.detach())

    def observe(self, tensors: Mapping[str, Tensor], batch: Any, count: Tensor) -> Observed:
        """Run the step once, and return its random draws and calls of metrics."""
        with DrawRecorder() as recorder, DropoutWatch() as watch:
            _, _, calls, metrics = self._run(tensors, batch, count, ())
        return Observed(recorder.draws, watch.has_seen_one, calls, metrics)

    def _run(
        self, tensors: Mapping[str, Tensor], batch: Any, count: Tensor, draws: Sequence[Tensor]
    ) -> tuple[Tensor, Logged, list[MetricCall], dict[str, Metric]]:
        inner = {
            f"module.{name}": tensor
            for name, tensor in tensors.items()
            if not name.startswith(self.stand_ins.prefixes)
        }
        # not an int, so that a step whose decisions depend on it fails here
        arguments = (batch, count.long()) if self._takes_index else (batch,)
        calls = self.stand_ins.listen() if len(self.stand_ins) else []
        before = memory_of(tensors.values())
        STEPS_IN_SLOTS.append(count)
        try:
            replayed = ReplayedDraws(draws) if draws else nullcontext()
            with self._context(), replayed:
                output = functional_call(self._wrapper, inner, arguments)
                if memory_of(tensors.values()) != before:  # under vmap these may end the process
                    raise CannotStack("training_step changes the shape or the memory of a buffer")
                self._take_over_rebound(tensors, inner)
            logged, metrics = dict(self._log.values), dict(self._log.metrics)
        finally:
            STEPS_IN_SLOTS.clear()
            self._log.clear()
            self.stand_ins.stop_listening()
        loss = output["loss"] if isinstance(output, dict) else output
        if not isinstance(loss, Tensor):
            raise CannotStack("its training_step returned no loss")
        return loss.reshape(()), logged, calls, metrics


def copies_of(module: nn.Module, without: tuple[str, ...] = ()) -> Tensors:
    """Copy a module's parameters and buffers, by name.

    Args:
        module: the module; copies of trainable parameters require gradients.
        without: prefixes of names to leave out.
    """
    params = {
        name: param.detach().clone().requires_grad_(param.requires_grad)
        for name, param in module.named_parameters()
    }
    buffers = {name: buffer.detach().clone() for name, buffer in module.named_buffers()}
    return {name: t for name, t in (params | buffers).items() if not name.startswith(without)}


class _Log:
    """Replacement of a module's ``log`` that collects the values logged in the current step.

    PyTorch's older compilers support neither attributes that are rebound nor unions of types. So its
    lists stay the same objects, and types are checked by tuples.
    """

    def __init__(self) -> None:
        self.values: list[tuple[str, tuple[Tensor, float | None]]] = []
        self.metrics: list[tuple[str, Metric]] = []

    def log(self, name: str, value: Any, *args: Any, **options: Any) -> None:
        """Collect a logged value."""
        if isinstance(value, StandIn):
            self.metrics.append((name, value.metric))
            return
        if isinstance(value, Metric):  # the metrics of a collection
            self.metrics.append((name, value))
            return
        if isinstance(value, BatchValue):
            raise CannotStack(
                f"it logs a batch's {value.kind} as {name!r}, not the {value.kind} object"
            )
        if not isinstance(value, (Tensor, float, int)):
            raise CannotStack(f"it logs a {type(value).__name__} as {name!r}")
        if options.get("reduce_fx", "mean") != "mean":
            raise CannotStack(f"it logs {name!r} with a reduce_fx other than mean")
        if name in dict(self.values):
            raise CannotStack(f"it logs {name!r} twice in a step")
        weight = options.get("batch_size")
        if weight is not None and (isinstance(weight, Tensor) or weight <= 0):
            raise CannotStack(f"it logs {name!r} with a batch_size that batches or steps decide")
        tensor = torch.as_tensor(value).detach().reshape(()).float()
        self.values.append((name, (tensor, weight)))

    def clear(self) -> None:
        """Delete all collected values."""
        self.values.clear()
        self.metrics.clear()


class _StepAsForward(nn.Module):
    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, *arguments: Any) -> Any:
        return self.module.training_step(*arguments)  # type: ignore[operator]


def map_tensors(function: Callable[[Tensor], Tensor], batch: Any) -> Any:
    """Apply a function to every tensor of a batch, in tuples, lists and dicts.

    Raises:
        CannotStack: if the batch holds anything else.
    """
    if isinstance(batch, Tensor):
        return function(batch)
    if isinstance(batch, (list, tuple)):
        return type(batch)([map_tensors(function, part) for part in batch])
    if isinstance(batch, dict):
        return {key: map_tensors(function, part) for key, part in batch.items()}
    raise CannotStack(f"its batches hold a {type(batch).__name__}")


def tensors_in(batch: Any) -> list[Tensor]:
    """List the tensors of a batch, in order.

    Raises:
        CannotStack: if the batch holds anything else.

    Example:
        >>> tensors_in({"x": torch.tensor(1), "y": [torch.tensor(2)]})
        [tensor(1), tensor(2)]
    """
    found: list[Tensor] = []

    def note(tensor: Tensor) -> Tensor:
        found.append(tensor)
        return tensor

    map_tensors(note, batch)
    return found
