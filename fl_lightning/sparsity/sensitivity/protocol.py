"""Sensitivity of a model's prediction to each parameter: protocol of the estimators, and their scores.

The file also has the functions that get logits and labels from a batch, and the scored quantities.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor, nn

from fl_lightning.core.errors import ConfigurationError
from fl_lightning.sparsity.masks.mask import some


@dataclass(frozen=True)
class Scores:
    """Sums over examples and the number of examples, so that scores of several clients can be added.

    Attributes:
        sums: one tensor per parameter, of its shape, ≥ 0, in float32 or wider.
        num_examples: number of examples in the sums.

    Example:
        >>> import torch
        >>> one = Scores({"weight": torch.tensor([2.0, 4.0])}, num_examples=1)
        >>> other = Scores({"weight": torch.tensor([0.0, 2.0])}, num_examples=3)
        >>> (one + other).mean()
        {'weight': tensor([0.5000, 1.5000])}
    """

    sums: Mapping[str, Tensor]
    num_examples: int

    def __add__(self, other: Scores) -> Scores:
        """Return the scores of both sets of examples together.

        Raises:
            ConfigurationError: if their parameters differ.
        """
        if differing := sorted(self.sums.keys() ^ other.sums.keys()):
            raise ConfigurationError(
                f"scores are added over the same parameters, these differ in {some(differing)}"
            )
        sums = {name: total + other.sums[name] for name, total in self.sums.items()}
        return Scores(sums, self.num_examples + other.num_examples)

    def mean(self) -> dict[str, Tensor]:
        """Mean over examples by name: the sensitivity."""
        return {name: total / self.num_examples for name, total in self.sums.items()}


class Sensitivity(Protocol):
    """An estimator: scores every entry of some parameters on some examples."""

    def __call__(
        self,
        module: nn.Module,
        batches: Iterable[Any],
        *,
        parameters: Mapping[str, Tensor] | None = None,
        seed: int = 0,
    ) -> Scores:
        """Return the scores; the module, its gradients and its mode do not change.

        Args:
            module: the model; it is scored in eval mode.
            batches: batches of examples, each with the first axis over examples.
            parameters: values at which to score, by name of the parameter: tensors of its shape, which
                replace the module's. None scores all trainable parameters at their own values.
            seed: seed of random draws; a draw depends on (seed, position of the example) alone.
        """


Logits = Callable[[nn.Module, Any], Tensor]
Labels = Callable[[Any], Tensor]
Scored = Callable[[Tensor], Tensor]


def module_logits(module: nn.Module, batch: Any) -> Tensor:
    """Return ``module(x)`` for a batch ``(x, y)`` or ``x``, shape (B, classes)."""
    inputs = batch[0] if isinstance(batch, (tuple, list)) else batch
    logits: Tensor = module(inputs)
    return logits


def batch_labels(batch: Any) -> Tensor:
    """Return the labels y of a batch ``(x, y)``, integers of shape (B,).

    Raises:
        ConfigurationError: if the batch is no such pair.
    """
    if not isinstance(batch, (tuple, list)) or len(batch) < 2:
        raise ConfigurationError(
            "this estimator needs labels: batches (x, y), or an option `labels` that "
            f"gets them from a batch; the batch is a {type(batch).__name__}. SampledFisher and "
            "ExactFisher need no labels."
        )
    labels: Tensor = batch[1]
    return labels


def log_probabilities(logits: Tensor) -> Tensor:
    """Log-probability of each class: the paper's choice, and that of the Fisher information.

    Example:
        >>> import torch
        >>> log_probabilities(torch.zeros(1, 2)).exp()
        tensor([[0.5000, 0.5000]])
    """
    return logits.log_softmax(dim=-1)


def raw_logits(logits: Tensor) -> Tensor:
    """Return the logits unchanged, which TaLoS's released code scores; this is no Fisher information."""
    return logits
