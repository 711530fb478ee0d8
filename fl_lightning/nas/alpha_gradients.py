"""Gradients of architecture parameters: of a loss with a penalty on costs, or by REINFORCE from a reward.

    Gradient    ∇_α L_search(w or w', α)                     DARTS, GDAS, PC-DARTS, ProxylessNAS, FBNet
    Reward      -(R̂ - b) ∇ log π(a),  a ~ π = softmax(α)     ENAS, with a table of logits

Gradients are of first order, or go through one step of the weights:

    min_α L_val(w', α),    w' = w - ξ (∇_w L_train(w, α) + λ w + μ v)

    first    ∇_α L_val(w, α)
    finite   ∇_α L_val(w', α) - ξ (∇_α L_train(w⁺, α) - ∇_α L_train(w⁻, α)) / 2ε,
             w± = w ± ε ∇_{w'} L_val,   ε = 0.01 / ‖∇_{w'} L_val‖
    exact    the derivative of L_val(w'(α), α), by differentiating ∇_w L_train once more

v is the momentum buffer, μ its factor, λ the weight decay: w' is the result of the next step of SGD. A loss is
a function of the weights and of α, by name, e.g. by ``functional_call``, and must draw the same noise in every
call. The error of ``finite`` can exceed its correction where a ReLU switches between w⁺ and w⁻; ``exact`` has
no such error and takes more time and memory.

REINFORCE has a baseline b, the moving average of rewards, and a bonus for entropy:

    R̂ = R + 1e-4 · H(π)             no gradient flows through the entropy H
    b ← 0.95 b + 0.05 R̂

The baseline does not change the expected gradient; a gradient through H would. The first reward is its own
baseline, so that the first step is zero.

A penalty adds the expected cost to the loss of α:

    E = Σ p · F, the expected cost,   r = reference,   CE = loss of the task

    log          CE · α (log E / log r)^β     r = e:   Wu et al. 2019, FBNet, section 3.2
                                              else:    Cai et al. 2019, ProxylessNAS, its code (mul#log)
    linear       CE + λ (E - r) / r           Cai et al. 2019, ProxylessNAS, its code (add#linear)
    absolute     CE + λ |E - r| / r           Bender et al. 2020, TuNAS

``log`` and ``linear`` always push the cost down; ``absolute`` pushes it towards the reference. The logarithm
needs a cost above 1.
Sources: Liu, Simonyan, Yang 2019, DARTS, eq. 6 to 8, and its code for momentum and decay; Williams 1992;
Pham et al. 2018, ENAS, section 2.2, and its code; Dong, Yang 2020 for a table of logits (NAS-Bench-201's
REINFORCE).
Differs: the best of the drawn architectures is found on training examples. ENAS's code updates the
baseline by a reward before it subtracts the baseline, which scales every gradient by 0.95.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal, final

import torch
from torch import Tensor
from torch.optim import Optimizer
from typing_extensions import override

from fl_lightning.core.errors import ConfigurationError, check_range
from fl_lightning.core.traits import Trait, Traits

Tensors = Mapping[str, Tensor]
# weights, architecture parameters -> loss
Loss = Callable[[Tensors, Tensors], Tensor]
Order = Literal["first", "finite", "exact"]


@dataclass(frozen=True)
class WeightStep:
    """One plain SGD step of the weights (no dampening, no Nesterov), through which gradients of α can flow.

    Attributes:
        lr: learning rate ξ >= 0.
        momentum: factor μ >= 0 of the momentum buffer.
        weight_decay: λ >= 0.
    """

    lr: float
    momentum: float = 0.0
    weight_decay: float = 0.0

    @classmethod
    def of(cls, optimizer: Optimizer) -> WeightStep | None:
        """Return the weights' next step by this optimizer; None if it is not plain SGD."""
        group = optimizer.param_groups[0]
        if type(optimizer) is not torch.optim.SGD or group["dampening"] or group["nesterov"]:
            return None
        return cls(float(group["lr"]), group["momentum"], group["weight_decay"])

    def taken(
        self, weights: Tensors, gradients: Tensors, velocities: Tensors | None = None
    ) -> dict[str, Tensor]:
        """Return the weights after the step, by name.

        Args:
            weights: weights before the step, by name.
            gradients: gradients of the training loss, by the same names.
            velocities: momentum buffers by name; a missing buffer starts with this gradient.
        """
        moved = {}
        for name, weight in weights.items():
            direction = gradients[name] + self.weight_decay * weight
            if velocities and name in velocities:
                direction = self.momentum * velocities[name] + direction
            moved[name] = weight - self.lr * direction
        return moved


class AlphaGradient:
    """Base of the ways to estimate the gradient of the architecture parameters α."""


@final
class Gradient(AlphaGradient):
    """Gradient of α by backpropagation, from the loss on training examples set apart for the search.

    Args:
        order: ``first``: gradient at the current weights. ``finite``: through the next step of the weights,
            by finite differences. ``exact``: through the next step, by differentiating twice.
    """

    def __init__(self, order: Order = "first") -> None:
        self.order: Order = order


# of a search in which accuracy chooses the architecture at the end
TRIES_CELLS = Traits(
    needs={
        Trait.SIMULATION: "counts right answers of cells on clients' examples at its end (best_of above 1, or "
        "selection by perturbation), which sites do not send"
    },
    instead={Trait.SIMULATION: "set best_of of model.learn to 1, and model.selection to alpha"},
)


@final
class Reward(AlphaGradient):
    """Gradient of α by REINFORCE: the reward is the accuracy of a drawn architecture. Costs are ignored.

    Args:
        decay: decay of the moving average of rewards, in [0, 1).
        entropy_weight: weight of the entropy in the reward, at least 0.
        best_of: number of architectures that are drawn by softmax(α) when the search ends, at least 1. The
            most accurate of them on training examples, in the shared weights, is the result; with 1 the
            most probable architecture is.
    """

    def __init__(self, decay: float = 0.95, entropy_weight: float = 1e-4, best_of: int = 1) -> None:
        check_range("decay of Reward's baseline", decay, "in [0, 1)")
        check_range("entropy_weight", entropy_weight, "at least 0")
        check_range("best_of", best_of, "at least 1")
        self.best_of = best_of
        self._decay, self._entropy_weight = decay, entropy_weight

    def loss(
        self, reward: float, log_probability: Tensor, entropy: Tensor, baseline: Tensor
    ) -> Tensor:
        """Return the REINFORCE loss -(R̂ - b) log π, a scalar, and update the baseline b in place.

        Args:
            reward: reward R of an architecture drawn by the current α.
            log_probability: log-probability log π of the architecture, a scalar; gradients flow to α.
            entropy: sum of the entropies H of all decisions, in nats, a scalar.
            baseline: b, shape (1,), changed in place; 0 before the first reward.

        Raises:
            ValueError: if the reward is not finite.
        """
        reward += self._entropy_weight * float(entropy.detach())
        if not abs(reward) < float("inf"):
            raise ValueError(
                f"the reward of an architecture must be finite, got {reward}: the weights have diverged, lower "
                "the lr of model.optimizer"
            )
        before = float(baseline) or reward
        baseline.fill_(self._decay * before + (1 - self._decay) * reward)
        return -(reward - before) * log_probability


class Penalty(ABC):
    """Base of the losses for α that combine the task loss with the expected cost of the architecture."""

    @abstractmethod
    def __call__(self, loss: Tensor, cost: Tensor) -> Tensor:
        """Return the loss of α.

        Args:
            loss: loss of the task, a scalar; gradients flow.
            cost: expected cost, a scalar in the unit of the reference; gradients flow.
        """


@final
@dataclass(frozen=True)
class LogPenalty(Penalty):
    """Task loss times a power of the log cost: CE · α (log E / log r)^β, as in FBNet and ProxylessNAS (β = 0.3).

    Attributes:
        reference: r, in the unit of the cost, above 1.
        scale: α, above 0.
        exponent: β, at least 0.
    """

    reference: float = math.e
    scale: float = 0.2
    exponent: float = 0.6

    def __post_init__(self) -> None:
        check_range("reference of the penalty", self.reference, "above 1 and finite")
        check_range("scale of the penalty", self.scale, "above 0 and finite")
        check_range("exponent of the penalty", self.exponent, "at least 0 and finite")

    @override
    def __call__(self, loss: Tensor, cost: Tensor) -> Tensor:
        if not cost > 1:
            raise ValueError(
                f"LogPenalty needs an expected cost above 1 for its logarithm, got {float(cost)}: use "
                "LinearPenalty, or set model.measure to a cost in a smaller unit"
            )
        return loss * self.scale * (cost.log() / math.log(self.reference)) ** self.exponent


@final
@dataclass(frozen=True)
class LinearPenalty(Penalty):
    """Task loss plus the relative excess cost: CE + λ (E - r) / r (ProxylessNAS); |E - r| if ``absolute`` (TuNAS).

    Attributes:
        reference: r, in the unit of the cost, above 0; the target of ``absolute``.
        weight: λ, at least 0.
        absolute: whether costs below the reference are penalised like costs above it, by |E - r|.
    """

    reference: float
    weight: float = 0.1
    absolute: bool = False

    def __post_init__(self) -> None:
        check_range("reference of the penalty", self.reference, "above 0 and finite")
        check_range("weight of the penalty", self.weight, "at least 0 and finite")

    @override
    def __call__(self, loss: Tensor, cost: Tensor) -> Tensor:
        excess = (cost - self.reference) / self.reference
        return loss + self.weight * (excess.abs() if self.absolute else excess)


def architecture_gradient(
    train: Loss,
    validation: Loss,
    weights: Tensors,
    alphas: Tensors,
    step: WeightStep | None = None,
    *,
    velocities: Tensors | None = None,
    order: Order = "finite",
    step_length: float = 0.01,
) -> dict[str, Tensor]:
    """Return the gradient of the search loss for each architecture parameter, by name; inputs are not changed.

    Args:
        train: loss L_train on a batch of the weights' half of the data.
        validation: loss L_val on a batch of the other half.
        weights: trainable weights w, by name.
        alphas: architecture parameters, by name.
        step: next step of w; not needed for ``first``.
        velocities: momentum buffers of the weights; a missing buffer starts with this gradient.
        order: ``first``, ``finite`` or ``exact``, see `Gradient`.
        step_length: distance ‖w± - w‖ of ``finite``, above 0; 0.01 in the paper.

    Returns:
        Gradients with the names and shapes of `alphas`; zeros for those without influence on the loss.

    Raises:
        ConfigurationError: if `order` is unknown, or `step_length` is not positive.
        ValueError: if `step` is needed and missing.
    """
    if order not in ("first", "finite", "exact"):
        raise ConfigurationError(f"order must be first, finite or exact, got {order!r}")
    check_range("step_length", step_length, "above 0")
    w, a = leaves(weights), leaves(alphas)
    if order == "first":
        return gradients_of(validation(w, a), a)
    if step is None:
        raise ValueError(f"order {order} needs the next step of the weights: give the step")
    exact = order == "exact"
    ahead = step.taken(w, gradients_of(train(w, a), w, create_graph=exact), velocities)
    if exact:
        return gradients_of(validation(ahead, a), a)
    ahead = leaves(ahead)
    loss = validation(ahead, a)
    direct = gradients_of(loss, a, retain_graph=True)
    direction = {name: step.lr * g for name, g in gradients_of(loss, ahead).items()}
    norm = torch.stack([part.norm() for part in direction.values()]).norm()
    if norm == 0:  # w' does not move, or L_val is flat there: α has no effect through the weights
        return direct
    length = step_length / norm
    plus, minus = (
        gradients_of(
            train({name: w[name].detach() + sign * length * direction[name] for name in w}, a), a
        )
        for sign in (1, -1)
    )
    return {name: direct[name] - (plus[name] - minus[name]) / (2 * length) for name in direct}


def gradients_of(
    loss: Tensor, parameters: Tensors, *, create_graph: bool = False, retain_graph: bool = False
) -> dict[str, Tensor]:
    """Return the gradient of a loss for each parameter, by name; zeros if the loss does not depend on it."""
    if not loss.requires_grad:
        return {name: torch.zeros_like(parameter) for name, parameter in parameters.items()}
    gradients = torch.autograd.grad(
        loss,
        list(parameters.values()),
        create_graph=create_graph,
        retain_graph=create_graph or retain_graph,
        allow_unused=True,
        materialize_grads=True,
    )
    return dict(zip(parameters, gradients, strict=True))


def leaves(tensors: Tensors) -> dict[str, Tensor]:
    """Return detached tensors that require gradients and share memory with the given tensors."""
    return {name: tensor.detach().requires_grad_() for name, tensor in tensors.items()}
