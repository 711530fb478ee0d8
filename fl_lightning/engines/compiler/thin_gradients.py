"""Gradients of dense layers that are never written out.

A dense layer's gradient is the product of two thin matrices, the error at its output and its input:

    G = eᵀ a,    e of shape (B, out), a of shape (B, in)

With few examples in a batch and many weights, writing G and reading it again in SGD's step costs
more than computing it. So the two are kept, and multiplied where SGD adds them:

    W ← (1 - η λ) W - η eᵀ a        or, with momentum μ,   V ← μ V + eᵀ a + λ W,   W ← W - η V

Every product is the same, only sums are rounded in another order. Under autocast the factors are of
its precision, and their products are added in the weight's, without being rounded in between.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F  # noqa: N812 - as everyone writes it
from torch.optim import SGD, Optimizer

from fl_lightning.kernels import can_step, dense_step, direct_linear

Factors = list[tuple[Tensor, Tensor]]
Linear = Callable[[Tensor, Tensor, Tensor | None], Tensor]

# Smaller gradients stay in the cache on their way.
_FEWEST_WEIGHTS = 100_000
# With more examples than this share of a layer's shorter side, its gradient costs more to compute
# than to move.
_THIN = 0.25


class ThinGradients:
    """SGD on a module whose large dense layers keep their gradients as two factors.

    Args:
        module: whose layers of type `torch.nn.Linear` are looked at.
        optimizer: of type `torch.optim.SGD`, see `reason_against_thin_gradients`.
        is_direct: whether the layers' outputs and steps are computed by `direct_linear`.

    Attributes:
        forwards: by layer, what must stand in for its ``forward`` while a loss is computed.
        linear: of input, weight and bias, with which layers are computed.

    Example:
        >>> layer = nn.Linear(1000, 200)
        >>> thin = ThinGradients(layer, SGD(layer.parameters(), lr=0.1))
        >>> before = layer.weight.detach().clone()
        >>> thin.forwards[layer](torch.ones(2, 1000)).sum().backward()
        >>> layer.weight.grad is None  # only its factors are known
        True
        >>> thin.step()
        >>> bool(torch.allclose(before - layer.weight, torch.tensor(0.2), atol=1e-6))
        True
    """

    def __init__(self, module: nn.Module, optimizer: Optimizer, *, is_direct: bool = False) -> None:
        self._optimizer, self._is_direct = optimizer, is_direct
        self.linear: Linear = direct_linear if is_direct else F.linear
        layers = _large_layers(module, optimizer)
        self._weights = [layer.weight for layer in layers]
        self._factors: list[Factors] = [[] for _ in layers]
        self._number_of: dict[nn.Module, int] = {
            layer: number for number, layer in enumerate(layers)
        }
        self._group_of = {
            id(p): number for number, g in enumerate(optimizer.param_groups) for p in g["params"]
        }
        self.forwards: Mapping[nn.Module, Callable[[Tensor], Tensor]] = {
            layer: _forward(layer, self.linear, factors)
            for layer, factors in zip(layers, self._factors, strict=True)
        }

    def forget(self) -> None:
        """Clear factors that a step which failed may have left."""
        for factors in self._factors:
            factors.clear()

    def keep(self, layer: nn.Module, error: Tensor, value: Tensor) -> None:
        """Take the factors of a layer's gradient, with any axes in front of the last one.

        Args:
            layer: one of those in ``forwards``.
            error: at its output, shape (…, out).
            value: its input, shape (…, in).
        """
        number = self._number_of[layer]
        dtype = self._weights[number].dtype
        flat, rows = (x.reshape(-1, x.shape[-1]).to(dtype) for x in (error, value))
        self._factors[number].append((flat, rows))

    @torch.no_grad()
    def step(self, step_others: Callable[[], Any] | None = None) -> None:
        """Step all parameters.

        Args:
            step_others: steps those that have a ``grad``; the optimizer's own step if None.
        """
        for weight, factors in zip(self._weights, self._factors, strict=True):
            if weight.grad is not None:  # the weight has another part in the loss
                for error, value in factors:
                    weight.grad.addmm_(error.t(), value)
                factors.clear()
        (step_others or self._optimizer.step)()
        for weight, factors in zip(self._weights, self._factors, strict=True):
            if factors:
                self._move(weight, factors)
                factors.clear()

    def _move(self, weight: Tensor, factors: Factors) -> None:
        group = self._optimizer.param_groups[self._group_of[id(weight)]]
        lr, momentum, decay = group["lr"], group["momentum"], group["weight_decay"]
        velocity = None
        if momentum:
            state = self._optimizer.state[weight]
            velocity = state.get("momentum_buffer")
            if velocity is None:
                velocity = state["momentum_buffer"] = torch.empty_like(weight)
                momentum = 0  # also of the numbers that happened to be there
        if self._is_direct and len(factors) == 1 and can_step(weight):
            options = {"keep": 1.0, "lr": lr, "momentum": momentum, "decay": decay}
            own = weight.unsqueeze(0)
            moving = None if velocity is None else velocity.unsqueeze(0)
            dense_step(own, moving, own, *(x.unsqueeze(0) for x in factors[0]), **options)
            return
        if velocity is None:
            _add_product(weight, factors, keep=1 - lr * decay, alpha=-lr)
            return
        _add_product(velocity, factors, keep=momentum, alpha=1)
        if decay:
            velocity.add_(weight, alpha=decay)
        weight.add_(velocity, alpha=-lr)


def reason_against_thin_gradients(module: nn.Module, optimizer: Optimizer) -> str | None:
    """Return why a module's gradients cannot stay factors; None if they can."""
    if type(optimizer) is not SGD:
        return f"{type(optimizer).__name__} needs gradients entry by entry: it is for SGD"
    for group in optimizer.param_groups:
        for option in ("nesterov", "dampening", "maximize", "differentiable"):
            if group[option]:
                return f"SGD has the option {option}"
        if isinstance(group["lr"], Tensor):
            return "SGD's lr is a tensor"
    if not _large_layers(module, optimizer):
        return f"there is no dense layer with {_FEWEST_WEIGHTS:,} weights or more that train"
    return None


def _large_layers(module: nn.Module, optimizer: Optimizer) -> list[nn.Linear]:
    trained = {id(p) for group in optimizer.param_groups for p in group["params"]}
    return [
        layer
        for layer in module.modules()
        if type(layer) is nn.Linear
        and "forward" not in vars(layer)
        and id(layer.weight) in trained
        and layer.weight.requires_grad
        and layer.weight.numel() >= _FEWEST_WEIGHTS
        and layer.weight.dtype in (torch.float32, torch.float64)
        # someone waits for the gradient itself
        and not getattr(layer.weight, "_backward_hooks", None)
        and not getattr(layer.weight, "_post_accumulate_grad_hooks", None)
    ]


def is_thin(layer: nn.Linear, value: Tensor) -> bool:
    """Return whether the factors of a layer's gradient are small, with this input."""
    rows = value.numel() / layer.in_features
    return rows <= _THIN * min(layer.weight.shape)


def _forward(layer: nn.Linear, linear: Linear, factors: Factors) -> Callable[[Tensor], Tensor]:
    own = layer.weight

    def forward(value: Tensor) -> Tensor:
        weight, bias = layer.weight, layer.bias
        # another weight may stand there for a moment, as in `torch.func.functional_call`
        # frozen meanwhile, it needs no gradient at all
        is_other = weight is not own or not weight.requires_grad or not is_thin(layer, value)
        if is_other or not torch.is_grad_enabled():
            return linear(value, weight, bias)
        device, dtype = value.device.type, None
        # direct layers stay in full precision
        if linear is F.linear and torch.is_autocast_enabled(device):
            dtype = torch.get_autocast_dtype(device)
        result: Tensor = _ThinLinear.apply(value, weight, bias, linear, factors, dtype)
        return result

    return forward


class _ThinLinear(torch.autograd.Function):
    """A dense layer whose backward pass leaves its weight's gradient as two factors."""

    @staticmethod
    def forward(
        ctx: Any,
        value: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        linear: Linear,
        factors: Factors,
        dtype: torch.dtype | None,
    ) -> Tensor:
        ctx.factors, ctx.dtypes = factors, (value.dtype, weight.dtype)
        if dtype is not None:
            value, weight = value.to(dtype), weight.to(dtype)
            bias = None if bias is None else bias.to(dtype)
        ctx.save_for_backward(value, weight)
        return linear(value, weight, bias)

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, error: Tensor
    ) -> tuple[Tensor | None, None, Tensor | None, None, None, None]:
        value, weight = ctx.saved_tensors
        of_value, of_weight = ctx.dtypes
        flat = error.reshape(-1, weight.shape[0]).to(of_weight)
        ctx.factors.append((flat, value.reshape(-1, weight.shape[1]).to(of_weight)))
        needs = ctx.needs_input_grad
        back = (error @ weight.to(error.dtype)).to(of_value) if needs[0] else None
        return back, None, flat.sum(0) if needs[2] else None, None, None, None


def _add_product(target: Tensor, factors: Factors, *, keep: float, alpha: float) -> None:
    """Add the sum of all products: target ← keep · target + alpha · Σ eᵀ a."""
    for error, value in factors:
        target.addmm_(error.t(), value, beta=keep, alpha=alpha)
        keep = 1
