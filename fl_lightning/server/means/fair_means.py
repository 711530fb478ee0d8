"""Fair means, in which clients with a large loss count more: q-FedAvg, the tilted mean, AFL.

    q-FedAvg   Σ_k F_k^q L Δ_k / Σ_k (q F_k^(q-1) |L Δ_k|² + L F_k^q),   L = 1 / η_local
    tilted     Σ_k n_k e^(t F_k) Δ_k / Σ_k n_k e^(t F_k)

Sources: Li et al. 2020, Fair Resource Allocation in Federated Learning, Algorithm 2; Li et al. 2021,
Tilted Empirical Risk Minimization. For t → ∞ the tilted mean follows the client with the largest
loss, the aim of `AFL`.
Differs: F_k should be client k's loss at the global model. Here it is the mean of the losses of its
local steps, which it reports anyway; for one full-batch step that is the same, for more steps it is
a little lower. Flower's and the authors' q-FedAvg weigh clients equally; so does this one by default.

AFL: the mean for the worst mixture of clients, which the server learns during training.

    min over x of max over λ of Σ_k λ_k F_k(x),    λ_k ≥ 0,  Σ_k λ_k = 1
    aggregate = Σ_S λ_k Δ_k / Σ_S λ_k;    then λ ← Π(λ + γ F(x)), Π onto the simplex

Source: Mohri, Sivek, Suresh 2019, Agnostic Federated Learning, Algorithm Stochastic-AFL; projection:
Duchi et al. 2008, Efficient Projections onto the l1-Ball. Differs: clients take any number of local
steps between two steps of λ; F_k is the mean loss of these steps, as in `QFedAvg`; λ of clients outside
the round changes only through the projection.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from typing import final

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.optim import SGD, Optimizer
from typing_extensions import override

from fl_lightning.core.errors import ClientFailure, ConfigurationError, check_range
from fl_lightning.core.traits import Trait, Traits
from fl_lightning.core.update import ClientUpdate
from fl_lightning.server.aggregator import BY_STEPS, AllReduce, Gather, WeightedMean
from fl_lightning.sparsity.optimizers.sparse_optimizers import SparseSGDM

_LOSS = "train/loss"
_LARGEST_EXPONENT = 600.0  # e^600 and sums of it are still numbers


_BY_LOSSES = Traits(
    breaks={Trait.PRIVATE_EXAMPLES: "weighs clients by their training losses, which have no noise"},
    instead={Trait.PRIVATE_EXAMPLES: "use Mean, or another rule that looks at updates alone"},
)


class ByLosses(WeightedMean):
    """Base of fair aggregators: means weighted by the losses that clients report."""

    @property
    @override
    def traits(self) -> Traits:
        return super().traits | _BY_LOSSES

    @override
    def check(self, update: ClientUpdate, num_updates: int) -> None:
        super().check(update, num_updates)
        self.check_loss(update)

    @abstractmethod
    def check_loss(self, update: ClientUpdate) -> None:
        """Raise ClientFailure if the client's loss cannot be used as a weight."""

    @override
    def sums(self) -> list[Tensor]:
        mean, weight = self._mean.value(), self._mean.sums()[-1]
        return [mean.to(weight) * weight, weight]  # weights may exceed the largest float32


@final
class QFedAvg(ByLosses):
    """q-FedAvg: weights clients by a power q of their losses; with q = 0 bit-identical to the plain mean.

    L estimates the curvature of the clients' losses; with plain SGD at a suitable rate it is about
    1 / η. Other optimizers (momentum, Adam) take steps of another length, so clients must train with
    plain SGD unless q is 0. A schedule that changes η does not change L.

    Args:
        q: fairness, ≥ 0; the paper tries 0.001 to 10. The longer clients train, the more a large q
            shortens the server's step.
        local_lr: the clients' learning rate η, > 0; None for that of their optimizer.
        weight_by_examples: multiply a client's weight by its ``num_examples``.

    Raises:
        ConfigurationError: for values out of range; at the start of the fit if the clients' optimizer
            has another rate or is not plain SGD.

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
        check_range("QFedAvg: q", q, "at least 0 and finite")
        check_range(
            "QFedAvg: local_lr",
            local_lr,
            "greater than 0 and finite",
            ": leave it out for that of the clients' optimizer",
        )
        self.q, self.local_lr, self.weight_by_examples = q, local_lr, weight_by_examples

    @property
    def traits(self) -> Traits:
        """Conditions on a round that q-FedAvg needs or breaks, to detect conflicting options."""
        return super().traits | BY_STEPS if self.q > 0 else super().traits

    def of_clients(self, optimizer: Optimizer) -> QFedAvg:
        """Return a copy that knows the learning rate of the clients' optimizer; itself if q is 0.

        Raises:
            ConfigurationError: if the optimizer is not plain SGD, or has another rate than ``local_lr``.
        """
        if self.q == 0:
            return self
        groups = optimizer.param_groups
        # before any schedule, so that a resumed run gets the same
        rates = {float(group.get("initial_lr", group["lr"])) for group in groups}
        is_sgd = type(optimizer) in (SGD, SparseSGDM)
        if not is_sgd or len(rates) > 1 or any(group["momentum"] for group in groups):
            raise ConfigurationError(
                "QFedAvg needs plain SGD on the clients, whose learning rate gives the length of a "
                f"step, got {type(optimizer).__name__}: use torch.optim.SGD with momentum "
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
        """Start a round of deltas with the shape (k,), dtype and device of ``like``.

        Raises:
            ConfigurationError: if there is no learning rate; a `Federation` sets it, see `of_clients`.
        """
        if self.q and self.local_lr is None:
            raise ConfigurationError("QFedAvg outside a Federation needs local_lr")
        super().open(like)
        self._weight = torch.zeros((), dtype=torch.float64)
        self._curvature = torch.zeros((), dtype=torch.float64)

    @override
    def check_loss(self, update: ClientUpdate) -> None:
        self._loss(update)

    def _loss(self, update: ClientUpdate) -> float:
        """Return F_k, the loss that the client reported; 1 if q is 0.

        Raises:
            ClientFailure: if the loss is negative, missing or not finite, or F_k^q overflows.
        """
        if not self.q:
            return 1.0
        loss = reported_loss(update) + 1e-10  # as the authors' code does: 0 has no power below 0
        if loss < 0:
            raise ClientFailure(
                update.client_id,
                f"q-FedAvg takes powers of losses, and its loss is {loss:.3g}: use a loss that is never "
                "negative, or TiltedMean",
            )
        if self.q * math.log(loss) > _LARGEST_EXPONENT:
            raise ClientFailure(
                update.client_id,
                f"its loss is {loss:.3g}, and q-FedAvg cannot compute its power {self.q}, which is too large: "
                "lower q",
            )
        return loss

    def weight(self, update: ClientUpdate) -> float:
        """Return the client's weight F_k^q, with its loss F_k, and add its term to the step's denominator.

        Raises:
            ClientFailure: as `check_loss`.
        """
        loss = self._loss(update)
        count = update.num_examples if self.weight_by_examples else 1
        weight: float = count * loss**self.q
        self._weight += weight
        if self.q and self.local_lr is not None:
            square = float(update.norm.double() ** 2)
            self._curvature += count * self.q * loss ** (self.q - 1) * square / self.local_lr
        return weight

    @override
    def sums(self) -> list[Tensor]:
        mean = super().sums()
        return [*mean, self._weight.to(mean[1]), self._curvature.to(mean[1])]

    @override
    def load_sums(self, sums: list[Tensor]) -> None:
        super().load_sums(sums[:2])
        self._weight, self._curvature = (value.double().cpu() for value in sums[2:])

    @override
    def close(self) -> Tensor:
        shortened = self._weight / (self._weight + self._curvature)
        return self._mean.value() * float(shortened)


@final
class TiltedMean(ByLosses):
    """Tilted mean: weights clients by e^(tilt · loss); with tilt 0 bit-identical to the plain mean.

    Args:
        tilt: t ≥ 0, in units of 1 / loss; a large tilt follows the client with the largest loss.
        weight_by_examples: multiply a client's weight by its ``num_examples``.

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
        check_range("TiltedMean: tilt", tilt, "at least 0 and finite")
        self.tilt, self.weight_by_examples = tilt, weight_by_examples

    @override
    def check_loss(self, update: ClientUpdate) -> None:
        self.weight(update)

    def weight(self, update: ClientUpdate) -> float:
        """Return the client's weight e^(t F_k), with its loss F_k, times its number of examples if wanted.

        Raises:
            ClientFailure: if the exponential overflows, or the loss is missing or not finite.
        """
        exponent = self.tilt * reported_loss(update) if self.tilt else 0.0
        if abs(exponent) > _LARGEST_EXPONENT:
            raise ClientFailure(
                update.client_id,
                f"TiltedMean takes e to the power of tilt times loss, which is {exponent:.3g} and may be at most "
                f"{_LARGEST_EXPONENT:.0f}: lower the tilt",
            )
        count = update.num_examples if self.weight_by_examples else 1
        return count * math.exp(exponent)


def reported_loss(update: ClientUpdate) -> float:
    """Return a client's mean training loss, or the ``train/loss`` that its module logs.

    Raises:
        ClientFailure: if the client reported no finite loss.
    """
    if _LOSS not in update.metrics:
        raise ClientFailure(
            update.client_id,
            f"it reported no {_LOSS}, by which its update is weighted: return the loss from training_step",
        )
    loss = float(update.metrics[_LOSS])
    if not math.isfinite(loss):
        raise ClientFailure(
            update.client_id,
            f"it has logged a {_LOSS} of {loss}, by which the aggregator weights its update: log finite "
            "numbers, or use another name",
        )
    return loss


_CLIENTS, _SHARES = "clients", "shares"


@final
class AFL(ByLosses):
    """Agnostic FL (AFL): learns weights of clients that favour high losses; step 0 gives the unweighted mean.

    Clients start with equal weights; a client that joins later starts with the mean of the weights.

    Args:
        step: step size γ ≥ 0 of λ, in units of 1 / loss.

    Raises:
        ConfigurationError: if the step is negative.

    Attributes:
        memory: λ times the number of clients, shape (N, 1), and the client ids.

    Example:
        >>> aggregator = AFL(step=0.25)
        >>> def aggregate():
        ...     aggregator.open(torch.empty(1))
        ...     for client, (delta, loss) in enumerate(((1.0, 3.0), (2.0, 1.0))):
        ...         metrics = {"train/loss": torch.tensor(loss)}
        ...         delta = torch.tensor([delta])
        ...         aggregator.add(ClientUpdate(client, delta, torch.empty(0), 10, 1, metrics))
        ...     return aggregator.close()
        >>> aggregate(), aggregator.weights
        (tensor([1.5000]), {0: 0.75, 1: 0.25})
        >>> aggregate()
        tensor([1.2500])
    """

    exchanges = True

    def __init__(self, step: float = 0.1) -> None:
        check_range("AFL: step", step, "at least 0 and finite")
        self.step = step

    @property
    def weights(self) -> dict[int, float]:
        """Weight λ in AFL's mean of every client that has taken part, by client id."""
        shares = self._shares()
        return {client: share / len(shares) for client, share in shares.items()}

    def _shares(self) -> dict[int, float]:
        if not self.memory:
            return {}
        clients, shares = (self.memory[name].flatten().tolist() for name in (_CLIENTS, _SHARES))
        return dict(zip(clients, shares, strict=True))

    @override
    def open(self, like: Tensor) -> None:
        super().open(like)
        self._losses: dict[int, float] = {}
        self._before = self._shares()

    @override
    def check_loss(self, update: ClientUpdate) -> None:
        self._loss(update)

    def _loss(self, update: ClientUpdate) -> float:
        return reported_loss(update) if self.step else 0.0

    def weight(self, update: ClientUpdate) -> float:
        """Return the client's weight λ in the mean, and store its loss for the update of λ.

        Raises:
            ClientFailure: if the client reported no finite loss.
        """
        self._losses[update.client_id] = self._loss(update)
        return self._before.get(update.client_id, 1.0)

    def exchange(self, gather: Gather, all_reduce: AllReduce) -> None:
        """Collect the losses of all processes' clients, on which λ depends; `sums` adds up the mean."""
        self._losses = {
            client: loss for part in gather(self._losses) for client, loss in part.items()
        }

    def close(self) -> Tensor:
        """Return the weighted mean, and update the weights λ by a projected gradient step."""
        clients = sorted(self._before.keys() | self._losses.keys())
        shares = np.array([self._before.get(client, 1.0) for client in clients])
        if self.step:
            losses = np.array([self._losses.get(client, 0.0) for client in clients])
            shares = on_simplex(shares + self.step * len(clients) * losses, len(clients))
        self.memory = {
            _CLIENTS: torch.tensor(clients)[:, None],  # columns, as they have no coordinates
            _SHARES: torch.from_numpy(shares)[:, None],
        }
        return self._mean.value()


def on_simplex(vector: npt.NDArray[np.float64], total: float = 1.0) -> npt.NDArray[np.float64]:
    """Project a vector onto the simplex: entries ≥ 0 that add up to ``total``.

        max(v - θ, 0),    θ = (Σ of the ρ largest - total) / ρ,  ρ the largest for which all stay > 0

    Example:
        >>> on_simplex(np.array([0.9, 0.5, -3.0])).round(3).tolist()
        [0.7, 0.3, 0.0]
    """
    vector = vector - vector.max()  # the same projection, also of large numbers
    falling = np.sort(vector)[::-1]
    counts = np.arange(1, len(vector) + 1)
    thresholds = (falling.cumsum() - total) / counts
    last = np.flatnonzero(falling > thresholds)[-1]
    nearest: npt.NDArray[np.float64] = np.maximum(vector - thresholds[last], 0)
    return nearest
