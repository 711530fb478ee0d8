"""Loss and gradients of one training step, forward and backward pass compiled as one graph.

What lies between convolutions and matrix products (activations, pooling, norms, their gradients)
becomes a few passes over memory. The optimizer steps afterwards, as it always does.

What the graph takes for granted (what is logged under which name, which buffers move) is found out
by a rehearsal: one step that is not compiled and leaves nothing behind.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad_and_value
from torchmetrics import Metric

from fl_lightning.client.local_step import loss_of
from fl_lightning.engines.compiler.compiling import Compiled
from fl_lightning.engines.functional.functional_step import tensors_in
from fl_lightning.engines.functional.metrics import BatchValue, StandIn, StandIns

Tensors = dict[str, Tensor]
# What `module.log` was called with: a name, a value and the other arguments.
LogCall = tuple[str, Any, tuple[Any, ...], dict[str, Any]]


@dataclass(frozen=True)
class _Found:
    """Findings of a rehearsal.

    Attributes:
        log_calls: in their order; values that are tensors come out of the graph.
        fixed: names of parameters that get no gradient, because the loss does not depend on them: the
            optimizer leaves them alone.
        moving: names of the buffers that a step writes to.
        layout: of the batch.
    """

    log_calls: list[LogCall]
    fixed: list[str]
    moving: list[str]
    layout: list[Any]


class CompiledGradients:
    """A training step's loss and gradients from a compiled graph.

    What cannot be compiled (branches on values, torchmetrics objects that are updated), or would
    need a new graph time and again, is given up with one warning of the kind `NotCompiled`.

    Args:
        module: whose parameters train; has a method ``log`` if its training step logs.
        run: its training step, on a batch and the batch's number.

    Example:
        >>> module = nn.Linear(2, 1, bias=False)
        >>> gradients = CompiledGradients(module, lambda batch, index: module(batch).sum())
        >>> gradients.is_given_up
        False
    """

    def __init__(self, module: nn.Module, run: Callable[[Any, Any], Any]) -> None:
        self._module, self._whole = module, _Whole(module, run)
        self._params = {name: p for name, p in module.named_parameters() if p.requires_grad}
        self._found: _Found | None = None
        self._graph = Compiled(self._gradients, "the local step", otherwise=lambda *_: None)

    @property
    def is_given_up(self) -> bool:
        """True if steps must be taken in another way from here on."""
        return self._graph.is_given_up

    def __call__(self, batch: Any, index: int) -> Tensor | None:
        """Put gradients into ``grad`` of all parameters, and log.

        Args:
            batch: always of the same shapes.
            index: its number.

        Returns:
            The loss, detached; None, with nothing done, where this is given up.
        """
        number = torch.tensor(index)
        found = self._found or self._rehearsed(batch, number)
        if found is None:
            return None
        # between these checks the graph relies on what Python reads in a step
        if index == 0 or found.layout != _layout(batch):
            self._graph.recheck()
        trained = {name: p.detach() for name, p in self._params.items()}
        fixed = {name: trained.pop(name) for name in found.fixed}
        buffers = {name: self._module.get_buffer(name) for name in found.moving}
        output = self._graph(trained, fixed, buffers, batch, number)
        if output is None:
            return None
        loss, gradients, logged = output
        for name, gradient in gradients.items():
            param = self._params[name]
            # a fused optimizer counts on one layout
            is_alike = gradient.stride() == param.stride()
            param.grad = gradient if is_alike else torch.empty_like(param).copy_(gradient)
        values = iter(logged)
        for name, value, args, options in found.log_calls:
            present = next(values) if isinstance(value, Tensor) else value
            self._module.log(name, present, *args, **options)  # type: ignore[operator]
        return loss  # type: ignore[no-any-return]

    def _rehearsed(self, batch: Any, number: Tensor) -> _Found | None:
        device = next(self._module.parameters()).device
        stand_ins = StandIns(self._module)
        try:
            with (
                stand_ins.in_place(),
                torch.random.fork_rng(devices=[] if device.type == "cpu" else [device]),
            ):
                metric_calls = stand_ins.listen()
                found = self._rehearse(batch, number)
                for stand_in, *_ in metric_calls:
                    raise ValueError(f"it updates the torchmetrics object {stand_in.path!r}")
                self._found = found
        except Exception as error:  # noqa: BLE001 - a fault will be met again without a graph
            self._graph.give_up(error)
        return self._found

    def _rehearse(self, batch: Any, number: Tensor) -> _Found:
        """Run a step on copies and see what happens."""
        trained = {name: p.detach().requires_grad_() for name, p in self._params.items()}
        buffers = dict(self._module.named_buffers())
        copies = {name: buffer.clone() for name, buffer in buffers.items()}
        with torch.enable_grad():
            loss, log_calls = self._whole.call(trained | copies, batch, number)
        gradients = torch.autograd.grad(loss, list(trained.values()), allow_unused=True)
        fixed = [name for name, g in zip(trained, gradients, strict=True) if g is None]
        moving = [name for name, copy in copies.items() if not torch.equal(copy, buffers[name])]
        return _Found(log_calls, fixed, moving, _layout(batch))

    def _gradients(
        self, trained: Tensors, fixed: Tensors, buffers: Tensors, batch: Any, number: Tensor
    ) -> tuple[Tensor, Tensors, list[Tensor]]:
        """Return loss, gradients and values logged."""

        def loss(trained: Tensors) -> tuple[Tensor, tuple[Tensor, list[Tensor], Tensors]]:
            copies = {name: buffer.clone() for name, buffer in buffers.items()}
            value, log_calls = self._whole.call({**trained, **fixed, **copies}, batch, number)
            logged = [value for _, value, *_ in log_calls if isinstance(value, Tensor)]
            return value, (value.detach(), logged, copies)

        gradients, (_, (value, logged, copies)) = grad_and_value(loss, has_aux=True)(trained)
        for name, buffer in buffers.items():
            buffer.copy_(copies[name])
        return value, gradients, logged


class _Whole(nn.Module):
    """A training step as a function of its tensors."""

    def __init__(self, module: nn.Module, run: Callable[[Any, Any], Any]) -> None:
        super().__init__()
        self.module, self._run = module, run

    def call(self, tensors: Tensors, batch: Any, number: Tensor) -> tuple[Tensor, list[LogCall]]:
        """Return the loss and what was logged."""
        inner = {f"module.{name}": tensor for name, tensor in tensors.items()}
        found: tuple[Tensor, list[LogCall]] = functional_call(self, inner, (batch, number))
        return found

    def forward(self, batch: Any, number: Tensor) -> tuple[Tensor, list[LogCall]]:
        calls: list[LogCall] = []

        def log(name: str, value: Any, *args: Any, **options: Any) -> None:
            if isinstance(value, (Metric, StandIn, BatchValue)):
                raise TypeError(f"it logs a torchmetrics object as {name!r}")
            kept = value.detach() if isinstance(value, Tensor) else value
            calls.append((name, kept, args, options))

        own_log = vars(self.module).get("log")
        vars(self.module)["log"] = log
        try:
            loss = loss_of(self._run(batch, number))
        finally:
            if own_log is None:
                del vars(self.module)["log"]
            else:
                vars(self.module)["log"] = own_log
        if loss is None:
            raise ValueError("its training_step returned no loss")
        return loss, calls


def _layout(batch: Any) -> list[Any]:
    return [(x.shape, x.stride(), x.dtype, x.device) for x in tensors_in(batch)]
