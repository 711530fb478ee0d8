"""Sensitivity of a model's prediction to each parameter: protocol of the estimators, and their scores.

Also the scored quantities, and the default functions for logits and labels of a batch.
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
    """Scores of a model's entries, summed over examples, with their number; clients' scores can be added.

    Attributes:
        sums: one tensor per parameter, of its shape, at least 0, in float32 or float64.
        num_examples: number of examples.

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
                f"scores can be added if they are of the same parameters, and these differ in {some(differing)}"
            )
        sums = {name: total + other.sums[name] for name, total in self.sums.items()}
        return Scores(sums, self.num_examples + other.num_examples)

    def mean(self) -> dict[str, Tensor]:
        """Return the mean score per example of each entry (its sensitivity), by parameter name."""
        return {name: total / self.num_examples for name, total in self.sums.items()}


class Sensitivity(Protocol):
    """Protocol of sensitivity estimators: functions that score every entry of parameters on examples."""

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
            module: the model, which is scored in evaluation mode.
            batches: batches, with examples along the first axis.
            parameters: values at which to score, by parameter name, instead of the module's. None scores
                all trainable parameters at their own values.
            seed: seed of the draws, each of which depends only on (seed, position of the example).
        """


Logits = Callable[[nn.Module, Any], Tensor]
Labels = Callable[[Any], Tensor]
Scored = Callable[[Tensor], Tensor]


def module_logits(module: nn.Module, batch: Any) -> Tensor:
    """Return the logits ``module(x)`` for a batch ``(x, y)`` or ``x``, shape (B, classes)."""
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
            f"this estimator needs labels, and a batch is a {type(batch).__name__}: give batches (x, y), or the "
            "option `labels`, a function that returns the labels of a batch; or use SampledFisher or ExactFisher"
        )
    labels: Tensor = batch[1]
    return labels


def log_probabilities(logits: Tensor) -> Tensor:
    """Return the log-probability of every class, whose gradients define the Fisher information.

    Example:
        >>> import torch
        >>> log_probabilities(torch.zeros(1, 2)).exp()
        tensor([[0.5000, 0.5000]])
    """
    return logits.log_softmax(dim=-1)


def raw_logits(logits: Tensor) -> Tensor:
    """Return the logits unchanged, for scores as in TaLoS's released code (not Fisher information)."""
    return logits
