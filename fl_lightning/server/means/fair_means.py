"""Means in which clients with a large loss count for more: q-FedAvg and the tilted mean.

    q-FedAvg   Σ_k F_k^q L Δ_k / Σ_k (q F_k^(q-1) |L Δ_k|² + L F_k^q),   L = 1 / η_local
    tilted     Σ_k n_k e^(t F_k) Δ_k / Σ_k n_k e^(t F_k)

Sources: Li et al. 2020, Fair Resource Allocation in Federated Learning, Algorithm 2; Li et al. 2021,
Tilted Empirical Risk Minimization. For t → ∞ the tilted mean follows the client that is
worst off, the aim of `AFL`.
Differs: F_k should be client k's loss at the global model. Here it is the mean of the losses of its
local steps, which it reports anyway; for one full-batch step that is the same, for more steps it is
a little lower. Flower's and the authors' q-FedAvg count clients alike; so does this one by default.
"""

from __future__ import annotations

import math
from typing import Any, final

import torch
from torch import Tensor
from torch.optim import SGD, Optimizer

from fl_lightning.core.errors import ConfigurationError, RoundFailure
from fl_lightning.core.traits import Traits
from fl_lightning.core.update import ClientUpdate
from fl_lightning.server.aggregator import BY_LOSSES, BY_STEPS, WeightedMean
from fl_lightning.sparsity.optimizers.sparse_sgdm import SparseSGDM

_LOSS = "train/loss"
_LARGEST_EXPONENT = 600.0  # e^600 and sums of it are still numbers


@final
class QFedAvg(WeightedMean):
    """q-FedAvg; with q = 0 it is the mean, bit for bit.

    L stands for how curved the clients' losses are, and with plain SGD at a rate that just works that is
    about 1 / η. The steps of others (momentum, Adam) have another length, so that clients must train
    with plain SGD unless q is 0. L stays what it was where a schedule changes η.

    Args:
        q: how much fairness, ≥ 0; the paper tries 0.001 to 10. The longer clients train, the more a
            large one shortens the step.
        local_lr: the clients' learning rate η, > 0; None for that of their optimizer.
        weight_by_examples: count a client's term by its ``num_examples`` besides.

    Raises:
        ConfigurationError: for values out of range, and at the start of the fit for another rate than
            that of the clients' optimizer, or an optimizer other than plain SGD.

    Example:
        >>> aggregator = QFedAvg(q=1.0, local_lr=0.5)
        >>> aggregator.open(torch.empty(1))
        >>> for delta, loss in ((1.0, 3.0), (2.0, 1.0)):
        ...     metrics = {"train/loss": torch.tensor(loss)}
        ...     delta = torch.tensor([delta])
        ...     aggregator.add(ClientUpdate(0, delta, torch.empty(0), 10, 1, metrics))
        >>> aggregator.close()
        tensor([0.3571])
    """

    def __init__(
        self, q: float = 1.0, local_lr: float | None = None, weight_by_examples: bool = False
    ) -> None:
        if not 0 <= q < math.inf:
            raise ConfigurationError(f"QFedAvg: q must be at least 0 and finite, got {q}")
        if local_lr is not None and not 0 < local_lr < math.inf:
            raise ConfigurationError(
                f"QFedAvg: local_lr must be greater than 0 and finite, got {local_lr}: leave it out for "
                "that of the clients' optimizer"
            )
        self.q, self.local_lr, self.weight_by_examples = q, local_lr, weight_by_examples

    @property
    def traits(self) -> Traits:
        """Those of a rule by losses; with q > 0 it divides by the length of a client's step as well."""
        traits = super().traits | BY_LOSSES
        return traits | BY_STEPS if self.q > 0 else traits

    def of_clients(self, optimizer: Optimizer) -> QFedAvg:
        """Return it with the learning rate of the clients' optimizer.

        Raises:
            ConfigurationError: if their steps are not plain, or have another rate.
        """
        if self.q == 0:
            return self
        groups = optimizer.param_groups
        # before any schedule, as it is when a run is resumed
        rates = {float(group.get("initial_lr", group["lr"])) for group in groups}
        is_sgd = type(optimizer) in (SGD, SparseSGDM)
        if not is_sgd or len(rates) > 1 or any(group["momentum"] for group in groups):
            raise ConfigurationError(
                "QFedAvg needs plain SGD on the clients, of which the learning rate tells how long a "
                f"step is, and this is {type(optimizer).__name__}: use torch.optim.SGD with momentum "
                "0 and one rate for all parameter groups"
            )
        [rate] = rates
        if self.local_lr not in (None, rate):
            raise ConfigurationError(
                f"QFedAvg: local_lr is {self.local_lr}, and the clients' optimizer has lr {rate}: "
                "leave local_lr out"
            )
        return QFedAvg(self.q, rate, self.weight_by_examples)

    def open(self, like: Tensor) -> None:
        """Start from zero.

        Raises:
            ConfigurationError: without a learning rate, which a `Federation` knows.
        """
        if self.q and self.local_lr is None:
            raise ConfigurationError("QFedAvg outside a Federation needs local_lr")
        super().open(like)
        self._weight = torch.zeros((), dtype=torch.float64)
        self._curvature = torch.zeros((), dtype=torch.float64)

    def weight(self, update: ClientUpdate) -> float:
        """Return the power of its loss, and take in how curved it says losses are.

        Raises:
            RoundFailure: if the loss is negative or missing.
        """
        loss = reported_loss(update) + 1e-10  # as the authors' code does: 0 has no power below 0
        if loss < 0:
            raise RoundFailure(
                f"q-FedAvg takes powers of losses, and client {update.client_id}'s is {loss:.3g}: "
                "use a loss that is never negative, or TiltedMean"
            )
        count = update.num_examples if self.weight_by_examples else 1
        weight: float = count * loss**self.q
        self._weight += weight
        if self.q and self.local_lr is not None:
            square = float(update.norm.double() ** 2)
            self._curvature += count * self.q * loss ** (self.q - 1) * square / self.local_lr
        return weight

    def sums(self) -> list[Tensor]:
        """Return what adds up over processes."""
        mean = self._mean.sums()
        return [*mean, self._weight.to(mean[1]), self._curvature.to(mean[1])]

    def load_sums(self, sums: list[Tensor]) -> None:
        """Go on with the updates of all processes."""
        self._mean.load_sums(sums[:2])
        self._weight, self._curvature = (value.double().cpu() for value in sums[2:])

    def close(self) -> Tensor:
        """Return the step."""
        shortened = self._weight / (self._weight + self._curvature)
        return self._mean.value() * float(shortened)

    def state_dict(self) -> dict[str, Any]:
        """Return the sums so far."""
        sums = {"weight": self._weight, "curvature": self._curvature}
        return {"mean": self._mean.state_dict(), **sums}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from there."""
        self._mean.load_state_dict(state["mean"])
        self._weight, self._curvature = state["weight"].clone(), state["curvature"].clone()


@final
class TiltedMean(WeightedMean):
    """The mean weighted by the exponential of the loss; with tilt 0 it is the mean, bit for bit.

    Args:
        tilt: t, ≥ 0, in units of one over the loss; large ones follow the worst client.
        weight_by_examples: weigh by ``num_examples`` besides; else only by the loss.

    Raises:
        ConfigurationError: if the tilt is negative.

    Example:
        >>> aggregator = TiltedMean(tilt=1.0)
        >>> aggregator.open(torch.empty(1))
        >>> for delta, loss in ((1.0, math.log(3.0)), (2.0, 0.0)):
        ...     metrics = {"train/loss": torch.tensor(loss)}
        ...     delta = torch.tensor([delta])
        ...     aggregator.add(ClientUpdate(0, delta, torch.empty(0), 10, 1, metrics))
        >>> aggregator.close()
        tensor([1.2500])
    """

    def __init__(self, tilt: float = 1.0, weight_by_examples: bool = True) -> None:
        if not 0 <= tilt < math.inf:
            raise ConfigurationError(f"TiltedMean: tilt must be at least 0, got {tilt}")
        self.tilt, self.weight_by_examples = tilt, weight_by_examples

    @property
    def traits(self) -> Traits:
        """Those of a rule by losses."""
        return super().traits | BY_LOSSES

    def weight(self, update: ClientUpdate) -> float:
        """Return the exponential of its loss, times its examples.

        Raises:
            RoundFailure: if the exponential overflows, or there is no loss.
        """
        exponent = self.tilt * reported_loss(update) if self.tilt else 0.0
        if abs(exponent) > _LARGEST_EXPONENT:
            raise RoundFailure(
                f"TiltedMean: tilt times the loss of client {update.client_id} is {exponent:.3g}, "
                f"at most {_LARGEST_EXPONENT:.0f} can be worked with: lower the tilt"
            )
        count = update.num_examples if self.weight_by_examples else 1
        return count * math.exp(exponent)


def reported_loss(update: ClientUpdate) -> float:
    """Return the mean loss of a client's local steps.

    Raises:
        RoundFailure: if it has reported none.
    """
    if _LOSS not in update.metrics:
        raise RoundFailure(
            f"client {update.client_id} has reported no {_LOSS}, by which its update is weighted: "
            "return the loss from training_step"
        )
    return float(update.metrics[_LOSS])
