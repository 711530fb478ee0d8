"""The squared gradient of a batch's mean: what many call Fisher. For comparison only.

    1/N Σ_batches B (∂ 1/B Σ_i log p(y_i | x_i) / ∂θ_j)²

Gradients of different examples cancel before they are squared, so it vanishes where a model has
converged, depends on the batch size, and ranks entries unlike any Fisher information.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, final

import torch
from torch import Tensor, nn

from fl_lightning.sparsity.sensitivity.examples import limited
from fl_lightning.sparsity.sensitivity.logits import Labels, batch_labels
from fl_lightning.sparsity.sensitivity.per_example import check_scores
from fl_lightning.sparsity.sensitivity.protocol import Scores
from fl_lightning.sparsity.sensitivity.scoring import (
    Scoring,
    checked_parameters,
    scoring_mode,
    zero_sums,
)


@final
@dataclass(frozen=True)
class SquaredMeanGradient:
    """The squared gradient of each batch's mean, batches weighted by their sizes.

    Args:
        labels: takes the labels (B,) out of a batch.
        scoring: what is scored, on how many examples; a batch is never divided.

    Example:
        >>> module, batch = nn.Linear(1, 2, bias=False), (torch.ones(2, 1), torch.tensor([0, 1]))
        >>> _ = nn.init.zeros_(module.weight)
        >>> SquaredMeanGradient()(module, [batch]).mean()["weight"]  # they cancel; Fisher: 0.25
        tensor([[0.],
                [0.]])
    """

    labels: Labels = batch_labels
    scoring: Scoring = field(default_factory=Scoring)

    def __call__(
        self,
        module: nn.Module,
        batches: Iterable[Any],
        *,
        parameters: Mapping[str, Tensor] | None = None,
        seed: int = 0,
    ) -> Scores:
        """Return the scores; see `Sensitivity`. Nothing is drawn."""
        values = checked_parameters(module, parameters)
        sums, num_examples = zero_sums(values), 0
        with scoring_mode(module), torch.enable_grad():
            score = self.scoring.of_values(module)
            leaves = {name: value.requires_grad_() for name, value in values.items()}
            device = next(iter(values.values())).device
            for batch, size in limited(batches, self.scoring.max_examples, device):
                quantity, _ = score(leaves, batch)
                mean = quantity.gather(1, self.labels(batch).reshape(-1, 1)).mean()
                gradients = torch.autograd.grad(mean, list(leaves.values()), materialize_grads=True)
                for total, gradient in zip(sums.values(), gradients, strict=True):
                    total += size * gradient.to(total.dtype).square()
                num_examples += size
        check_scores(sums, num_examples)
        return Scores(sums, num_examples)
