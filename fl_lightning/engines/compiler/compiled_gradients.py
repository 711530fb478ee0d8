"""Loss and gradients of one training step, forward and backward pass compiled as one graph.

What lies between convolutions and matrix products (activations, pooling, norms, their gradients)
becomes a few passes over memory. The optimizer steps afterwards, as it always does. A dense layer
whose gradient stays thin (see `ThinGradients`) is computed as

    y = W a + b + z,   z = 0,      so that dL/dz is the error e at its output:  G = eᵀ a

What the graph takes for granted (what is logged under which name, which buffers move) is found out
by a rehearsal: one step that is not compiled and leaves nothing behind.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad_and_value
from torch.nn import functional as F  # noqa: N812 - as everyone writes it
from torchmetrics import Metric

from fl_lightning.client.local_step import loss_of
from fl_lightning.engines.compiler.compiling import Compiled
from fl_lightning.engines.compiler.thin_gradients import Linear, ThinGradients, is_thin
from fl_lightning.engines.functional.functional_step import tensors_in
from fl_lightning.engines.functional.metric_calls import BatchValue, StandIn, StandIns

Tensors = dict[str, Tensor]
Forwards = Mapping[str, Callable[[Tensor], Tensor]]
# What `module.log` was called with: a name, a value and the other arguments.
LogCall = tuple[str, Any, tuple[Any, ...], dict[str, Any]]


@dataclass(frozen=True)
class _Found:
    """What a rehearsal found out.

    Attributes:
        log_calls: in their order; values that are tensors come out of the graph.
        probes: zeros in the shape of a thin layer's output, by the layer's name.
        fixed: names of parameters that get no gradient: thin layers' weights, and what the loss
            does not depend on, which the optimizer then leaves alone.
        moving: names of the buffers that a step writes to.
        layout: of the batch.
    """

    log_calls: list[LogCall]
    probes: Tensors
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
        self._linear: Linear = F.linear  # of thin layers
        self._graph = Compiled(self._gradients, "the local step", otherwise=_nothing)

    @property
    def is_given_up(self) -> bool:
        """Whether steps must be taken in another way from here on."""
        return self._graph.is_given_up

    def __call__(self, batch: Any, index: int, thin: ThinGradients | None = None) -> Tensor | None:
        """Put gradients into ``grad`` of all parameters, or factors where they stay thin, and log.

        Args:
            batch: always of the same shapes.
            index: its number.
            thin: takes the factors; None if all gradients are to be written out.

        Returns:
            The loss, detached; None, with nothing done, where this is given up.
        """
        number = torch.tensor(index)
        found = self._found or self._rehearsed(batch, number, thin)
        if found is None:
            return None
        # between these checks the graph relies on what Python reads in a step
        if index == 0 or found.layout != _layout(batch):
            self._graph.recheck()
        trained = {name: p.detach() for name, p in self._params.items()}
        fixed = {name: trained.pop(name) for name in found.fixed}
        buffers = {name: self._module.get_buffer(name) for name in found.moving}
        output = self._graph(trained, fixed, found.probes, buffers, batch, number)
        if output is None:
            return None
        loss, gradients, errors, inputs, logged = output
        for name, gradient in gradients.items():
            param = self._params[name]
            # a fused optimizer counts on one layout
            is_alike = gradient.stride() == param.stride()
            param.grad = gradient if is_alike else torch.empty_like(param).copy_(gradient)
        for name, error in errors.items():
            thin.keep(self._module.get_submodule(name), error, inputs[name])  # type: ignore[union-attr]
        values = iter(logged)
        for name, value, args, options in found.log_calls:
            present = next(values) if isinstance(value, Tensor) else value
            self._module.log(name, present, *args, **options)  # type: ignore[operator]
        return loss  # type: ignore[no-any-return]

    def _rehearsed(self, batch: Any, number: Tensor, thin: ThinGradients | None) -> _Found | None:
        large = {n: m for n, m in self._module.named_modules() if thin and m in thin.forwards}
        if thin is not None:
            self._linear = thin.linear
        device = next(self._module.parameters()).device
        stand_ins = StandIns(self._module)
        try:
            with (
                stand_ins.in_place(),
                torch.random.fork_rng(devices=[] if device.type == "cpu" else [device]),
            ):
                metric_calls = stand_ins.listen()
                found = self._rehearse(batch, number, large)
                for stand_in, *_ in metric_calls:
                    raise ValueError(f"it updates the torchmetrics object {stand_in.path!r}")
                self._found = found
        except Exception as error:  # noqa: BLE001 - a fault will be met again without a graph
            self._graph.give_up(error)
        return self._found

    def _rehearse(self, batch: Any, number: Tensor, large: Mapping[str, Any]) -> _Found:
        """Take a step on copies and see what happens."""
        trained = {name: p.detach().requires_grad_() for name, p in self._params.items()}
        buffers = dict(self._module.named_buffers())
        copies = {name: buffer.clone() for name, buffer in buffers.items()}
        outputs: dict[str, list[Tensor | None]] = {name: [] for name in large}

        def noting(name: str) -> Callable[[Tensor], Tensor]:
            layer = large[name]

            def forward(value: Tensor) -> Tensor:
                weight = layer.weight
                is_own = weight is trained[_weight_of(name)] and is_thin(layer, value)
                out = self._linear(value, weight.detach() if is_own else weight, layer.bias)
                outputs[name].append(out.detach() if is_own else None)
                return out

            return forward

        with torch.enable_grad():
            forwards = {name: noting(name) for name in large}
            loss, log_calls = self._whole.call(trained | copies, batch, number, forwards)
        gradients = torch.autograd.grad(loss, list(trained.values()), allow_unused=True)
        without = {n for n, g in zip(trained, gradients, strict=True) if g is None}
        probes = {
            name: torch.zeros_like(uses[0])
            for name, uses in outputs.items()
            if len(uses) == 1 and uses[0] is not None and _weight_of(name) in without
        }
        apart = {
            _weight_of(name) for name, uses in outputs.items() if any(x is not None for x in uses)
        }
        fixed = [*map(_weight_of, probes), *(n for n in trained if n in without - apart)]
        moving = [name for name, copy in copies.items() if not torch.equal(copy, buffers[name])]
        return _Found(log_calls, probes, fixed, moving, _layout(batch))

    def _gradients(
        self,
        trained: Tensors,
        fixed: Tensors,
        probes: Tensors,
        buffers: Tensors,
        batch: Any,
        number: Tensor,
    ) -> tuple[Tensor, Tensors, Tensors, Tensors, list[Tensor]]:
        """Return loss, gradients, errors at thin layers' outputs, their inputs, values logged."""

        def loss(
            trained: Tensors, probes: Tensors
        ) -> tuple[Tensor, tuple[Tensor, Tensors, list[Tensor], Tensors]]:
            inputs: Tensors = {}
            copies = {name: buffer.clone() for name, buffer in buffers.items()}

            def probing(name: str) -> Callable[[Tensor], Tensor]:
                layer: Any = self._module.get_submodule(name)

                def forward(value: Tensor) -> Tensor:
                    inputs[name] = value.detach()
                    return self._linear(value, layer.weight, layer.bias) + probes[name]

                return forward

            forwards = {name: probing(name) for name in probes}
            tensors = {**trained, **fixed, **copies}
            value, log_calls = self._whole.call(tensors, batch, number, forwards)
            logged = [value for _, value, *_ in log_calls if isinstance(value, Tensor)]
            return value, (value.detach(), inputs, logged, copies)

        (gradients, errors), (_, (value, inputs, logged, copies)) = grad_and_value(
            loss, (0, 1), has_aux=True
        )(trained, probes)
        for name, buffer in buffers.items():
            buffer.copy_(copies[name])
        return value, gradients, errors, inputs, logged


class _Whole(nn.Module):
    """A training step as a function of its tensors."""

    def __init__(self, module: nn.Module, run: Callable[[Any, Any], Any]) -> None:
        super().__init__()
        self.module, self._run = module, run

    def call(
        self, tensors: Tensors, batch: Any, number: Tensor, forwards: Forwards
    ) -> tuple[Tensor, list[LogCall]]:
        """Return the loss and what was logged."""
        inner = {f"module.{name}": tensor for name, tensor in tensors.items()}
        found: tuple[Tensor, list[LogCall]]
        found = functional_call(self, inner, (batch, number, forwards))
        return found

    def forward(
        self, batch: Any, number: Tensor, forwards: Forwards
    ) -> tuple[Tensor, list[LogCall]]:
        calls: list[LogCall] = []

        def log(name: str, value: Any, *args: Any, **options: Any) -> None:
            if isinstance(value, (Metric, StandIn, BatchValue)):
                raise TypeError(f"it logs a torchmetrics object as {name!r}")
            kept = value.detach() if isinstance(value, Tensor) else value
            calls.append((name, kept, args, options))

        layers = {name: self.module.get_submodule(name) for name in forwards}
        own_log = vars(self.module).get("log")
        vars(self.module)["log"] = log
        for name, layer in layers.items():
            vars(layer)["forward"] = forwards[name]
        try:
            loss = loss_of(self._run(batch, number))
        finally:
            for layer in layers.values():
                del vars(layer)["forward"]
            if own_log is None:
                del vars(self.module)["log"]
            else:
                vars(self.module)["log"] = own_log
        if loss is None:
            raise ValueError("its training_step returned no loss")
        return loss, calls


def _layout(batch: Any) -> list[Any]:
    return [(x.shape, x.stride(), x.dtype, x.device) for x in tensors_in(batch)]


def _weight_of(layer: str) -> str:
    return f"{layer}.weight" if layer else "weight"


def _nothing(*args: Any) -> None:
    """Stand in for a graph that was given up."""
