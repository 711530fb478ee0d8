"""Lion over rounds: every coordinate moves by the learning rate, only its direction is learned.

    x ← x - η (sign(β₁ m + (1 - β₁) Δ) + λ x),    m ← β₂ m + (1 - β₂) Δ

Source: Chen et al. 2023, Symbolic Discovery of Optimization Algorithms, Algorithm 2, with the
pseudo-gradient in the gradient's place. Differs: nothing is taken from Lion's uses on clients. The
scale of the updates does not matter, so that the rate must be small: 1e-3 to 1e-4.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, final

import torch
from torch.optim import Optimizer

from fl_lightning.server.optimizers.adaptive import check_ranges


@final
class FedLion(Optimizer):
    """Lion as a server optimizer.

    Args:
        params: what to move.
        lr: learning rate η, ≥ 0: how far a coordinate moves per round.
        beta1: share of the momentum in the direction, in [0, 1).
        beta2: decay of the momentum, in [0, 1).
        weight_decay: λ, ≥ 0, decoupled.

    Raises:
        ConfigurationError: for values out of range.

    Example:
        >>> x = torch.nn.Parameter(torch.tensor([1.0, 1.0]))
        >>> optimizer = FedLion([x], lr=0.01)
        >>> x.grad = torch.tensor([-0.1, 5.0])
        >>> optimizer.step()
        >>> x.data
        tensor([1.0100, 0.9900])
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        beta1: float = 0.9,
        beta2: float = 0.99,
        weight_decay: float = 0.0,
    ) -> None:
        options = {"lr": lr, "beta1": beta1, "beta2": beta2, "weight_decay": weight_decay}
        check_ranges("FedLion", options)
        super().__init__(params, options)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Descend the gradients; returns what the closure does."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is None:
                    continue
                state = self.state[param]
                if not state:
                    state["momentum"] = torch.zeros_like(param)
                direction = torch.lerp(state["momentum"], param.grad, 1 - group["beta1"]).sign_()
                param.mul_(1 - group["lr"] * group["weight_decay"])
                param.add_(direction, alpha=-group["lr"])
                state["momentum"].lerp_(param.grad, 1 - group["beta2"])
        return loss
