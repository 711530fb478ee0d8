"""How much a model's prediction depends on each parameter: the contract of all estimators.

From a module and a batch to logits and labels, and what of the logits is scored.
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
    """Sums over examples and their number, apart, so that those of several clients can be added.

    Attributes:
        sums: one tensor a parameter, of its shape, ≥ 0, in float32 or wider.
        num_examples: how many examples they are summed over.

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
            ConfigurationError: if they are of different parameters.
        """
        if differing := sorted(self.sums.keys() ^ other.sums.keys()):
            raise ConfigurationError(
                f"scores are added over the same parameters, these differ in {some(differing)}"
            )
        sums = {name: total + other.sums[name] for name, total in self.sums.items()}
        return Scores(sums, self.num_examples + other.num_examples)

    def mean(self) -> dict[str, Tensor]:
        """Return the mean over examples by name: the sensitivity."""
        return {name: total / self.num_examples for name, total in self.sums.items()}


class Sensitivity(Protocol):
    """Scores every entry of some parameters on some examples."""

    def __call__(
        self,
        module: nn.Module,
        batches: Iterable[Any],
        *,
        parameters: Mapping[str, Tensor] | None = None,
        seed: int = 0,
    ) -> Scores:
        """Return the scores; the module, its gradients and its mode stay as they are.

        Args:
            module: the model; it is scored in eval mode.
            batches: of examples, each with the first axis over examples.
            parameters: what to score and the values at which: names of the module's parameters
                mapped to tensors of their shapes, which take their places. None: all that train.
            seed: of whatever is drawn; a draw belongs to (seed, position of the example).
        """


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
