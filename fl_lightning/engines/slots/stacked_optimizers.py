"""Optimizers of PyTorch for many clients at once: the first axis of every tensor is over clients.

    SGD    m ← μ m + (1 - τ) (g + λ p),          p ← p - η m
    Adam   m ← β₁ m + (1 - β₁) g,  v ← β₂ v + (1 - β₂) g²,  p ← p - η m̂ / (√v̂ + ε)

The arithmetic is that of `torch.optim`. These optimizers work entry by entry, so stacking changes no
result. Optimizers that combine entries (LBFGS, Muon, …) have no rule here. Masked optimizers use the
rule of the dense ones; the stacked step leaves frozen entries alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim import SGD, Adam, AdamW, Optimizer

from fl_lightning.sparsity.optimizers.sparse_optimizers import SparseAdamW, SparseSGDM


@dataclass(frozen=True)
class StackedSGD:
    """`torch.optim.SGD` for G clients at once; a first step sets the momentum to the undampened gradient."""

    momentum: float
    dampening: float
    weight_decay: float
    nesterov: bool
    maximize: bool

    @property
    def num_states(self) -> int:
        """Number of state tensors per parameter: 1 with momentum, else 0."""
        return int(self.momentum != 0)

    def step(
        self, param: Tensor, grad: Tensor, state: list[Tensor], lr: Tensor, count: Tensor
    ) -> tuple[Tensor, list[Tensor]]:
        """Return new values and new momentum, each of shape (G, …).

        Args:
            param: values, shape (G, …).
            grad: gradients, shape (G, …).
            state: momentum, initially 0, shape (G, …); empty without momentum.
            lr: learning rate, a scalar or one per client, shape (G, 1, …).
            count: steps of each client before this one, float64 of shape (G,).
        """
        grad = -grad if self.maximize else grad
        if self.weight_decay:
            grad = grad + self.weight_decay * param
        if not self.momentum:
            return param - lr * grad, []
        momentum = self.momentum * state[0] + (1 - self.dampening) * grad
        if self.dampening:
            momentum = torch.where(_per_client(count, grad) == 0, grad, momentum)
        direction = grad + self.momentum * momentum if self.nesterov else momentum
        return param - lr * direction, [momentum]


@dataclass(frozen=True)
class StackedAdam:
    """`torch.optim.Adam` for G clients at once; with ``decoupled`` decay, `torch.optim.AdamW`."""

    betas: tuple[float, float]
    eps: float
    weight_decay: float
    decoupled: bool
    maximize: bool

    @property
    def num_states(self) -> int:
        """Number of state tensors per parameter: first and second moment."""
        return 2

    def step(
        self, param: Tensor, grad: Tensor, state: list[Tensor], lr: Tensor, count: Tensor
    ) -> tuple[Tensor, list[Tensor]]:
        """Return new values and new moments, each of shape (G, …); see `StackedSGD.step`."""
        grad = -grad if self.maximize else grad
        if self.weight_decay and self.decoupled:
            param = param * (1 - lr * self.weight_decay)
        elif self.weight_decay:
            grad = grad + self.weight_decay * param
        (beta1, beta2), number = self.betas, _per_client(count, grad) + 1
        bias1 = (1 - beta1**number).to(grad.dtype)
        bias2 = (1 - beta2**number).sqrt().to(grad.dtype)
        first = state[0] + (1 - beta1) * (grad - state[0])
        second = beta2 * state[1] + (1 - beta2) * grad * grad
        return param - lr / bias1 * first / (second.sqrt() / bias2 + self.eps), [first, second]


# Update rule of one parameter group.
StackedRule = StackedSGD | StackedAdam


def stacked_rule(optimizer: Optimizer, group: Mapping[str, Any]) -> StackedRule | None:
    """Return the stacked update rule for one of an optimizer's parameter groups; None if there is no such rule.

    Example:
        >>> sgd = torch.optim.SGD([torch.zeros(1)], lr=0.1, momentum=0.9)
        >>> stacked_rule(sgd, sgd.param_groups[0])
        StackedSGD(momentum=0.9, dampening=0, weight_decay=0, nesterov=False, maximize=False)
        >>> lbfgs = torch.optim.LBFGS([torch.zeros(1)])
        >>> stacked_rule(lbfgs, lbfgs.param_groups[0]) is None
        True
    """
    if type(optimizer) in (SGD, SparseSGDM):
        names = ("momentum", "dampening", "weight_decay", "nesterov", "maximize")
        return StackedSGD(*(group[name] for name in names))
    if type(optimizer) in (Adam, AdamW, SparseAdamW) and not group["amsgrad"]:
        decoupled = isinstance(optimizer, AdamW) or bool(group.get("decoupled_weight_decay"))
        betas = (float(group["betas"][0]), float(group["betas"][1]))
        options = group["eps"], group["weight_decay"], decoupled, group["maximize"]
        return StackedAdam(betas, *options)
    return None


def _per_client(count: Tensor, like: Tensor) -> Tensor:
    return count.view(-1, *[1] * (like.ndim - 1))
