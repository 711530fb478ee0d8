"""FedDyn: a regulariser that follows each client makes its optimum the one of all.

    client:  y ← argmin F_i(y) - ⟨g_i, y⟩ + α/2 ‖y - x‖²,     g_i ← g_i + α (x - y)
    server:  h ← 1/N Σ_i g_i,     x ← mean_S y - h / α = x - (mean_S Δ + h / α)

Source: Acar et al. 2021, "Federated Learning Based on Dynamic Regularization", Algorithm 1. There
h ← h - α/N Σ_S (y - x), which is the mean of all g_i.
Differs: the official code takes α / (a client's share of examples) as its α, we take α for all, as
the paper does.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

from torch import Tensor
from torch.optim import SGD, Optimizer

from fl_lightning.client.corrections.correction import Correction, GradientTerm, Outcome
from fl_lightning.core.errors import ConfigurationError


@final
@dataclass(frozen=True)
class FedDyn(Correction):
    """A dynamic regulariser, one vector per client and their mean on the server.

    The paper averages clients alike: set the aggregator's ``weight_by_examples: false`` for that,
    and leave the server optimizer at its default, with which x is the mean of y less h / α; others than
    SGD are refused.

    Args:
        alpha: strength α > 0; the paper's are 0.01 and 0.1.

    Raises:
        ConfigurationError: if it is not positive.

    Example:
        >>> import torch
        >>> FedDyn(alpha=0.1).term(torch.tensor([3.0]), None)
        GradientTerm(pull=0.1, shift=tensor([-3.]))
    """

    alpha: float = 0.01

    needs_mean = True

    def __post_init__(self) -> None:
        if not 0 < self.alpha < float("inf"):
            raise ConfigurationError(
                f"FedDyn: alpha must be above 0 and finite, got {self.alpha}: the server divides by it"
            )

    @property
    def pull(self) -> float:
        """α."""
        return self.alpha

    def check_server(self, optimizer: Optimizer) -> None:
        """Refuse what is not SGD."""
        if not isinstance(optimizer, SGD):
            raise ConfigurationError(
                "federation.correction FedDyn has the server move by the mean update and h / alpha, in the "
                f"units of the weights, which {type(optimizer).__name__} would rescale: leave "
                "server_optimizer out, or use torch.optim.SGD"
            )

    def term(self, memory: Tensor | None, mean: Tensor | None) -> GradientTerm:
        """Return α (y - x) - g_i."""
        return GradientTerm(self.alpha, None if memory is None else -memory)

    def remember(self, memory: Tensor | None, mean: Tensor | None, outcome: Outcome) -> Tensor:
        """Return g_i + α (x - y)."""
        moved = outcome.delta * self.alpha
        return moved if memory is None else moved.add_(memory)

    def pseudo_gradient(self, aggregate: Tensor, mean: Tensor | None) -> Tensor:
        """Return the aggregate and h / α."""
        return aggregate if mean is None else aggregate + mean / self.alpha
