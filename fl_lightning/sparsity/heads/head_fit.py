"""Fitting a classifier on frozen features:  logits = x Wᵀ + b  for features x.

A fit needs of the examples only sums over them. So a client sends sums, the server adds them up,
and the head of a federation is that of all examples in one place.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from fl_lightning.core.errors import ConfigurationError
from fl_lightning.sparsity.sensitivity.logits import Labels, Logits

# One owner's examples: features (n, D) and labels (n,), whole numbers below the number of classes.
Features = tuple[Tensor, Tensor]
# Replaces a tensor by its sum over processes.
Reduce = Callable[[Tensor], None]

_ROWS = 8192  # in double precision at a time


@dataclass(frozen=True)
class FittedHead:
    """A linear classifier, and what it took to find it.

    Attributes:
        weight: (classes, D), float64.
        bias: (classes,), float64; None for a head without.
        rounds: how often owners sent sums.
        values_up: numbers that an owner sends in a round.
    """

    weight: Tensor
    bias: Tensor | None
    rounds: int
    values_up: int

    @torch.no_grad()
    def write_to(self, head: nn.Linear) -> None:
        """Put the classifier into a layer."""
        head.weight.copy_(self.weight)
        if self.bias is not None:
            head.bias.copy_(self.bias)


class HeadFit(Protocol):
    """Fits a classifier."""

    @property
    def labels(self) -> Labels:
        """What takes the labels (B,) out of a batch."""

    @property
    def logits(self) -> Logits:
        """What passes a batch through the module, head included."""

    def fit(
        self,
        owners: Sequence[Features],
        num_features: int,
        num_classes: int,
        *,
        has_bias: bool = True,
        reduce: Reduce = lambda _: None,
    ) -> FittedHead:
        """Return the classifier of all owners' examples.

        Args:
            owners: one entry a client; one entry where all examples are in one place; in one of
                several processes its own share, perhaps none.
            num_features: D.
            num_classes: of the head.
            has_bias: whether the head has a bias.
            reduce: adds up over processes.
        """


@runtime_checkable
class OneExchange(HeadFit, Protocol):
    """A fit for which every owner sends its sums once, so that owners may be at sites elsewhere.

    ``reduce`` of `fit` is called once, with the sums over the owners given.
    """

    def sums(self, owner: Features, num_features: int, num_classes: int) -> Tensor:
        """Return what an owner sends, in float64.

        Args:
            owner: its examples.
            num_features: D.
            num_classes: of the head.
        """


def head_features(module: nn.Module, head: nn.Linear, batch: Any, logits: Logits) -> Tensor:
    """Return what a head is given for a batch, shape (B, D), without gradients.

    Raises:
        ConfigurationError: if the head is not called once, with one vector an example.

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
            "a head is fitted on one vector of features an example; here it is called with tensors "
            f"of shapes {[tuple(x.shape) for x in inputs]}: use head: train or head: freeze"
        )
    return inputs[0].detach()


def check_regularisation(value: float) -> None:
    """Refuse a regularisation that leaves the solution open."""
    if not 0 < value < float("inf"):
        raise ConfigurationError(
            f"regularisation must be above 0 and finite, got {value}: without it the head of separable or "
            "collinear features has no unique solution. 1e-6 is next to none."
        )


def check_labels(labels: Tensor, num_classes: int) -> None:
    """Refuse labels that are no classes of the head.

    Raises:
        ConfigurationError: with the labels' range.
    """
    if len(labels) and (int(labels.min()) < 0 or int(labels.max()) >= num_classes):
        raise ConfigurationError(
            f"labels are {int(labels.min())} to {int(labels.max())}, but the head has "
            f"{num_classes} classes: set the model's num_classes"
        )


def double_rows(owner: Features, num_classes: int) -> Iterator[Features]:
    """Yield an owner's examples some at a time, features in double precision."""
    features, labels = owner
    check_labels(labels, num_classes)
    for part in range(0, len(labels), _ROWS):
        yield features[part : part + _ROWS].double(), labels[part : part + _ROWS].long()
