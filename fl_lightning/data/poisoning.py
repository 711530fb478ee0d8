"""Poisoned training examples of attackers: other labels, or a trigger.

    label flip         y → C - 1 - y
    backdoor trigger   a patch in the image's corner → target class

Sources: label flip: Fang et al. 2020, Local Model Poisoning Attacks; trigger: Gu et al. 2017,
BadNets. Examples are changed when they are read, after the data module's transforms, by their number:
each belongs to one client, so that every engine reads the same. Held-out examples are not changed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, final

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from fl_lightning.core.errors import ConfigurationError
from fl_lightning.core.seeds import numpy_generator
from fl_lightning.data.shards import ClientShards


class Poison(Protocol):
    """A change of attackers' examples.

    Attributes:
        share: share of an attacker's examples that are changed, in [0, 1].
    """

    @property
    def share(self) -> float: ...  # noqa: D102

    def change(self, inputs: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """Return changed inputs, shape (m, …), and labels, shape (m,); the arguments must not change."""


@final
@dataclass(frozen=True)
class LabelFlip:
    """Trains on wrong labels.

    Args:
        num_classes: C; class y becomes C - 1 - y.
        share: share of an attacker's examples that are changed, in [0, 1].

    Raises:
        ConfigurationError: for values out of range.

    Example:
        >>> LabelFlip(10).change(torch.zeros(2, 1), torch.tensor([0, 7]))[1]
        tensor([9, 2])
    """

    num_classes: int
    share: float = 1.0

    def __post_init__(self) -> None:
        _check_share(self, self.share)
        if self.num_classes < 2:
            raise ConfigurationError(
                f"LabelFlip: num_classes must be at least 2, got {self.num_classes}"
            )

    def change(self, inputs: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """Return the inputs, and the labels flipped."""
        if labels.numel() and int(labels.max()) >= self.num_classes:
            raise ConfigurationError(
                f"attackers.poison: num_classes must be above every label, and there is a label "
                f"{int(labels.max())}, got {self.num_classes}"
            )
        return inputs, self.num_classes - 1 - labels


@final
@dataclass(frozen=True)
class Trigger:
    """Teaches the model that a patch in the lower right corner means one class (a backdoor).

    Args:
        target: that class.
        size: height and width of the patch in pixels, ≥ 1.
        value: value of the patch's pixels, in every channel, in the units of the model's inputs.
        share: share of an attacker's examples that are changed, in [0, 1].

    Raises:
        ConfigurationError: for values out of range.

    Example:
        >>> images, labels = Trigger(target=0, size=1).change(torch.zeros(1, 1, 2, 2), torch.ones(1))
        >>> images.tolist(), labels.tolist()
        ([[[[0.0, 0.0], [0.0, 1.0]]]], [0.0])
    """

    target: int
    size: int = 3
    value: float = 1.0
    share: float = 0.5

    def __post_init__(self) -> None:
        _check_share(self, self.share)
        if self.size < 1:
            raise ConfigurationError(f"Trigger: size must be at least 1 pixel, got {self.size}")
        if self.target < 0:
            raise ConfigurationError(f"Trigger: target must be a class, got {self.target}")
        if not math.isfinite(self.value):
            raise ConfigurationError(f"Trigger: value must be a finite number, got {self.value}")

    def change(self, inputs: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """Return the images with the patch, and the target as their labels."""
        smallest = min(inputs.shape[-2:])
        if self.size > smallest:
            raise ConfigurationError(
                f"attackers.poison: size must be at most {smallest}, as the images are, got {self.size}"
            )
        changed = inputs.clone()
        changed[..., -self.size :, -self.size :] = self.value
        return changed, torch.full_like(labels, self.target)


def check_apart(shards: ClientShards, clients: Sequence[int]) -> None:
    """Raise ConfigurationError if attackers share an example with others, who would train on it."""
    flat = shards.flat
    is_changed = np.repeat(np.isin(np.arange(len(flat)), list(clients)), flat.sizes)
    shared = np.intersect1d(flat.indices[is_changed], flat.indices[~is_changed])
    if len(shared):
        raise ConfigurationError(
            f"attackers: example {shared[0]} is in shards of attackers and of others, who would "
            "train on the changed example: use a partition whose shards do not overlap"
        )


def poisoned_examples(
    shards: ClientShards, clients: Sequence[int], share: float, num_examples: int, seed: int
) -> Tensor:
    """Draw the examples to change: True for changed ones, bool of shape (num_examples,).

    Args:
        shards: examples of each client.
        clients: the attackers.
        share: share of each attacker's examples, rounded.
        num_examples: number of examples of all clients together.
        seed: seed of the choice.
    """
    chosen = torch.zeros(num_examples, dtype=torch.bool)
    for client in clients:
        shard = shards[client].numpy()
        generator = numpy_generator(seed, "poisoned", client)
        count = int(np.rint(share * len(shard)))
        chosen[torch.from_numpy(generator.permutation(shard)[:count]).long()] = True
    return chosen


def poisoned_reader(
    read: Callable[[Tensor], Any], is_poisoned: Tensor, poison: Poison
) -> Callable[[Tensor], Any]:
    """Return a function from indices to a batch in which some examples are changed.

    Args:
        read: function from indices to an honest batch, a pair of inputs and labels.
        is_poisoned: True for examples to change, bool of shape (N,).
        poison: the change.
    """

    def read_poisoned(indices: Tensor) -> Any:
        batch = read(indices)
        rows = is_poisoned[indices].nonzero().flatten()
        if not len(rows):
            return batch
        if not is_pair(batch):
            raise ConfigurationError(
                f"attackers.poison changes batches of inputs and labels, got {type(batch).__name__}"
                ": let the data set return pairs of tensors, or use attackers.forge"
            )
        inputs, labels = (part.clone() for part in batch)
        inputs[rows], labels[rows] = poison.change(inputs[rows], labels[rows])
        return type(batch)((inputs, labels))

    return read_poisoned


def check_poison(batch: Any, labels: npt.NDArray[Any], poison: Poison) -> None:
    """Check that a change results in known labels.

    Args:
        batch: batch of the first attacker's examples, unchanged.
        labels: classes of all training examples.
        poison: the change.

    Raises:
        ConfigurationError: if a changed label is no label of any example.
    """
    if not is_pair(batch) or not len(labels):
        return
    changed = poison.change(batch[0].clone(), batch[1].clone())[1]
    largest = int(labels.max())
    if not 0 <= int(changed.min()) <= int(changed.max()) <= largest:
        wrong = next(int(label) for label in changed if not 0 <= int(label) <= largest)
        raise ConfigurationError(
            f"attackers.poison: target must be a class from 0 to {largest}, as the examples have, "
            f"got {wrong}"
        )


def is_pair(batch: Any) -> bool:
    """True if a batch is a pair of tensors, like inputs and labels."""
    return (
        type(batch) in (tuple, list)
        and len(batch) == 2
        and all(isinstance(part, Tensor) for part in batch)
    )


def _check_share(poison: object, share: float) -> None:
    if not 0 <= share <= 1:
        raise ConfigurationError(
            f"{type(poison).__name__}: share must be in [0, 1], got {share}: it is the part of an "
            "attacker's examples that is changed"
        )
