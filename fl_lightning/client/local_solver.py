"""Effective number of gradient steps of a client's local training: FedNova's ‖a‖₁.

    Δ = η Σ_t a_t g_t,      ‖a‖₁ = Σ_t a_t

For K plain steps ‖a‖₁ = K; with momentum ρ it is [K - ρ(1 - ρ^K)/(1 - ρ)]/(1 - ρ), with a pull μ
towards the start [1 - (1 - ημ)^K]/(ημ). In general ‖a‖₁ is the distance of K steps under a gradient of
1, divided by η. We simulate these steps on one number, which covers dampening, Nesterov's momentum and
any combination as well. Weight decay counts as part of the gradient.

Source: Wang et al. 2020, "Tackling the Objective Inconsistency Problem in Heterogeneous Federated
Optimization", section 4.1 and appendix.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.optim import SGD, Optimizer

from fl_lightning.core.errors import ConfigurationError
from fl_lightning.core.space import Space
from fl_lightning.sparsity.optimizers.sparse_optimizers import SparseSGDM

# Number of steps of all optimizers, or one number for each optimizer.
Steps = int | Sequence[int]


class LocalSolver:
    """Computes how many plain gradient steps (‖a‖₁) some SGD steps with momentum are worth, as in FedNova.

    Args:
        optimizers: one or several optimizers, whose current options are read at every call.
        pull: strength μ of a correction's pull towards the start, ≥ 0.

    Example:
        >>> weight = torch.nn.Parameter(torch.zeros(1))
        >>> LocalSolver(SGD([weight], lr=0.1, momentum=0.5)).effective_steps(2)
        2.5
    """

    def __init__(self, *optimizers: Optimizer, pull: float = 0.0) -> None:
        self._optimizers, self._pull = optimizers, pull

    def effective_steps(self, num_steps: Steps) -> float:
        """Return ‖a‖₁, the number of plain gradient steps that these local steps are worth.

        Raises:
            ConfigurationError: if the optimizer is not SGD, or ‖a‖₁ differs between parameter groups.
        """
        sizes = {steps for _, steps in self._by_group(num_steps)}
        if len(sizes) > 1:
            raise ConfigurationError(
                "the parameter groups of the clients' optimizer have different effective numbers of steps: give "
                "them the same momentum, dampening and nesterov, and with FedProx or FedDyn the same learning "
                "rate"
            )
        return sizes.pop()

    def travels(self, num_steps: Steps) -> list[float]:
        """Return learning rate times effective number of steps, η ‖a‖₁, for every parameter group.

        Raises:
            ConfigurationError: if the optimizer is not SGD.
        """
        return [lr * steps for lr, steps in self._by_group(num_steps)]

    def travel(self, num_steps: Steps, space: Space) -> Tensor | float:
        """Return η ‖a‖₁ (see `travels`) for every coordinate of ``space``, shape (k,), or a number if all are equal.

        Raises:
            ConfigurationError: if the optimizer is not SGD.
        """
        travels = self.travels(num_steps)
        groups = [group for each in self._optimizers for group in each.param_groups]
        of_param: dict[int, float] = {}
        for travel, group in zip(travels, groups, strict=True):
            for p in group["params"]:  # a parameter of two optimizers is moved by both
                of_param[id(p)] = of_param.get(id(p), 0.0) + travel
        parts = [
            (view.numel(), of_param.get(id(tensor), 0.0))
            for tensor, _, view in space.entries(torch.empty(space.size))
        ]
        if len({travel for _, travel in parts}) == 1:
            return parts[0][1]
        filled = [
            torch.full((size,), travel, dtype=space.dtype, device=space.device)
            for size, travel in parts
        ]
        return torch.cat(filled)

    def _by_group(self, num_steps: Steps) -> list[tuple[float, float]]:
        """Return (learning rate, ‖a‖₁) for every parameter group of the optimizers."""
        for optimizer in self._optimizers:
            if type(optimizer) not in (SGD, SparseSGDM):
                raise ConfigurationError(
                    f"the steps of {type(optimizer).__name__} are no weighted sum of gradients: use "
                    "torch.optim.SGD"
                )
        counts = [num_steps] * len(self._optimizers) if isinstance(num_steps, int) else num_steps
        return [
            self._of_group(group, count)
            for optimizer, count in zip(self._optimizers, counts, strict=True)
            for group in optimizer.param_groups
        ]

    def _of_group(self, group: Mapping[str, Any], num_steps: int) -> tuple[float, float]:
        lr = float(group["lr"])
        options = float(group["momentum"]), float(group["dampening"]), bool(group["nesterov"])
        return lr, _distance(num_steps, *options, lr * self._pull)


@lru_cache(maxsize=4096)
def _distance(
    num_steps: int, momentum: float, dampening: float, nesterov: bool, pull: float
) -> float:
    """Return ‖a‖₁: the distance that SGD moves in ``num_steps`` steps under a constant gradient of 1, divided by η.

    Args:
        num_steps: number of steps, ≥ 1.
        momentum: ρ.
        dampening: τ, the share of every new gradient but the first that the momentum leaves out.
        nesterov: use Nesterov's momentum.
        pull: η μ.
    """
    distance = velocity = 0.0
    for step in range(num_steps):
        gradient = 1.0 - pull * distance
        velocity = gradient if step == 0 else momentum * velocity + (1 - dampening) * gradient
        ahead = gradient + momentum * velocity if nesterov else velocity
        distance += ahead if momentum else gradient
    return distance
