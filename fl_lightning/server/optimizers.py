"""Server optimizers that torch lacks: FedAdagrad, FedAdam, FedYogi and FedLion.

FedAdagrad, FedAdam, FedYogi:

    m ← β₁ m + (1 - β₁) Δ
    v ← v + Δ²                              FedAdagrad
    v ← β₂ v + (1 - β₂) Δ²                  FedAdam
    v ← v - (1 - β₂) Δ² sign(v - Δ²)        FedYogi
    x ← x - η m / (√v + τ),                 v₀ = τ²,  no bias correction

Source: Reddi et al. 2021, Adaptive Federated Optimization, Algorithm 2; there Δ is end - start and
is added, here it is start - end and is descended. Learning rates are those of the paper's search:
start from 0.1 to 0.01 with τ of 1e-3. Differs from Flower, which starts from v₀ = 0 and whose
FedAdam corrects the bias, and from torch's Adam in the same two things.

FedLion: every coordinate moves by the learning rate, only its sign is learned.

    x ← x - η (sign(β₁ m + (1 - β₁) Δ) + λ x),    m ← β₂ m + (1 - β₂) Δ

Source: Chen et al. 2023, Symbolic Discovery of Optimization Algorithms, Algorithm 2, with the
pseudo-gradient in the gradient's place. Differs: nothing is taken from Lion's uses on clients. The
scale of the updates does not matter, so that the rate must be small: 1e-3 to 1e-4.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, final

import torch
from torch import Tensor
from torch.optim import Optimizer
from typing_extensions import override

from fl_lightning.core.errors import check_range, raise_together

_RANGES = {
    "lr": "at least 0 and finite",
    "beta1": "in [0, 1)",
    "beta2": "in [0, 1)",
    "tau": "greater than 0 and finite",
    "weight_decay": "at least 0 and finite",
}


class _ServerOptimizer(Optimizer):
    """Base of server optimizers, which checks the ranges of options and updates one parameter at a time."""

    def __init__(self, params: Iterable[Any], options: dict[str, Any]) -> None:
        name = type(self).__name__
        raise_together(
            *(partial(check_range, f"{name}: {o}", v, _RANGES[o]) for o, v in options.items())
        )
        super().__init__(params, options)

    @abstractmethod
    def _move(self, param: Tensor, gradient: Tensor, group: dict[str, Any]) -> None:
        """Update a parameter in place, given its pseudo-gradient and the options of its group."""

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update all parameters by their pseudo-gradients; return the closure's loss, if there is a closure."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    self._move(param, param.grad, group)
        return loss


class _Adaptive(_ServerOptimizer):
    """Base of FedAdagrad, FedAdam and FedYogi, which differ in their second moment.

    The state exists from the start, so that a coordinate that joins later starts from τ² as well.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 0.1,
        beta1: float = 0.9,
        beta2: float = 0.99,
        tau: float = 1e-3,
    ) -> None:
        super().__init__(params, {"lr": lr, "beta1": beta1, "beta2": beta2, "tau": tau})
        for group in self.param_groups:
            for param in group["params"]:
                self.state[param]["first"] = torch.zeros_like(param)
                self.state[param]["second"] = torch.full_like(param, group["tau"] ** 2)

    @abstractmethod
    def _update_second(self, second: Tensor, square: Tensor, beta2: float) -> None:
        """Update the second moment in place, given the squared pseudo-gradient."""

    @override
    def _move(self, param: Tensor, gradient: Tensor, group: dict[str, Any]) -> None:
        first, second = self.state[param]["first"], self.state[param]["second"]
        first.lerp_(gradient, 1 - group["beta1"])
        self._update_second(second, gradient.square(), group["beta2"])
        param.addcdiv_(first, second.sqrt().add_(group["tau"]), value=-group["lr"])


@final
class FedAdagrad(_Adaptive):
    """FedAdagrad: the server updates the model by Adagrad, with a pseudo-gradient per round.

    Args:
        params: parameters to update.
        lr: learning rate η, ≥ 0.
        beta1: decay of the first moment, in [0, 1); the paper's experiments have 0.
        tau: degree of adaptivity τ, > 0; the second moment starts at its square.

    Raises:
        ConfigurationError: for values out of range.

    Example:
        >>> x = torch.nn.Parameter(torch.tensor([1.0]))
        >>> optimizer = FedAdagrad([x], lr=0.1)
        >>> x.grad = torch.tensor([-0.1])
        >>> optimizer.step()
        >>> x.data
        tensor([1.0990])
    """

    def __init__(
        self, params: Iterable[Any], lr: float = 0.1, beta1: float = 0.0, tau: float = 1e-3
    ) -> None:
        super().__init__(params, lr, beta1, tau=tau)

    @override
    def _update_second(self, second: Tensor, square: Tensor, beta2: float) -> None:
        second.add_(square)


@final
class FedAdam(_Adaptive):
    """FedAdam: the server updates the model by Adam without bias correction, v₀ = τ², as in the paper.

    Args:
        params: parameters to update.
        lr: learning rate η, ≥ 0.
        beta1: decay of the first moment, in [0, 1).
        beta2: decay of the second moment, in [0, 1).
        tau: degree of adaptivity τ, > 0; the second moment starts at its square.

    Raises:
        ConfigurationError: for values out of range.

    Example:
        >>> x = torch.nn.Parameter(torch.tensor([1.0]))
        >>> optimizer = FedAdam([x], lr=0.1)
        >>> x.grad = torch.tensor([-0.1])
        >>> optimizer.step()
        >>> x.data
        tensor([1.0905])
    """

    @override
    def _update_second(self, second: Tensor, square: Tensor, beta2: float) -> None:
        second.lerp_(square, 1 - beta2)


@final
class FedYogi(_Adaptive):
    """FedYogi: the server updates the model by Yogi; the second moment moves by at most (1 - β₂) Δ² per round.

    Args:
        params: parameters to update.
        lr: learning rate η, ≥ 0.
        beta1: decay of the first moment, in [0, 1).
        beta2: decay of the second moment, in [0, 1).
        tau: degree of adaptivity τ, > 0; the second moment starts at its square.

    Raises:
        ConfigurationError: for values out of range.

    Example:
        >>> x = torch.nn.Parameter(torch.tensor([1.0]))
        >>> optimizer = FedYogi([x], lr=0.1)
        >>> x.grad = torch.tensor([-0.1])
        >>> optimizer.step()
        >>> x.data
        tensor([1.0905])
    """

    @override
    def _update_second(self, second: Tensor, square: Tensor, beta2: float) -> None:
        second.addcmul_(square, torch.sign(second - square), value=beta2 - 1)


@final
class FedLion(_ServerOptimizer):
    """Lion on the server: each round moves every coordinate by ± the learning rate.

    Args:
        params: parameters to update.
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
        super().__init__(params, options)

    @override
    def _move(self, param: Tensor, gradient: Tensor, group: dict[str, Any]) -> None:
        state = self.state[param]
        if not state:
            state["momentum"] = torch.zeros_like(param)
        direction = torch.lerp(state["momentum"], gradient, 1 - group["beta1"]).sign_()
        param.mul_(1 - group["lr"] * group["weight_decay"])
        param.add_(direction, alpha=-group["lr"])
        state["momentum"].lerp_(gradient, 1 - group["beta2"])
