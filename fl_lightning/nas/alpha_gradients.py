"""How architecture parameters learn in a step: by the gradient of a loss, or by a reward.

    Gradient    ∇_α L_search(w or w', α)                     DARTS, GDAS, PC-DARTS, ProxylessNAS, FBNet
    Reward      -(R - b) ∇ log π(a),  a ~ π = softmax(α)     ENAS, with a table of logits

Source: Liu et al. 2019, DARTS, eq. 6 to 8; Pham et al. 2018, ENAS, section 2.2. The rules themselves are
in `fl_lightning.nas.relax` and `fl_lightning.nas.search`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from fl_lightning.core.errors import ConfigurationError
from fl_lightning.nas.relax.bilevel import (
    Loss,
    Order,
    WeightStep,
    architecture_gradient,
    gradients_of,
)
from fl_lightning.nas.relax.relaxation import drawn_operations
from fl_lightning.nas.search.reinforce import Reinforce, Sampled


@dataclass(frozen=True)
class Situation:
    """What a step of α is about.

    Attributes:
        train: loss on the batch of the weights' half.
        search: loss on the batch of the other half, with the penalty of costs.
        accuracy: of one operation a row on the batch of the other half, in [0, 1].
        weights: w by name.
        alphas: architecture parameters by name.
        weight_step: the step that weights are about to take; None where their optimizer is not SGD.
        velocities: momentum buffers of the weights.
        baseline: of rewards, a buffer of shape (1,) that may be written to; 0 before the first one.
        generator: makes the one of this step's draws, always the same.
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
    """A way to learn α.

    Attributes:
        needs_weight_step: whether it looks a step of the weights ahead.
        has_baseline: whether it has a baseline of rewards.
    """

    needs_weight_step: bool = False
    has_baseline: bool = False

    @abstractmethod
    def __call__(self, now: Situation) -> dict[str, Tensor]:
        """Return what the optimizer of α is to descend, by name."""


@final
class Gradient(AlphaGradient):
    """By the gradient of the loss on the other half.

    Args:
        order: ``first``: at the weights as they are; ``finite``: a step of the weights ahead, by
            finite differences; ``exact``: the same by differentiating twice.

    Raises:
        ConfigurationError: if there is no such order.
    """

    def __init__(self, order: Order = "first") -> None:
        if order not in ("first", "finite", "exact"):
            raise ConfigurationError(f"order must be first, finite or exact, got {order!r}")
        self._order: Order = order
        self.needs_weight_step = order != "first"

    def __call__(self, now: Situation) -> dict[str, Tensor]:
        """Return the gradient."""
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
    """By the accuracy of an architecture that is drawn, whatever it costs.

    Args:
        decay: of the moving average of rewards, in [0, 1).
        entropy_weight: of the entropy in the reward, at least 0.

    Raises:
        ConfigurationError: if one is out of its range.
    """

    has_baseline = True

    def __init__(self, decay: float = 0.95, entropy_weight: float = 1e-4) -> None:
        Reinforce(decay, entropy_weight)  # refuses what is out of range
        self._decay, self._entropy_weight = decay, entropy_weight

    def __call__(self, now: Situation) -> dict[str, Tensor]:
        """Return the gradient of REINFORCE; the baseline moves."""
        alphas = {name: tensor.detach().requires_grad_() for name, tensor in now.alphas.items()}
        logs = alphas["alpha"].log_softmax(1)
        drawn = drawn_operations(alphas["alpha"], 1, now.generator())
        sampled = Sampled(
            tuple(drawn[:, 0].tolist()),
            logs.gather(1, drawn.to(logs.device)).sum(),
            -(logs.exp() * logs).sum(),
        )
        rule = Reinforce(self._decay, self._entropy_weight)
        rule.baseline = float(now.baseline) or None
        loss = rule.loss(sampled, float(now.accuracy(sampled.choices)))
        now.baseline.fill_(rule.baseline or 0.0)
        return gradients_of(loss, alphas)
