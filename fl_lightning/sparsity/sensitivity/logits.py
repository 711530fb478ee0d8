"""From a module and a batch to logits and labels, and what of the logits is scored."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from fl_lightning.core.errors import ConfigurationError

Logits = Callable[[nn.Module, Any], Tensor]
Labels = Callable[[Any], Tensor]
Scored = Callable[[Tensor], Tensor]


def module_logits(module: nn.Module, batch: Any) -> Tensor:
    """Return ``module(x)`` of a batch ``(x, y)``, or of a batch that is a tensor: (B, classes)."""
    inputs = batch[0] if isinstance(batch, (tuple, list)) else batch
    logits: Tensor = module(inputs)
    return logits


def batch_labels(batch: Any) -> Tensor:
    """Return y of a batch ``(x, y)``: (B,) whole numbers.

    Raises:
        ConfigurationError: if the batch is anything else.
    """
    if not isinstance(batch, (tuple, list)) or len(batch) < 2:
        raise ConfigurationError(
            "this estimator needs the given labels: batches (x, y), or an option `labels` that "
            f"takes them from a batch; the batch is a {type(batch).__name__}. SampledFisher and "
            "ExactFisher need none."
        )
    labels: Tensor = batch[1]
    return labels


def log_probabilities(logits: Tensor) -> Tensor:
    """Return log p of each class: the paper's choice, and the Fisher information's.

    Example:
        >>> import torch
        >>> log_probabilities(torch.zeros(1, 2)).exp()
        tensor([[0.5000, 0.5000]])
    """
    return logits.log_softmax(dim=-1)


def raw_logits(logits: Tensor) -> Tensor:
    """Return the logits as they are: what TaLoS's released code scores. Not the Fisher."""
    return logits
