"""Estimators of the diagonal of the Fisher information, and the squared mean gradient.

    sampled:    F_jj = 1/N Σ_i 1/S Σ_s (∂ log p(y_is | x_i) / ∂θ_j)²,   y_is ~ p(· | x_i)
    exact:      F_jj = 1/N Σ_i Σ_y p(y | x_i) (∂ log p(y | x_i) / ∂θ_j)²
    empirical:  F_jj = 1/N Σ_i (∂ log p(y_i | x_i) / ∂θ_j)²,   y_i the given label: no Fisher information

Source: Iurada et al. 2025, ICLR (TaLoS), equation 7: labels from the model's own prediction,
gradients of single examples. Its released code takes the raw logit of the sampled class instead of
its log-probability: ``scoring: {quantity: fl_lightning.sparsity.raw_logits}``.

The squared gradient of a batch's mean, often called Fisher; for comparison only:

    1/N Σ_batches B (∂ 1/B Σ_i log p(y_i | x_i) / ∂θ_j)²

Gradients of different examples cancel before they are squared, so that it vanishes for a converged model and
depends on the batch size. All of these rank entries differently.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, final

import torch
from torch import Tensor, nn
from typing_extensions import override

from fl_lightning.core.errors import check_range
from fl_lightning.core.seeds import numpy_generator
from fl_lightning.sparsity.sensitivity.per_example import Estimator, Given, SquaredGradients
from fl_lightning.sparsity.sensitivity.protocol import Labels, batch_labels
from fl_lightning.sparsity.sensitivity.scoring import Scoring, Tensors


@final
@dataclass(frozen=True)
class SampledFisher(SquaredGradients):
    """Estimates the diagonal of the Fisher information, unbiased, with labels drawn from the model's prediction.

    The label of an example depends on (seed, position of the example), not on the batch size.

    Args:
        num_samples: number of labels drawn per example, at least 1; each costs a backward pass.
        scoring: quantity to score, number of examples, memory.

    Raises:
        ConfigurationError: if num_samples is below 1.

    Example:
        >>> module, batches = torch.nn.Linear(2, 3), [torch.ones(4, 2)]
        >>> scores = SampledFisher()(module, batches, seed=0)
        >>> scores.num_examples, scores.sums["bias"].shape
        (4, torch.Size([3]))
    """

    num_samples: int = 1
    scoring: Scoring = field(default_factory=Scoring)

    def __post_init__(self) -> None:
        check_range("num_samples", self.num_samples, "at least 1 label per example")

    def given(self, seed: int) -> Given:
        """Return a function that draws, for a batch, one uniform number in [0, 1) per label to sample."""
        generator = numpy_generator(seed, "sampled labels")  # read in the order of the examples

        def draws(_: Any, size: int) -> Tensor:
            return torch.from_numpy(generator.random((size, self.num_samples))).float()

        return draws

    def choose(self, logits: Tensor, given: Tensor) -> tuple[Tensor, Tensor]:
        """Return labels of one example, drawn from the model's prediction, and their equal weights."""
        cumulative = logits.softmax(dim=-1).cumsum(dim=-1)
        labels = (cumulative <= given.unsqueeze(-1)).sum(dim=-1).clamp(max=len(logits) - 1)
        return labels, torch.full_like(given, 1 / len(given))


@final
@dataclass(frozen=True)
class ExactFisher(SquaredGradients):
    """Computes the Fisher information's diagonal exactly, over all labels: one backward pass per class.

    Args:
        scoring: quantity to score, number of examples, memory.

    Example:
        >>> module, batches = torch.nn.Linear(1, 2, bias=False), [torch.ones(1, 1)]
        >>> _ = torch.nn.init.zeros_(module.weight)
        >>> ExactFisher()(module, batches).mean()["weight"]  # p (1 - p) for p = 1/2
        tensor([[0.2500],
                [0.2500]])
    """

    scoring: Scoring = field(default_factory=Scoring)

    def choose(self, logits: Tensor, given: Tensor) -> tuple[Tensor, Tensor]:
        """Return all labels, with the model's probabilities as weights."""
        return torch.arange(len(logits), device=logits.device), logits.softmax(dim=-1)


@final
@dataclass(frozen=True)
class EmpiricalFisher(SquaredGradients):
    """Scores entries by squared gradients of the log-probability of each example's true label.

    Often called "the Fisher", which it is not: Kunstner et al. 2019, NeurIPS, section 3.

    Args:
        labels: returns the labels (B,) of a batch.
        scoring: quantity to score, number of examples, memory.

    Example:
        >>> module, batch = torch.nn.Linear(1, 2, bias=False), (torch.ones(2, 1), torch.tensor([0, 0]))
        >>> _ = torch.nn.init.zeros_(module.weight)
        >>> EmpiricalFisher()(module, [batch]).mean()["weight"]  # (1 - p)² and p²
        tensor([[0.2500],
                [0.2500]])
    """

    labels: Labels = batch_labels
    scoring: Scoring = field(default_factory=Scoring)

    def given(self, seed: int) -> Given:
        """Return a function that reads the labels of a batch."""
        return lambda batch, _: self.labels(batch)

    def choose(self, logits: Tensor, given: Tensor) -> tuple[Tensor, Tensor]:
        """Return the example's true label, with weight 1."""
        return given.reshape(1), logits.new_ones(1)


@final
@dataclass(frozen=True)
class SquaredMeanGradient(Estimator):
    """Scores entries by the squared gradient of a batch's mean log-probability, weighted by batch size.

    Args:
        labels: returns the labels (B,) of a batch.
        scoring: quantity to score and number of examples; a batch is never divided.

    Example:
        >>> module, batch = nn.Linear(1, 2, bias=False), (torch.ones(2, 1), torch.tensor([0, 1]))
        >>> _ = nn.init.zeros_(module.weight)
        >>> SquaredMeanGradient()(module, [batch]).mean()["weight"]  # they cancel; Fisher: 0.25
        tensor([[0.],
                [0.]])
    """

    labels: Labels = batch_labels
    scoring: Scoring = field(default_factory=Scoring)

    @override
    def _added_to(
        self, sums: dict[str, Tensor], module: nn.Module, values: Tensors, seed: int
    ) -> Callable[[Any, int], None]:
        score = self.scoring.of_values(module)
        leaves = {name: value.requires_grad_() for name, value in values.items()}

        def add(batch: Any, size: int) -> None:
            with torch.enable_grad():
                quantity, _ = score(leaves, batch)
                mean = quantity.gather(1, self.labels(batch).reshape(-1, 1)).mean()
                gradients = torch.autograd.grad(mean, list(leaves.values()), materialize_grads=True)
            for total, gradient in zip(sums.values(), gradients, strict=True):
                total += size * gradient.to(total.dtype).square()

        return add
