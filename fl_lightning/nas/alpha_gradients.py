"""Gradients of architecture parameters: of a loss, or by REINFORCE from a reward.

    Gradient    ∇_α L_search(w or w', α)                     DARTS, GDAS, PC-DARTS, ProxylessNAS, FBNet
    Reward      -(R̂ - b) ∇ log π(a),  a ~ π = softmax(α)     ENAS, with a table of logits

Gradients are of first order, or go through one step of the weights:

    min_α L_val(w', α),    w' = w - ξ (∇_w L_train(w, α) + λ w + μ v)

    first    ∇_α L_val(w, α)
    finite   ∇_α L_val(w', α) - ξ (∇_α L_train(w⁺, α) - ∇_α L_train(w⁻, α)) / 2ε,
             w± = w ± ε ∇_{w'} L_val,   ε = 0.01 / ‖∇_{w'} L_val‖
    exact    the derivative of L_val(w'(α), α), by differentiating ∇_w L_train once more

v is the momentum buffer, μ its factor, λ the weight decay: w' is the result of SGD's next step, also with
dampening or Nesterov's momentum, which scale the second term of ``finite``. Losses are functions of named
weights and named architecture parameters; with a module, ``functional_call(module, {**weights, **alphas,
**buffers}, x)``. Pass buffers that may change, and draw the same noise in every call: all calls must
evaluate the same function. Between w⁺ and w⁻ rectifiers switch, and batch norms of nearly constant
channels change sign: there the error of ``finite`` can exceed its correction, while ``exact`` is the
derivative, for more time and memory.

REINFORCE has a baseline of earlier rewards and a bonus for entropy:

    R̂ = R + 1e-4 · H(π)             H is a constant here: no gradient flows through it
    b ← 0.95 b + 0.05 R̂

A baseline of earlier rewards does not change the expected gradient; entropy with a gradient would: it
adds ∇H times log π. The first reward is its own baseline: no step.
Sources: Liu, Simonyan, Yang 2019, DARTS, eq. 6 to 8, and its code for momentum and decay; Williams 1992;
Pham et al. 2018, ENAS, section 2.2, and its code; Dong, Yang 2020 for a table of logits (NAS-Bench-201's
REINFORCE).
Differs: the best of the drawn architectures is found on training examples. ENAS's code updates the
baseline by a reward before it subtracts the baseline, which scales every gradient by 0.95.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, final

import torch
from torch import Tensor
from torch.optim import Optimizer
from typing_extensions import override

from fl_lightning.core.errors import ConfigurationError, check_range
from fl_lightning.nas.relaxation import drawn_operations

Tensors = Mapping[str, Tensor]
# weights, architecture parameters -> loss
Loss = Callable[[Tensors, Tensors], Tensor]
Order = Literal["first", "finite", "exact"]


@dataclass(frozen=True)
class WeightStep:
    """The next step of SGD on the weights.

    Attributes:
        lr: ξ >= 0.
        momentum: μ >= 0.
        weight_decay: λ >= 0.
        dampening: dampening >= 0 of gradients in a momentum buffer.
        nesterov: whether to use Nesterov momentum.

    Raises:
        ConfigurationError: if one is negative.
    """

    lr: float
    momentum: float = 0.0
    weight_decay: float = 0.0
    dampening: float = 0.0
    nesterov: bool = False

    def __post_init__(self) -> None:
        for name in ("lr", "momentum", "weight_decay", "dampening"):
            check_range(name, getattr(self, name), "at least 0")

    @classmethod
    def of(cls, optimizer: Optimizer) -> WeightStep | None:
        """Return the next step of SGD, or None for other optimizers."""
        if type(optimizer) is not torch.optim.SGD:
            return None
        group = optimizer.param_groups[0]
        names = ("momentum", "weight_decay", "dampening", "nesterov")
        return cls(float(group["lr"]), *(group[name] for name in names))

    def taken(
        self, weights: Tensors, gradients: Tensors, velocities: Tensors | None = None
    ) -> dict[str, Tensor]:
        """Return w' by name.

        Args:
            weights: w.
            gradients: gradients of the training loss, by the same names.
            velocities: momentum buffers, by the same names; missing ones start with this gradient.
        """
        velocities = velocities or {}
        moved = {}
        for name, weight in weights.items():
            gradient = gradients[name] + self.weight_decay * weight
            velocity = gradient
            if name in velocities:
                velocity = self.momentum * velocities[name] + (1 - self.dampening) * gradient
            direction = gradient + self.momentum * velocity if self.nesterov else velocity
            moved[name] = weight - self.lr * direction
        return moved

    def slope(self, *, has_velocity: bool) -> float:
        """Derivative of a weight's step by its negative gradient.

        Args:
            has_velocity: whether it has a momentum buffer.
        """
        joins = 1 - self.dampening if has_velocity else 1.0
        return self.lr * (1 + self.momentum * joins if self.nesterov else joins)


@dataclass(frozen=True)
class Situation:
    """The inputs of a step of α: losses, parameters and the next step of the weights.

    Attributes:
        train: loss on the batch of the weights' half.
        search: loss on the batch of the other half, with the penalty of costs.
        accuracy: accuracy in [0, 1] of one operation per row on the batch of the other half.
        weights: w by name.
        alphas: architecture parameters by name.
        weight_step: next step of the weights; None if their optimizer is not SGD.
        velocities: momentum buffers of the weights.
        baseline: baseline of rewards, a writable buffer of shape (1,); 0 before the first reward.
        generator: returns a fresh generator of this step's draws, always with the same state.
    """

    train: Loss
    search: Loss
    accuracy: Callable[[Sequence[int]], Tensor]
    weights: Mapping[str, Tensor]
    alphas: Mapping[str, Tensor]
    weight_step: WeightStep | None
    velocities: Mapping[str, Tensor]
    baseline: Tensor
    generator: Callable[[], torch.Generator]


class AlphaGradient(ABC):
    """Base of estimators of α's gradient.

    Attributes:
        needs_weight_step: whether it needs the next step of the weights.
        has_baseline: whether it has a baseline of rewards.
    """

    needs_weight_step: bool = False
    has_baseline: bool = False

    @abstractmethod
    def __call__(self, now: Situation) -> dict[str, Tensor]:
        """Return the gradient for the optimizer of α, by name."""


@final
class Gradient(AlphaGradient):
    """Gradient of the loss on the other half.

    Args:
        order: ``first``: at the current weights; ``finite``: after the next step of the weights, by
            finite differences; ``exact``: the same by differentiating twice.
    """

    def __init__(self, order: Order = "first") -> None:
        self._order: Order = order
        self.needs_weight_step = order != "first"

    @override
    def __call__(self, now: Situation) -> dict[str, Tensor]:
        return architecture_gradient(
            now.train,
            now.search,
            now.weights,
            now.alphas,
            now.weight_step,
            velocities=now.velocities,
            order=self._order,
        )


@final
class Reward(AlphaGradient):
    """REINFORCE with the accuracy of a drawn architecture as reward; ignores costs.

    Args:
        decay: decay of the moving average of rewards, in [0, 1).
        entropy_weight: weight of the entropy in the reward, at least 0.
        best_of: architectures that are drawn by softmax(α) at the end, at least 1; the one with the highest
            accuracy of training examples in the shared weights is the result. 1: the most probable one.

    Raises:
        ConfigurationError: if one is out of its range.
    """

    has_baseline = True

    def __init__(self, decay: float = 0.95, entropy_weight: float = 1e-4, best_of: int = 1) -> None:
        check_range("decay of the baseline", decay, "in [0, 1)")
        check_range("entropy_weight", entropy_weight, "at least 0")
        check_range("best_of", best_of, "at least 1")
        self.best_of = best_of
        self._decay, self._entropy_weight = decay, entropy_weight

    @override
    def __call__(self, now: Situation) -> dict[str, Tensor]:
        alphas = leaves(now.alphas)
        logs = alphas["alpha"].log_softmax(1)
        drawn = drawn_operations(alphas["alpha"], 1, now.generator())
        loss = self.loss(
            float(now.accuracy(drawn[:, 0].tolist())),
            logs.gather(1, drawn.to(logs.device)).sum(),
            -(logs.exp() * logs).sum(),
            now.baseline,
        )
        return gradients_of(loss, alphas)

    def loss(
        self, reward: float, log_probability: Tensor, entropy: Tensor, baseline: Tensor
    ) -> Tensor:
        """Return -(R̂ - b) log π, and update the baseline.

        Args:
            reward: of an architecture drawn by the current α.
            log_probability: log π of its choices, a scalar; gradients flow to α.
            entropy: sum of the entropies of the decisions, in nats, a scalar.
            baseline: b, a writable tensor of shape (1,); 0 before the first reward.

        Raises:
            ValueError: if the reward is not finite.
        """
        reward += self._entropy_weight * float(entropy.detach())
        if not abs(reward) < float("inf"):
            raise ValueError(f"the reward of an architecture must be finite, got {reward}")
        before = float(baseline) or reward
        baseline.fill_(self._decay * before + (1 - self._decay) * reward)
        return -(reward - before) * log_probability


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
    """Return the gradient of α; the arguments do not change.

    Args:
        train: loss L_train on a batch of the weights' half.
        validation: loss L_val on a batch of the other half.
        weights: trainable weights w.
        alphas: architecture parameters.
        step: next step of w; not needed for ``first``.
        velocities: momentum buffers of the weights; missing ones start with this gradient.
        order: ``first``, ``finite`` or ``exact``; see above.
        step_length: ‖w± - w‖ > 0 of ``finite``; 0.01 in the paper.

    Returns:
        Tensors with the names and shapes of `alphas`; zeros for those without influence.

    Raises:
        ConfigurationError: if there is no such order, or the length is not positive.
        ValueError: if a step is needed and missing.
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
    slopes = {name: step.slope(has_velocity=name in (velocities or {})) for name in w}
    return _by_differences(train, validation, w, leaves(ahead), a, slopes, step_length)


def _by_differences(
    train: Loss,
    validation: Loss,
    w: Tensors,
    ahead: Tensors,
    a: dict[str, Tensor],
    slopes: Mapping[str, float],
    step_length: float,
) -> dict[str, Tensor]:
    loss = validation(ahead, a)
    direct = gradients_of(loss, a, retain_graph=True)
    direction = {name: slopes[name] * g for name, g in gradients_of(loss, ahead).items()}
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
    """Return the gradients of a loss by name; zeros for those without influence."""
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
    """Return detached copies that require gradients."""
    return {name: tensor.detach().requires_grad_() for name, tensor in tensors.items()}
