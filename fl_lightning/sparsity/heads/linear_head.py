"""The classifier by logistic regression over all classes: a linear probe.

    min over W, b of  - Σ_i log softmax(x_i Wᵀ + b)[y_i] + λ/2 ‖W‖²

by L-BFGS on the gradient of all examples. In every step of it an owner is sent W and b, and sends
the sum of its examples' losses and gradients: full batches, so the result does not depend on how
the examples are divided.

Source: Liu and Nocedal 1989, Mathematical Programming 45, with the line search of
`torch.optim.LBFGS` (strong Wolfe conditions).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, one_hot, pad

from fl_lightning.core.errors import ConfigurationError
from fl_lightning.sparsity.heads.head_fit import (
    Features,
    FittedHead,
    Reduce,
    check_regularisation,
    double_rows,
)
from fl_lightning.sparsity.sensitivity.logits import Labels, Logits, batch_labels, module_logits


@final
@dataclass(frozen=True, kw_only=True)
class LinearHead:
    """Fit the head by logistic regression over all classes.

    Args:
        regularisation: λ > 0, scikit-learn's ``1 / C`` in ``LogisticRegression``; the bias is free
            of it.
        max_iterations: steps of L-BFGS, ≥ 1, each with one exchange of sums or a few.
        tolerance: stop where no entry of the mean gradient is larger, > 0.
        labels: takes the labels (B,) out of a batch.
        logits: passes a batch through the module.

    Raises:
        ConfigurationError: if an option is out of range.

    Example:
        >>> x, y = torch.tensor([[0.0], [1.0], [2.0], [3.0]]), torch.tensor([0, 0, 1, 1])
        >>> head = LinearHead(regularisation=0.1).fit([(x, y)], 1, 2)
        >>> (x.double() @ head.weight.T + head.bias).argmax(1).tolist()
        [0, 0, 1, 1]
    """

    regularisation: float = 1.0
    max_iterations: int = 200
    tolerance: float = 1e-7
    labels: Labels = batch_labels
    logits: Logits = module_logits

    def __post_init__(self) -> None:
        check_regularisation(self.regularisation)
        if self.max_iterations < 1:
            raise ConfigurationError(f"max_iterations must be ≥ 1, got {self.max_iterations}")
        if not 0 < self.tolerance < float("inf"):
            raise ConfigurationError(f"tolerance must be above 0 and finite, got {self.tolerance}")

    def fit(
        self,
        owners: Sequence[Features],
        num_features: int,
        num_classes: int,
        *,
        has_bias: bool = True,
        reduce: Reduce = lambda _: None,
    ) -> FittedHead:
        """Return the classifier; see `HeadFit`."""
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
            for owner in owners:
                sums += _of_owner(owner, weights, num_features)
            reduce(sums)
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
    """Return the number of examples, and their sums of losses and gradients, as one vector."""
    device = owner[0].device
    here, num_classes = weights.to(device), len(weights)
    sums = torch.zeros(weights.numel() + 2, dtype=torch.float64, device=device)
    for features, labels in double_rows(owner, num_classes):
        z = pad(features, (0, weights.shape[1] - num_features), value=1.0)
        logits = z @ here.T
        residuals = logits.softmax(dim=1) - one_hot(labels, num_classes)
        sums[0] += len(labels)
        sums[1] += cross_entropy(logits, labels, reduction="sum")
        sums[2:] += (residuals.T @ z).flatten()
    return sums.to(weights.device)
