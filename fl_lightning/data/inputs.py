"""Transforms of the inputs of every batch, in training and in evaluation.

    given:      x ← (x - mean) / std
    federated:  n = Σ_c n_c,  mean = Σ_c Σ_i x_ci / n,  var = Σ_c Σ_i x_ci² / n - mean²

The federated statistics need only three sums per client; they equal those of the pooled training
examples. Inputs are the first part of a batch.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, ClassVar, Protocol, TypeAlias

import torch
from torch import Tensor
from torch.utils.data import DataLoader

from fl_lightning.core.errors import ConfigurationError, Ranged
from fl_lightning.core.modules import sent

MAX_EXAMPLES_READ = 1024  # examples read at a time, for statistics

Transform: TypeAlias = Callable[[Tensor], Tensor]
# For every client the inputs of its batches, each of shape (B, …)
InputsOfClients: TypeAlias = Iterable[Iterable[Tensor]]


class InputTransform(Protocol):
    """A transform of inputs, which may be fitted to all clients' inputs first."""

    def fit(self, clients: Callable[[], InputsOfClients]) -> Transform:
        """Fit the transform to all clients' inputs, and return it as a function of a batch of inputs.

        Args:
            clients: returns an iterator over all clients' training inputs, to which the preceding
                transforms have been applied.
        """


@dataclass(frozen=True)
class Reshape:
    """Reshapes the input of every example.

    Args:
        shape: shape of one example; one of its numbers may be -1.

    Example:
        >>> Reshape([1, 2, 2]).fit(list)(torch.zeros(8, 4)).shape
        torch.Size([8, 1, 2, 2])
    """

    shape: list[int]

    def __post_init__(self) -> None:
        if not self.shape or any(n < 1 and n != -1 for n in self.shape) or self.shape.count(-1) > 1:
            raise ConfigurationError(
                f"Reshape: shape must be numbers of at least 1, one of which may be -1 instead, got {self.shape}"
            )

    def fit(self, clients: Callable[[], InputsOfClients]) -> Transform:
        """Return the function that reshapes a batch of inputs; nothing is fitted."""
        return self._reshaped

    def _reshaped(self, inputs: Tensor) -> Tensor:
        try:
            return inputs.reshape(len(inputs), *self.shape)
        except RuntimeError as error:
            raise ConfigurationError(
                f"Reshape: an input of shape {tuple(inputs.shape[1:])} does not fit into shape {self.shape}"
            ) from error


@dataclass(frozen=True)
class Normalize:
    """Normalises inputs by given means and standard deviations: (inputs - mean) / std.

    Args:
        mean: one number per feature if inputs are vectors, else per channel; or one for all.
        std: standard deviations, likewise, each > 0.

    Example:
        >>> Normalize([1.0], [2.0]).fit(list)(torch.tensor([[1.0, 5.0]]))
        tensor([[0., 2.]])
    """

    mean: list[float]
    std: list[float]

    def __post_init__(self) -> None:
        if not self.mean or not all(math.isfinite(value) for value in self.mean):
            raise ConfigurationError(
                f"Normalize: mean must be a list of finite numbers, one per feature, got {self.mean}"
            )
        if len(self.mean) != len(self.std) or not all(0 < s < math.inf for s in self.std):
            raise ConfigurationError(
                f"Normalize: std must be {len(self.mean)} finite numbers > 0, as many as mean, got {self.std}"
            )

    def fit(self, clients: Callable[[], InputsOfClients]) -> Transform:
        """Return the function that normalises a batch of inputs by the given numbers; nothing is fitted."""
        return _scaler(torch.tensor(self.mean), torch.tensor(self.std))


@dataclass(frozen=True)
class FederatedNormalize(Ranged):
    """Normalises inputs by the mean and standard deviation of all clients' training inputs.

    Statistics are per feature if inputs are vectors, else per channel (the first dimension of an
    example). Rejected under differential privacy, because every client's inputs affect all others'.

    Args:
        eps: added to the variance, ≥ 0, for constant features.

    Example:
        >>> clients = [[torch.tensor([[0.0], [2.0]])], [torch.tensor([[4.0], [6.0]])]]
        >>> FederatedNormalize(eps=0.0).fit(lambda: clients)(torch.tensor([[3.0]]))
        tensor([[0.]])
    """

    ranges: ClassVar[dict[str, str]] = {"eps": "at least 0 and finite"}

    eps: float = 1e-8

    def fit(self, clients: Callable[[], InputsOfClients]) -> Transform:
        """Compute mean and variance over all clients' inputs; return the function that normalises a batch by them."""
        mean, variance = mean_and_variance(clients())
        return _scaler(mean.float(), (variance + self.eps).sqrt().float())

    @property
    def unprotected(self) -> str:
        """Description of the values that clients send without the protection of differential privacy."""
        return "the sums of each client's inputs and of their squares, for FederatedNormalize"


def mean_and_variance(clients: InputsOfClients) -> tuple[Tensor, Tensor]:
    """Return mean and variance of all clients' inputs, per feature or channel, in float64.

    Raises:
        ConfigurationError: if there are no inputs.

    Example:
        >>> mean_and_variance([[torch.tensor([[1.0], [3.0]])], [torch.tensor([[5.0]])]])
        (tensor([3.], dtype=torch.float64), tensor([2.6667], dtype=torch.float64))
    """
    count, total, squares = 0, torch.zeros(()), torch.zeros(())
    for inputs in chain.from_iterable(clients):
        columns = inputs.double().reshape(len(inputs), inputs.shape[1], -1)
        count += columns.shape[0] * columns.shape[2]
        total = total + columns.sum((0, 2))
        squares = squares + columns.square().sum((0, 2))
    if not count:
        raise ConfigurationError("FederatedNormalize: the clients have no training examples")
    mean = total / count
    return mean, (squares / count - mean.square()).clamp(min=0)


def _scaler(mean: Tensor, std: Tensor) -> Transform:
    def scaled(inputs: Tensor) -> Tensor:
        if len(mean) not in (1, inputs.shape[1]):
            raise ConfigurationError(
                f"Normalize: {len(mean)} numbers do not fit inputs of shape {tuple(inputs.shape)}: "
                f"give one, or {inputs.shape[1]}"
            )
        shape = -1, *[1] * (inputs.ndim - 2)
        shift, scale = (sent(each, inputs.device).view(shape) for each in (mean, std))
        return (inputs - shift) / scale

    return scaled


def on_inputs(transforms: Sequence[Transform], batch: Any) -> Any:
    """Apply transforms, in order, to a batch's inputs; its labels are unchanged.

    Raises:
        ConfigurationError: if a batch is neither a tensor nor a tuple or list that begins with one.

    Example:
        >>> on_inputs([torch.neg], (torch.ones(1), "label"))
        (tensor([-1.]), 'label')
    """
    if not transforms:
        return batch
    inputs = batch[0] if isinstance(batch, (tuple, list)) and batch else batch
    if not isinstance(inputs, Tensor):
        raise ConfigurationError(
            "data.transforms need batches that are a tensor, or a tuple or list that begins with one, got "
            f"{type(batch).__name__}: transform examples in the data set instead"
        )
    for transform in transforms:
        inputs = transform(inputs)
    return inputs if isinstance(batch, Tensor) else type(batch)([inputs, *batch[1:]])


def fit_transforms(
    transforms: Sequence[InputTransform], clients: Iterable[Tensor], read: Callable[[Tensor], Any]
) -> list[Transform]:
    """Fit input transforms one after another, each to inputs already changed by the earlier transforms.

    Args:
        transforms: the transforms, in order.
        clients: indices of every client's examples; read once per transform that is fitted.
        read: function from indices to a batch.
    """
    fitted: list[Transform] = []

    def inputs_of(client: Tensor) -> Iterator[Tensor]:
        for indices in client.split(MAX_EXAMPLES_READ):
            if len(indices):
                batch = on_inputs(fitted, read(indices))
                yield batch if isinstance(batch, Tensor) else batch[0]

    for transform in transforms:
        done = transform.fit(lambda: map(inputs_of, clients))
        fitted = [*fitted, done]
    return fitted


def with_transforms(loaders: Any, transforms: Callable[[], Sequence[Transform]]) -> Any:
    """Return copies of one or several DataLoaders that apply transforms to the inputs of every batch.

    Raises:
        ConfigurationError: if a loader is no `DataLoader`.
    """
    if isinstance(loaders, (list, tuple)):
        return [with_transforms(loader, transforms) for loader in loaders]
    if not isinstance(loaders, DataLoader):
        raise ConfigurationError(
            f"data.transforms need a DataLoader or a list of them for every set, got {type(loaders).__name__}"
        )
    loader, collate = copy.copy(loaders), loaders.collate_fn
    loader.collate_fn = lambda examples: on_inputs(transforms(), collate(examples))
    return loader
