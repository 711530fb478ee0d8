"""The gradient of α in DARTS: of first order, or through one step of the weights.

    min_α L_val(w', α),    w' = w - ξ (∇_w L_train(w, α) + λ w + μ v)

    first    ∇_α L_val(w, α)
    finite   ∇_α L_val(w', α) - ξ (∇_α L_train(w⁺, α) - ∇_α L_train(w⁻, α)) / 2ε,
             w± = w ± ε ∇_{w'} L_val,   ε = 0.01 / ‖∇_{w'} L_val‖
    exact    the derivative of L_val(w'(α), α), by differentiating ∇_w L_train once more

v is the momentum's buffer, μ its factor, λ the weight decay: w' is where SGD would go, also with dampening
or Nesterov's momentum, by which the second term of ``finite`` is scaled. Losses are
functions of named weights and named architecture parameters; with a module,
``functional_call(module, {**weights, **alphas, **buffers}, x)``. Hand over buffers that may change,
and draw the same noise in every call: all of them have to be the same function.
Between w⁺ and w⁻ rectifiers switch and batch norms of nearly constant channels turn over: there
``finite`` can miss by more than what it corrects, while ``exact`` is the derivative, for more time and
memory.
Source: Liu, Simonyan, Yang 2019, DARTS, eq. 6 to 8, and its code for momentum and decay.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from fl_lightning.core.errors import ConfigurationError

Tensors = Mapping[str, Tensor]
# weights, architecture parameters -> loss
Loss = Callable[[Tensors, Tensors], Tensor]
Order = Literal["first", "finite", "exact"]


@dataclass(frozen=True)
class WeightStep:
    """The step of SGD that weights are about to take.

    Attributes:
        lr: ξ >= 0.
        momentum: μ >= 0.
        weight_decay: λ >= 0.
        dampening: >= 0, of a gradient that joins a momentum buffer.
        nesterov: whether the step looks one momentum ahead.

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
            if not getattr(self, name) >= 0:
                raise ConfigurationError(f"{name} must be at least 0, got {getattr(self, name)}")

    def taken(
        self, weights: Tensors, gradients: Tensors, velocities: Tensors | None = None
    ) -> dict[str, Tensor]:
        """Return w'.

        Args:
            weights: w.
            gradients: of the training loss, by the same names.
            velocities: momentum buffers, by the same names; absent ones begin with this gradient.
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
        """Return how far a weight moves against a unit of its gradient.

        Args:
            has_velocity: whether it has a momentum buffer.
        """
        joins = 1 - self.dampening if has_velocity else 1.0
        return self.lr * (1 + self.momentum * joins if self.nesterov else joins)


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
    """Return the gradient of α; nothing that is handed over changes.

    Args:
        train: loss L_train on a batch of the weights' half.
        validation: loss L_val on a batch of the other half.
        weights: w, the trainable ones.
        alphas: architecture parameters.
        step: of w; ``first`` needs none.
        velocities: momentum buffers of the weights; absent ones begin with this gradient.
        order: ``first``, ``finite`` or ``exact``; see above.
        step_length: ‖w± - w‖ > 0 of ``finite``; 0.01 is the paper's.

    Returns:
        Tensors of the names and shapes of `alphas`; zeros where α has no influence.

    Raises:
        ConfigurationError: if there is no such order, or the length is not positive.
        ValueError: if there is no step where one is needed.
    """
    if order not in ("first", "finite", "exact"):
        raise ConfigurationError(f"order must be first, finite or exact, got {order!r}")
    if not step_length > 0:
        raise ConfigurationError(f"step_length must be positive, got {step_length}")
    w, a = leaves(weights), leaves(alphas)
    if order == "first":
        return gradients_of(validation(w, a), a)
    if step is None:
        raise ValueError(f"order {order} looks one step of the weights ahead: give the step")
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
    gradients = gradients_of(validation(ahead, a), {**prefixed("w", ahead), **prefixed("a", a)})
    direct = {name: gradients[f"a {name}"] for name in a}
    direction = {name: slopes[name] * gradients[f"w {name}"] for name in w}
    norm = torch.stack([part.norm() for part in direction.values()]).norm()
    if norm == 0:  # w' does not move, or is where L_val is flat: no path from α through the weights
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
    loss: Tensor, parameters: Tensors, *, create_graph: bool = False
) -> dict[str, Tensor]:
    """Return the gradients of a loss by name; zeros for those without influence."""
    if not loss.requires_grad:
        return {name: torch.zeros_like(parameter) for name, parameter in parameters.items()}
    gradients = torch.autograd.grad(
        loss,
        list(parameters.values()),
        create_graph=create_graph,
        allow_unused=True,
        materialize_grads=True,
    )
    return dict(zip(parameters, gradients, strict=True))


def leaves(tensors: Tensors) -> dict[str, Tensor]:
    """Return the same numbers as tensors to differentiate by."""
    return {name: tensor.detach().requires_grad_() for name, tensor in tensors.items()}


def prefixed(prefix: str, tensors: Tensors) -> dict[str, Tensor]:
    """Return the tensors under longer names."""
    return {f"{prefix} {name}": tensor for name, tensor in tensors.items()}
