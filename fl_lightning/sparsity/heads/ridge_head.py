"""The classifier by ridge regression on one-hot labels, in closed form.

    min over W, b of  Σ_i ‖y_i - x_i Wᵀ - b‖² + λ ‖W‖²
    Wᵀ = (Σ x̃ᵀx̃ + λ I)⁻¹ Σ x̃ᵀỹ,   b = ȳ - x̄ Wᵀ        x̃, ỹ: centred

An owner sends Σ zᵀz and Σ zᵀy of z = (x, 1), once: the result does not depend on how the examples
are divided.

Source: Hoerl and Kennard 1970, Technometrics 12(1), equation 2.3, one regression a class.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor
from torch.nn.functional import one_hot, pad

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
class RidgeHead:
    """Fit the head by ridge regression; a single exchange of sums.

    Its outputs approach the one-hot labels, so as logits they are flat: the probabilities are far
    from 0 and 1 though the ranking is right. ``temperature`` divides weight and bias.

    Args:
        regularisation: λ > 0, as scikit-learn's ``Ridge(alpha=…)``; the bias is free of it.
        temperature: > 0; below 1 the head is surer of itself, 1 leaves the regression as it is.
        labels: takes the labels (B,) out of a batch.
        logits: passes a batch through the module.

    Raises:
        ConfigurationError: if an option is out of range.

    Example:
        >>> x, y = torch.tensor([[0.0], [1.0], [2.0], [3.0]]), torch.tensor([0, 0, 1, 1])
        >>> head = RidgeHead(regularisation=1e-9).fit([(x, y)], 1, 2)
        >>> head.weight.squeeze(1), head.bias
        (tensor([-0.4000,  0.4000], dtype=torch.float64), tensor([ 1.1000, -0.1000], dtype=torch.float64))
    """

    regularisation: float = 1.0
    temperature: float = 1.0
    labels: Labels = batch_labels
    logits: Logits = module_logits

    def __post_init__(self) -> None:
        check_regularisation(self.regularisation)
        if not 0 < self.temperature < float("inf"):
            raise ConfigurationError(
                f"temperature must be above 0 and finite, got {self.temperature}"
            )

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
        size = num_features + 1
        sums = torch.zeros(size, size + num_classes, dtype=torch.float64)
        for owner in owners:
            sums += self.sums(owner, num_features, num_classes)
        reduce(sums)
        weight, bias = _solved(sums, num_features, self.regularisation, has_bias)
        return FittedHead(
            weight / self.temperature,
            bias / self.temperature if has_bias else None,
            rounds=1,
            # of the symmetric matrix one half
            values_up=size * (size + 1) // 2 + size * num_classes,
        )

    def sums(self, owner: Features, num_features: int, num_classes: int) -> Tensor:
        """Return Σ zᵀ(z, y) over an owner's examples; see `OneExchange`."""
        size = num_features + 1
        sums = torch.zeros(size, size + num_classes, dtype=torch.float64)
        for features, labels in double_rows(owner, num_classes):
            z = pad(features, (0, 1), value=1.0)
            y = one_hot(labels, num_classes).to(z)
            sums += (z.T @ torch.cat([z, y], dim=1)).to(sums.device)
        return sums


def _solved(
    sums: Tensor, num_features: int, regularisation: float, has_bias: bool
) -> tuple[Tensor, Tensor]:
    d = num_features
    xx, x, n = sums[:d, :d], sums[d, :d], sums[d, d]
    xy, y = sums[:d, d + 1 :], sums[d, d + 1 :]
    if has_bias:
        xx, xy = xx - torch.outer(x, x) / n, xy - torch.outer(x, y) / n
    ridge = regularisation * torch.eye(d, dtype=sums.dtype)
    weight = torch.linalg.solve(xx + ridge, xy).T
    return weight, (y - weight @ x) / n
