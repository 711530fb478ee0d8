"""Changes of clients' examples, inputs and labels: transforms that differ by client, and attackers' poison.

    batch  →  rows of each client  →  apply(inputs, labels, client, seeds)  →  batch
    label flip         y → C - 1 - y
    backdoor trigger   a patch in the image's corner → target class

An example belongs to one client. Every engine changes it in the same way at every reading, also after a
restart, unlike augmentation. Transforms also change held-out examples. Poison changes only training
examples, after the data module's ``transforms``.

Sources: rotated images, Ghosh et al. 2020, NeurIPS, section 6.1; permuted labels, Sattler et al. 2021,
IEEE TNNLS, section VI; label flip, Fang et al. 2020, Local Model Poisoning Attacks; trigger, Gu et al.
2017, BadNets.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol, final

import numpy as np
import torch
from torch import Tensor

from fl_lightning.core.errors import ConfigurationError, Ranged
from fl_lightning.core.seeds import derive_seed, numpy_generator
from fl_lightning.data.shards import FlatShards


class ExampleTransform(Protocol):
    """A transform of inputs and labels that may differ between clients."""

    def apply(
        self, inputs: Tensor, labels: Tensor, client: int, seeds: Sequence[int]
    ) -> tuple[Tensor, Tensor]:
        """Return one client's inputs and labels after the transform, with unchanged shapes and types.

        Args:
            inputs: inputs of n examples of the client, shape (n, …); must not be changed in place.
            labels: labels of these examples, shape (n, …); must not be changed in place.
            client: client that owns the examples.
            seeds: seed of each example, for random transforms.
        """
        ...


@final
@dataclass(frozen=True)
class QuarterTurns(Ranged):
    """Rotates the images of client c by c mod ``num_groups`` right angles, counterclockwise.

    Inputs are images (n, …, H, W).

    Args:
        num_groups: 1 to 4; 1 rotates none, 2 rotates the images of every second client.

    Raises:
        ConfigurationError: for another number.

    Example:
        >>> image, label = torch.tensor([[[1, 2], [3, 4]]]), torch.tensor([0])
        >>> QuarterTurns().apply(image, label, client=5, seeds=[0])[0]
        tensor([[[2, 4],
                 [1, 3]]])
    """

    ranges: ClassVar[dict[str, str]] = {"num_groups": "from 1 to 4"}

    num_groups: int = 4

    def apply(
        self, inputs: Tensor, labels: Tensor, client: int, seeds: Sequence[int]
    ) -> tuple[Tensor, Tensor]:
        """Return the rotated images, and the labels unchanged."""
        shape = tuple(inputs.shape[1:])
        if len(shape) < 2 or shape[-1] != shape[-2]:
            raise ConfigurationError(
                "data.example_transforms: QuarterTurns needs images (…, H, W) as high as they are wide, "
                f"got {shape}"
            )
        return torch.rot90(inputs, client % self.num_groups, (-2, -1)), labels


@final
@dataclass(frozen=True)
class LabelPermutation(Ranged):
    """Permutes the class numbers of labels, in another way for each group of clients; group 0 keeps its labels.

    Client c is in group c mod ``num_groups``.

    Args:
        num_classes: number of classes, ≥ 2.
        num_groups: number of groups, ≥ 1; 1 changes nothing.
        seed: seed of the permutations.

    Raises:
        ConfigurationError: for values out of range.

    Example:
        >>> labels = torch.arange(4)
        >>> LabelPermutation(4, 2).apply(labels, labels, client=1, seeds=range(4))[1]
        tensor([3, 1, 0, 2])
    """

    ranges: ClassVar[dict[str, str]] = {"num_classes": "at least 2", "num_groups": "at least 1"}

    num_classes: int
    num_groups: int = 2
    seed: int = 0

    def apply(
        self, inputs: Tensor, labels: Tensor, client: int, seeds: Sequence[int]
    ) -> tuple[Tensor, Tensor]:
        """Return the inputs unchanged, and the permuted labels."""
        _check_labels(labels, self.num_classes, "data.example_transforms: LabelPermutation")
        group = client % self.num_groups
        if not group:
            return inputs, labels
        renamed = numpy_generator(self.seed, "label permutation", group).permutation(
            self.num_classes
        )
        return inputs, torch.from_numpy(renamed).to(labels)[labels.long()]


class Poison(Protocol):
    """A way in which malicious clients (attackers) change their training examples.

    Attributes:
        share: share of an attacker's examples that are changed, in [0, 1].
    """

    @property
    def share(self) -> float: ...  # noqa: D102

    def change(self, inputs: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """Return an attacker's poisoned inputs, shape (m, …), and labels, shape (m,); the arguments stay unchanged."""


_SHARE = "in [0, 1]: it is the part of an attacker's examples that is changed"


@final
@dataclass(frozen=True)
class LabelFlip(Ranged):
    """Replaces an attacker's labels y by C - 1 - y, for C classes.

    Args:
        num_classes: number of classes C, ≥ 2.
        share: share of an attacker's examples that are changed, in [0, 1].

    Raises:
        ConfigurationError: for values out of range.

    Example:
        >>> LabelFlip(10).change(torch.zeros(2, 1), torch.tensor([0, 7]))[1]
        tensor([9, 2])
    """

    ranges: ClassVar[dict[str, str]] = {"num_classes": "at least 2", "share": _SHARE}

    num_classes: int
    share: float = 1.0

    def change(self, inputs: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """Return the inputs unchanged, and the flipped labels."""
        _check_labels(labels, self.num_classes, "attackers.poison: LabelFlip")
        return inputs, self.num_classes - 1 - labels


@final
@dataclass(frozen=True)
class Trigger(Ranged):
    """Backdoor attack: adds a patch to the lower right corner of images, and labels them as a target class.

    Args:
        target: class that the changed images get as their label.
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

    ranges: ClassVar[dict[str, str]] = {
        "target": "at least 0: it is a class",
        "size": "at least 1 pixel",
        "value": "a finite number",
        "share": _SHARE,
    }

    target: int
    size: int = 3
    value: float = 1.0
    share: float = 0.5

    def change(self, inputs: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """Return the images with the trigger's patch, and the target class as every label."""
        _check_labels(labels, None, "attackers.poison: Trigger")
        smallest = min(inputs.shape[-2:])
        if self.size > smallest:
            raise ConfigurationError(
                f"attackers.poison: size must be at most {smallest}, the size of the images, got {self.size}"
            )
        changed = inputs.clone()
        changed[..., -self.size :, -self.size :] = self.value
        return changed, torch.full_like(labels, self.target)


def _check_labels(labels: Tensor, num_classes: int | None, rule: str) -> None:
    """Raise ConfigurationError unless labels are class numbers in [0, num_classes)."""
    if labels.ndim > 1 and labels.is_floating_point():
        raise ConfigurationError(
            f"{rule} changes class numbers, got rows of shape {tuple(labels.shape[1:])} in {labels.dtype}, "
            "such as one-hot rows: let the data set return the number of the class"
        )
    if num_classes is None:
        return
    wrong = labels[(labels < 0) | (labels >= num_classes)]
    if len(wrong):
        raise ConfigurationError(
            f"{rule}: num_classes must be above every label, and labels at least 0, got num_classes "
            f"{num_classes} and a label {int(wrong[0])}"
        )


def owners_of(shards: Sequence[FlatShards], num_examples: int) -> Tensor:
    """Return which client owns each of N examples, shape (N,); -1 for examples without a client.

    Raises:
        ConfigurationError: if an example belongs to two clients.

    Example:
        >>> owners_of([FlatShards(np.array([2, 0]), np.array([1, 1]))], 4)
        tensor([ 1, -1,  0, -1])
    """
    owners = np.full(num_examples, -1, dtype=np.int64)
    for flat in shards:
        clients = np.repeat(np.arange(len(flat)), flat.num_examples)
        before = owners[flat.indices]
        owners[flat.indices] = clients
        is_shared = (before >= 0) & (before != clients)
        is_shared |= owners[flat.indices] != clients
        if is_shared.any():
            raise ConfigurationError(
                f"data.example_transforms: example {flat.indices[is_shared].min()} belongs to two "
                "clients, which would change it differently: use a partition whose shards do not overlap"
            )
    return torch.from_numpy(owners)


def poisoned_examples(
    shards: FlatShards, clients: Sequence[int], share: float, num_examples: int, seed: int
) -> Tensor:
    """Choose the examples to poison; return each example's attacker, shape (num_examples,), or -1 if it stays clean.

    Args:
        shards: examples that each client trains on.
        clients: the attackers.
        share: share of each attacker's examples that are poisoned, in [0, 1]; rounded to whole examples.
        num_examples: number of examples of the data set.
        seed: seed of the choice.

    Raises:
        ConfigurationError: if an attacker shares an example with a client that does not attack, which
            would train on the changed example.
    """
    is_attacked = np.isin(np.arange(len(shards)), list(clients)).repeat(shards.num_examples)
    shared = np.intersect1d(shards.indices[is_attacked], shards.indices[~is_attacked])
    if len(shared):
        raise ConfigurationError(
            f"attackers: example {shared[0]} is in shards of attackers and of other clients, which would "
            "train on the changed example: use a partition whose shards do not overlap"
        )
    attackers = torch.full((num_examples,), -1)
    for client in clients:
        order = numpy_generator(seed, "poisoned", client).permutation(shards[client].numpy())
        attackers[order[: int(np.rint(share * len(order)))]] = client
    return attackers


# (inputs, labels, client, indices) of examples of one client -> changed (inputs, labels)
Change = Callable[[Tensor, Tensor, int, Tensor], tuple[Tensor, Tensor]]


def changed_reader(
    read: Callable[[Tensor], Any], owners: Tensor, change: Change, option: str
) -> Callable[[Tensor], Any]:
    """Wrap a function that reads batches by index, so that each client's examples are transformed or poisoned.

    Args:
        read: function from indices of examples, shape (B,), to a batch: a pair of inputs and labels.
        owners: client that changes each example, shape (N,); -1 for unchanged examples.
        change: function that changes examples of one client.
        option: name of the option, for errors.
    """

    def read_changed(indices: Tensor) -> Any:
        batch, clients = read(indices), owners[indices]
        present = clients[clients >= 0].unique().tolist()
        if not present:
            return batch
        if not is_pair(batch):
            raise ConfigurationError(
                f"{option} changes batches of inputs and labels, got {type(batch).__name__}: let the data "
                f"set return pairs of tensors, or leave {option} out"
            )
        inputs, labels = (part.clone() for part in batch)
        for client in present:
            rows = (clients == client).nonzero().flatten()
            own = change(inputs[rows], labels[rows], client, indices[rows])
            inputs[rows], labels[rows] = own
        return type(batch)((inputs, labels))

    return read_changed


def transforms_of(transforms: Sequence[ExampleTransform], seed: int) -> Change:
    """Chain example transforms into one function that applies them in order, with a random seed for each example."""

    def change(
        inputs: Tensor, labels: Tensor, client: int, indices: Tensor
    ) -> tuple[Tensor, Tensor]:
        seeds = [derive_seed(seed, "client's example", index) for index in indices.tolist()]
        for transform in transforms:
            inputs, labels = transform.apply(inputs, labels, client, seeds)
        return inputs, labels

    return change


def check_poison(batch: Any, num_classes: int, poison: Poison) -> None:
    """Poison a copy of a batch, and raise ConfigurationError if a label is then outside [0, num_classes)."""
    if not is_pair(batch):
        return
    changed = poison.change(batch[0].clone(), batch[1].clone())[1]
    wrong = changed[(changed < 0) | (changed >= num_classes)]
    if len(wrong):
        raise ConfigurationError(
            f"attackers.poison: target must be a class of the examples, from 0 to {num_classes - 1}, got "
            f"{int(wrong[0])}"
        )


def is_pair(batch: Any) -> bool:
    """Return whether a batch is a tuple or list of two tensors, such as inputs and labels."""
    return (
        type(batch) in (tuple, list)
        and len(batch) == 2
        and all(isinstance(part, Tensor) for part in batch)
    )
