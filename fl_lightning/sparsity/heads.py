"""Linear classifiers (heads) fitted on frozen features, before calibration.

    logits = x Wᵀ + b  for features x

A fit needs only sums over examples. Clients send their sums, and the server adds them, so that the head is that
of the pooled examples.

`LinearHead` is logistic regression over all classes, a linear probe:

    min over W, b of  - Σ_i log softmax(x_i Wᵀ + b)[y_i] + λ/2 ‖W‖²

by L-BFGS on the gradient of all examples. In every step an owner of examples (a client) receives W and b, and
sends the sums of its examples' losses and gradients: the result does not depend on who owns which
examples. Source: Liu and Nocedal 1989, Mathematical Programming 45, with the line search of
`torch.optim.LBFGS` (strong Wolfe conditions).

`RidgeHead` is ridge regression on one-hot labels, in closed form:

    min over W, b of  Σ_i ‖y_i - x_i Wᵀ - b‖² + λ ‖W‖²
    Wᵀ = (Σ x̃ᵀx̃ + λ I)⁻¹ Σ x̃ᵀỹ,   b = ȳ - x̄ Wᵀ        x̃, ỹ: centred

An owner sends Σ zᵀz and Σ zᵀy of z = (x, 1), once. Source: Hoerl and Kennard 1970, Technometrics
12(1), equation 2.3, one regression per class.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, one_hot, pad
from typing_extensions import override

from fl_lightning.core.errors import ConfigurationError, check_range
from fl_lightning.sparsity.sensitivity.protocol import Labels, Logits, batch_labels, module_logits

# examples of one owner: features (n, D) and labels (n,), integers below the number of classes
Features = tuple[Tensor, Tensor]
# replaces a tensor by its sum over processes
Reduce = Callable[[Tensor], None]
# adds the sums of all owners to a tensor; the function computes those of one owner
Exchange = Callable[[Tensor, Callable[[Features], Tensor]], None]

_ROWS = 8192  # examples converted to double precision at a time


@dataclass(frozen=True)
class FittedHead:
    """A fitted linear classifier: its weights, and how much clients sent to fit it.

    Attributes:
        weight: float64 of shape (classes, D).
        bias: float64 of shape (classes,); None for a head without bias.
        rounds: number of times that owners sent sums.
        values_up: number of values that an owner sent each time.
    """

    weight: Tensor
    bias: Tensor | None
    rounds: int
    values_up: int

    @torch.no_grad()
    def write_to(self, head: nn.Linear) -> None:
        """Copy the fitted weights and biases into a linear layer, in place."""
        head.weight.copy_(self.weight)
        if self.bias is not None:
            head.bias.copy_(self.bias)


@dataclass(frozen=True, kw_only=True)
class HeadFit(ABC):
    """Base class of ways to fit a linear classifier on features that stay with their owners (clients).

    Args:
        regularisation: λ, above 0; not applied to the bias.
        labels: returns the labels (B,) of a batch.
        logits: runs the module, including the head, on a batch.
    """

    regularisation: float = 1.0
    labels: Labels = batch_labels
    logits: Logits = module_logits

    def __post_init__(self) -> None:
        advice = ": without it the head of separable or collinear features has no unique solution"
        check_range("regularisation", self.regularisation, "above 0 and finite", advice)

    def fit(
        self,
        owners: Sequence[Features],
        num_features: int,
        num_classes: int,
        *,
        has_bias: bool = True,
        reduce: Reduce = lambda _: None,
    ) -> FittedHead:
        """Return the linear classifier fitted on all owners' examples.

        Args:
            owners: examples of each client, or one entry for pooled examples; with several processes those
                of the clients of this process, which may have none.
            num_features: D.
            num_classes: number of classes of the head.
            has_bias: whether the head has a bias.
            reduce: replaces a tensor by its sum over processes.
        """

        def exchange(sums: Tensor, of_owner: Callable[[Features], Tensor]) -> None:
            for owner in owners:
                sums += of_owner(owner)
            reduce(sums)

        return self._fitted(exchange, num_features, num_classes, has_bias)

    @abstractmethod
    def _fitted(
        self, exchange: Exchange, num_features: int, num_classes: int, has_bias: bool
    ) -> FittedHead:
        """Return the classifier, fitted from sums over owners, which ``exchange`` collects."""


class OneExchange(HeadFit):
    """Base class of fits that need one sum per client, sent once, so that clients may also be remote."""

    @abstractmethod
    def sums(self, owner: Features, num_features: int, num_classes: int) -> Tensor:
        """Return the sums over one owner's examples, in float64; `fit` adds them over all owners."""


def head_features(module: nn.Module, head: nn.Linear, batch: Any, logits: Logits) -> Tensor:
    """Return the features that enter the head (the last layer) for a batch, shape (B, D), without gradients.

    Raises:
        ConfigurationError: unless the head is called once, with one vector per example.

    Example:
        >>> network = nn.Sequential(nn.ReLU(), nn.Linear(2, 3))
        >>> batch = torch.tensor([[1.0, -1.0]])
        >>> head_features(network, network[1], batch, lambda module, batch: module(batch))
        tensor([[1., 0.]])
    """
    inputs: list[Tensor] = []
    with (
        torch.no_grad(),
        head.register_forward_pre_hook(lambda _, arguments: inputs.append(arguments[0])),
    ):
        logits(module, batch)
    if len(inputs) != 1 or inputs[0].ndim != 2:
        raise ConfigurationError(
            "a head can be fitted if it is called once, on one vector of features per example, and this one is "
            f"called on tensors of shapes {[tuple(x.shape) for x in inputs]}: set head to train or freeze"
        )
    return inputs[0].detach()


def check_labels(labels: Tensor, num_classes: int) -> None:
    """Raise ConfigurationError if labels are not in 0 … ``num_classes`` - 1."""
    if len(labels) and (int(labels.min()) < 0 or int(labels.max()) >= num_classes):
        raise ConfigurationError(
            f"labels are {int(labels.min())} to {int(labels.max())}, but the head has {num_classes} classes: set "
            f"model.num_classes to {int(labels.max()) + 1} or more, and number the labels from 0"
        )


def _double_rows(
    owner: Features, num_classes: int, *, has_ones: bool = True
) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Yield an owner's examples in parts, in float64: features (plus a 1 for the bias), labels, one-hot labels."""
    features, labels = owner
    check_labels(labels, num_classes)
    for start in range(0, len(labels), _ROWS):
        part = slice(start, start + _ROWS)
        z = pad(features[part].double(), (0, int(has_ones)), value=1.0)
        own = labels[part].long()
        yield z, own, one_hot(own, num_classes).to(z)


@final
@dataclass(frozen=True, kw_only=True)
class LinearHead(HeadFit):
    """Fits the head by logistic regression over all classes (a linear probe).

    Args:
        regularisation: λ, above 0: scikit-learn's ``1 / C`` in ``LogisticRegression``; not applied to the
            bias.
        max_iterations: largest number of steps of L-BFGS, each with one or a few exchanges of sums.
        tolerance: largest entry of the mean gradient at which the fit stops, above 0.
        labels: returns the labels (B,) of a batch.
        logits: runs the module, including the head, on a batch.

    Example:
        >>> x, y = torch.tensor([[0.0], [1.0], [2.0], [3.0]]), torch.tensor([0, 0, 1, 1])
        >>> head = LinearHead(regularisation=0.1).fit([(x, y)], 1, 2)
        >>> (x.double() @ head.weight.T + head.bias).argmax(1).tolist()
        [0, 0, 1, 1]
    """

    max_iterations: int = 200
    tolerance: float = 1e-7

    def __post_init__(self) -> None:
        super().__post_init__()
        check_range("max_iterations", self.max_iterations, "at least 1")
        check_range("tolerance", self.tolerance, "above 0 and finite")

    @override
    def _fitted(
        self, exchange: Exchange, num_features: int, num_classes: int, has_bias: bool
    ) -> FittedHead:
        columns = num_features + int(has_bias)
        weights = torch.zeros(num_classes, columns, dtype=torch.float64)
        optimizer = torch.optim.LBFGS(
            [weights],
            max_iter=self.max_iterations,
            max_eval=4 * self.max_iterations,
            tolerance_grad=self.tolerance,
            tolerance_change=0.0,
            history_size=20,
            line_search_fn="strong_wolfe",
        )
        rounds = 0

        def closure() -> Tensor:
            nonlocal rounds
            rounds += 1
            sums = torch.zeros(weights.numel() + 2, dtype=torch.float64)
            exchange(sums, lambda owner: _of_owner(owner, weights, num_features))
            penalised = weights.clone()
            penalised[:, num_features:] = 0
            gradient = sums[2:].view_as(weights) + self.regularisation * penalised
            loss = sums[1] + self.regularisation / 2 * penalised.square().sum()
            weights.grad = gradient / sums[0]
            return loss / sums[0]

        optimizer.step(closure)
        bias = weights[:, num_features] if has_bias else None
        return FittedHead(weights[:, :num_features], bias, rounds, weights.numel() + 2)


def _of_owner(owner: Features, weights: Tensor, num_features: int) -> Tensor:
    """Return one vector over an owner's examples: their number, the sum of losses, the sum of gradients."""
    device = owner[0].device
    here, num_classes = weights.to(device), len(weights)
    sums = torch.zeros(weights.numel() + 2, dtype=torch.float64, device=device)
    has_ones = weights.shape[1] > num_features
    for z, labels, y in _double_rows(owner, num_classes, has_ones=has_ones):
        logits = z @ here.T
        residuals = logits.softmax(dim=1) - y
        sums[0] += len(labels)
        sums[1] += cross_entropy(logits, labels, reduction="sum")
        sums[2:] += (residuals.T @ z).flatten()
    return sums.to(weights.device)


@final
@dataclass(frozen=True, kw_only=True)
class RidgeHead(OneExchange):
    """Fits the head by ridge regression on one-hot labels; every client sends its sums just once.

    The outputs approximate one-hot labels. As logits these are small, so that all probabilities are similar
    although their order is right; a ``temperature`` below 1 sharpens them.

    Args:
        regularisation: λ, above 0: scikit-learn's ``Ridge(alpha=…)``; not applied to the bias.
        temperature: number above 0 by which weight and bias are divided; 1 is the plain regression.
        labels: returns the labels (B,) of a batch.
        logits: runs the module, including the head, on a batch.

    Example:
        >>> x, y = torch.tensor([[0.0], [1.0], [2.0], [3.0]]), torch.tensor([0, 0, 1, 1])
        >>> head = RidgeHead(regularisation=1e-9).fit([(x, y)], 1, 2)
        >>> head.weight.squeeze(1), head.bias
        (tensor([-0.4000,  0.4000], dtype=torch.float64), tensor([ 1.1000, -0.1000], dtype=torch.float64))
    """

    temperature: float = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        check_range("temperature", self.temperature, "above 0 and finite")

    @override
    def _fitted(
        self, exchange: Exchange, num_features: int, num_classes: int, has_bias: bool
    ) -> FittedHead:
        size = num_features + 1
        sums = torch.zeros(size, size + num_classes, dtype=torch.float64)
        exchange(sums, lambda owner: self.sums(owner, num_features, num_classes))
        d = num_features
        xx, x, n = sums[:d, :d], sums[d, :d], sums[d, d]
        xy, y = sums[:d, d + 1 :], sums[d, d + 1 :]
        if has_bias:
            xx, xy = xx - torch.outer(x, x) / n, xy - torch.outer(x, y) / n
        ridge = self.regularisation * torch.eye(d, dtype=sums.dtype)
        weight = torch.linalg.solve(xx + ridge, xy).T
        bias = (y - weight @ x) / n / self.temperature if has_bias else None
        # one half of the symmetric matrix
        num_values = size * (size + 1) // 2 + size * num_classes
        return FittedHead(weight / self.temperature, bias, rounds=1, values_up=num_values)

    @override
    def sums(self, owner: Features, num_features: int, num_classes: int) -> Tensor:
        size = num_features + 1
        sums = torch.zeros(size, size + num_classes, dtype=torch.float64)
        for z, _, y in _double_rows(owner, num_classes):
            sums += (z.T @ torch.cat([z, y], dim=1)).to(sums.device)
        return sums
