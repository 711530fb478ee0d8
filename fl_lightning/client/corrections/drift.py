"""Corrections of gradients: FedProx, SCAFFOLD, FedDyn.

FedProx: the objective of a client pulls its model towards the global model.

    min_y F_i(y) + μ/2 ‖y - x‖²

Source: Li et al. 2020, "Federated Optimization in Heterogeneous Networks", equation 2.
Differs: cohort and aggregator decide how clients are sampled and averaged; the paper's Algorithm 2
samples client k with probability p_k and averages with equal weights.

SCAFFOLD: control variates remove the difference between a client's gradient and the mean gradient.

    y ← y - η (g_i(y) - c_i + c),     c = 1/N Σ_i c_i
    I:   c_i ← g_i(x)                 II:   c_i ← c_i - c + (x - y) / (K η)

Source: Karimireddy et al. 2020, "SCAFFOLD: Stochastic Controlled Averaging for Federated Learning",
Algorithm 1. The server's c moves by |S|/N times the mean change of the cohort's c_i, so it is the
mean of all clients' c_i, 0 for those who have not yet taken part.
Differs: in II we divide by η ‖a‖₁ (`LocalSolver`), the distance under a gradient of 1, instead of
K η. For plain SGD both are the same; with momentum K η would make c_i up to 1/(1 - ρ) times as
large as a gradient. K counts the steps that the optimizer took.

Gradients are clipped after c - c_i is added. In II the new c_i is then c_i - c plus a mean of clipped
gradients, no mean gradient any more. In I nothing is clipped. A client computes c_i from its own training,
so an update that an attacker forges, or that a robust rule drops, does not change c and c_i.

FedDyn: a dynamic regulariser for each client aligns the client's optimum with the global one.

    client:  y ← argmin F_i(y) - ⟨g_i, y⟩ + α/2 ‖y - x‖²,     g_i ← g_i + α (x - y)
    server:  h ← 1/N Σ_i g_i,     x ← mean_S y - h / α = x - (mean_S Δ + h / α)

Source: Acar et al. 2021, "Federated Learning Based on Dynamic Regularization", Algorithm 1. There
h ← h - α/N Σ_S (y - x), which is the mean of all g_i.
Differs from the official code, which uses α / (a client's share of examples): α is the same for all
clients, as in the paper.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal, final

import torch
from torch import Tensor, nn
from torch.optim import SGD, Optimizer

from fl_lightning.client.corrections.correction import OF_LOSSES, Correction, Outcome
from fl_lightning.client.local_solver import LocalSolver
from fl_lightning.core.errors import ConfigurationError
from fl_lightning.core.traits import Trait, Traits


@final
@dataclass(frozen=True)
class FedProx(Correction):
    """FedProx: pulls each client's model towards the global model; with ``mu`` 0 bit-identical to FedAvg.

    It works with any optimizer: the pull is added to the gradient, before clipping and the step.

    Args:
        mu: strength μ ≥ 0; the paper uses 0.001 to 1.

    Raises:
        ConfigurationError: if ``mu`` is negative or infinite.

    Example:
        >>> FedProx(mu=0.1).pull
        0.1
    """

    mu: float = 0.01

    ranges: ClassVar[dict[str, str]] = {"mu": "at least 0 and finite"}

    @property
    def pull(self) -> float:
        """FedProx's μ, the strength of the pull towards the global model."""
        return self.mu


_OF_RATES = Traits(
    needs={Trait.ONE_RATE: "divides a client's update by its learning rate"},
    instead={Trait.ONE_RATE: "set Scaffold's option to I"},
)


@final
@dataclass(frozen=True)
class Scaffold(Correction):
    """SCAFFOLD: a control variate per client, and their mean on the server.

    The paper weighs clients equally: set the aggregator's ``weight_by_examples: false`` for that.

    Args:
        option: how the control variate of a client is computed after a round. ``"II"``: as the mean
            gradient of the local steps, which costs nothing; it needs SGD (with or without momentum).
            ``"I"``: as the gradient of the client's whole shard at the global model, which costs one more
            pass over the shard and works with any optimizer; a client whose gradient is not finite fails.

    Raises:
        ConfigurationError: if the option is neither I nor II.

    Example:
        >>> Scaffold().shift(torch.tensor([3.0]), torch.tensor([1.0]))
        tensor([-2.])
    """

    option: Literal["I", "II"] = "II"

    needs_mean = True
    reads_mean = True

    @property
    def shows_change(self) -> bool:
        """True with option II, with which the server can compute the control variates' changes from the updates."""
        return self.option == "II"

    @property
    def traits(self) -> Traits:
        """Conditions on a round that the chosen option needs or breaks, to detect conflicting options."""
        if self.option == "II":
            return super().traits | _OF_RATES
        needs = {
            Trait.RETURNED_LOSS: "with option I computes the gradient of the loss over a client's examples"
        }
        ways = {Trait.RETURNED_LOSS: "set its option to II"}
        return super().traits | OF_LOSSES | Traits(needs=needs, instead=ways)

    def check(self, module: nn.Module, optimizer: Optimizer) -> None:
        """Raise ConfigurationError for option II if the clients' optimizer is not SGD."""
        if self.option == "I":
            return
        try:
            LocalSolver(optimizer, pull=self.pull).travels(1)
        except ConfigurationError as error:
            raise ConfigurationError(
                f"federation.correction Scaffold with option II: {error}, or set option to I"
            ) from None

    def shift(self, memory: Tensor | None, mean: Tensor | None) -> Tensor | None:
        """Return c - c_i: the mean control variate minus the client's."""
        if memory is None or mean is None:
            return mean if memory is None else -memory
        return mean - memory

    def remember(self, memory: Tensor | None, mean: Tensor | None, outcome: Outcome) -> Tensor:
        """Return the client's new control variate c_i; entries with learning rate 0 keep the old value."""
        if self.option == "I":
            return outcome.gradient()
        before = torch.zeros_like(outcome.delta) if memory is None else memory
        travel = torch.as_tensor(outcome.travel(), dtype=before.dtype, device=before.device)
        renewed = torch.empty_like(before)
        common = before.new_zeros(1) if mean is None else mean
        values = (renewed, outcome.delta, travel, before, common)
        # piece by piece, so that the intermediate results stay in the processor's cache
        size = 2**15 if before.is_cpu else max(1, len(before))
        pieces = (value.expand_as(before).split(size) for value in values)
        for new, moved, how_far, old, shared in zip(*pieces, strict=True):
            torch.div(moved, how_far, out=new).add_(old).sub_(shared)
        has_moved = before.is_cpu and bool(travel.all())
        return renewed if has_moved else torch.where(travel == 0, before, renewed)


@final
@dataclass(frozen=True)
class FedDyn(Correction):
    """FedDyn: a dynamic regulariser with one vector per client, and their mean on the server.

    The paper weighs clients equally: set the aggregator's ``weight_by_examples: false`` for that, and
    keep the default server optimizer, with which x is the mean of y minus h / α. Server optimizers other
    than SGD are refused.

    Args:
        alpha: strength α > 0; the paper uses 0.01 and 0.1.

    Raises:
        ConfigurationError: if ``alpha`` is not positive and finite.

    Example:
        >>> import torch
        >>> FedDyn(alpha=0.1).shift(torch.tensor([3.0]), None)
        tensor([-3.])
    """

    alpha: float = 0.01

    ranges: ClassVar[dict[str, str]] = {"alpha": "above 0 and finite: the server divides by it"}
    needs_mean = True

    @property
    def pull(self) -> float:
        """FedDyn's α, the strength of the pull towards the global model."""
        return self.alpha

    def check_server(self, optimizer: Optimizer) -> None:
        """Raise ConfigurationError if the server optimizer is not SGD."""
        if not isinstance(optimizer, SGD):
            raise ConfigurationError(
                "federation.correction FedDyn: the server must step by the mean update plus h / alpha, which "
                f"{type(optimizer).__name__} would rescale: leave server_optimizer out, or use torch.optim.SGD"
            )

    def shift(self, memory: Tensor | None, mean: Tensor | None) -> Tensor | None:
        """Return -g_i, the client's negative memory; None for a client without one."""
        return None if memory is None else -memory

    def remember(self, memory: Tensor | None, mean: Tensor | None, outcome: Outcome) -> Tensor:
        """Return the client's new memory g_i + α (x - y), with x the global and y the client's model."""
        moved = outcome.delta * self.alpha
        return moved if memory is None else moved.add_(memory)

    def pseudo_gradient(self, aggregate: Tensor, mean: Tensor | None) -> Tensor:
        """Return the pseudo-gradient: the aggregate plus h / α, with h the mean of all clients' memories."""
        return aggregate if mean is None else aggregate + mean / self.alpha
