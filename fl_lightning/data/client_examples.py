"""Transforms of clients' examples, input and label, that differ between clients.

    example of client c  →  apply(example, c, seed of the example)

An example belongs to one client, so it is changed in the same way whenever it is read: in training, in
the client's held-out part, with every engine and after a restart. This is no augmentation.

Sources: rotated images, Ghosh et al. 2020, NeurIPS, section 6.1; permuted labels, Sattler et al. 2021,
IEEE TNNLS, section VI.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, final

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.utils.data import DataLoader, default_collate

from fl_lightning.core.errors import ConfigurationError
from fl_lightning.core.seeds import derive_seed, numpy_generator
from fl_lightning.data.partitions.flat_shards import FlatShards
from fl_lightning.data.shards import gathers


class ExampleTransform(Protocol):
    """A transform of a whole example, including its label, that may differ between clients."""

    def apply(self, example: Any, client: int, seed: int) -> Any:
        """Return the transformed example.

        Args:
            example: example of the data set; do not change it in place.
            client: client that owns the example.
            seed: seed of this example, for random transforms.
        """
        ...


@final
@dataclass(frozen=True)
class QuarterTurns:
    """Rotates the images of client c by c mod ``num_groups`` right angles, counterclockwise.

    Examples are tuples that begin with an image (…, H, W).

    Args:
        num_groups: 1 to 4; 1 rotates none, 2 rotates the images of every second client.

    Raises:
        ConfigurationError: for another number.

    Example:
        >>> QuarterTurns().apply((torch.tensor([[1, 2], [3, 4]]), "label"), client=5, seed=0)
        (tensor([[2, 4],
                [1, 3]]), 'label')
    """

    num_groups: int = 4

    def __post_init__(self) -> None:
        if not 1 <= self.num_groups <= 4:
            raise ConfigurationError(
                f"QuarterTurns: num_groups must be from 1 to 4, got {self.num_groups}"
            )

    def apply(self, example: Any, client: int, seed: int) -> Any:
        """Return the example with its image turned."""
        image, *rest = _parts(example, "QuarterTurns", 1)
        if not isinstance(image, Tensor) or image.ndim < 2:
            raise ConfigurationError(
                f"data.example_transforms: QuarterTurns turns tensors (…, H, W), got {_shown(image)}"
            )
        turned = torch.rot90(image, client % self.num_groups, (-2, -1))
        if turned.shape != image.shape:
            raise ConfigurationError(
                "data.example_transforms: QuarterTurns needs images as high as they are wide, got "
                f"{tuple(image.shape)}"
            )
        return type(example)((turned, *rest))


@final
@dataclass(frozen=True)
class LabelPermutation:
    """Permutes the classes differently for each group of clients: class 3 of one may be 7 of another.

    Client c is in group c mod ``num_groups``; group 0 keeps its labels. Examples are pairs that end with
    a class.

    Args:
        num_classes: number of classes, ≥ 2.
        num_groups: number of groups, ≥ 1; 1 changes nothing.
        seed: seed of the permutations.

    Raises:
        ConfigurationError: for values out of range.

    Example:
        >>> [LabelPermutation(4, 2).apply(("image", label), client=1, seed=0)[1] for label in range(4)]
        [3, 1, 0, 2]
    """

    num_classes: int
    num_groups: int = 2
    seed: int = 0

    def __post_init__(self) -> None:
        if self.num_classes < 2 or self.num_groups < 1:
            raise ConfigurationError(
                "LabelPermutation: num_classes must be at least 2 and num_groups at least 1, got "
                f"{self.num_classes} and {self.num_groups}"
            )

    def apply(self, example: Any, client: int, seed: int) -> Any:
        """Return the example with another label."""
        inputs, label = _parts(example, "LabelPermutation", 2)
        if not 0 <= int(label) < self.num_classes:
            raise ConfigurationError(
                f"data.example_transforms: LabelPermutation has num_classes {self.num_classes}, and "
                f"there is a label {int(label)}"
            )
        group = client % self.num_groups
        if not group:
            return example
        generator = numpy_generator(self.seed, "label permutation", group)
        renamed = int(generator.permutation(self.num_classes)[int(label)])
        return type(example)(
            (inputs, torch.full_like(label, renamed) if isinstance(label, Tensor) else renamed)
        )


def _parts(example: Any, name: str, least: int) -> Sequence[Any]:
    exact = least == 2
    if type(example) not in (tuple, list) or (
        len(example) != least if exact else len(example) < least
    ):
        what = "pairs of input and label" if exact else "tuples that begin with an image"
        raise ConfigurationError(
            f"data.example_transforms: {name} changes examples that are {what}, got {_shown(example)}"
        )
    return example  # type: ignore[no-any-return]


def _shown(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"a tensor of shape {tuple(value.shape)}"
    return type(value).__name__


def owners_of(shards: Sequence[FlatShards], num_examples: int) -> npt.NDArray[np.int64]:
    """Client that owns each example, shape (N,); -1 for no client.

    Args:
        shards: shards of training, validation and test.
        num_examples: N.

    Raises:
        ConfigurationError: if an example belongs to two clients.

    Example:
        >>> owners_of([FlatShards(np.array([2, 0]), np.array([1, 1]))], 4)
        array([ 1, -1,  0, -1])
    """
    owners = np.full(num_examples, -1, dtype=np.int64)
    for flat in shards:
        clients = np.repeat(np.arange(len(flat)), flat.sizes)
        before = owners[flat.indices]
        owners[flat.indices] = clients
        shared = ((before >= 0) & (before != clients)) | (owners[flat.indices] != clients)
        if shared.any():
            raise ConfigurationError(
                f"data.example_transforms: example {flat.indices[shared][0]} belongs to two clients, "
                "which would change it differently: use a partition whose shards do not overlap"
            )
    return owners


def changed_reader(
    loader: DataLoader[Any],
    dataset: Any,
    transforms: Sequence[ExampleTransform],
    owners: Callable[[], npt.NDArray[np.int64]],
    seed: int,
) -> Callable[[Tensor], Any]:
    """Return a function from indices, shape (B,), to a batch of transformed examples.

    Args:
        loader: loader whose collate function makes batches of examples, or converts a whole batch.
        dataset: data set of the loader, with or without augmentation.
        transforms: the transforms, in order.
        owners: returns the client of each example.
        seed: seed of the data module.
    """
    at_once = loader.batch_sampler is None
    collate = _whole_batch(loader, dataset) if at_once else loader.collate_fn

    def changed(index: int) -> Any:
        client = int(owners()[index])
        example = _row(dataset[[index]]) if at_once else dataset[index]
        if client < 0:
            return example
        own = derive_seed(seed, "client's example", index)
        for transform in transforms:
            example = transform.apply(example, client, own)
        return example

    return lambda indices: collate([changed(index) for index in indices.tolist()])


def _whole_batch(loader: DataLoader[Any], dataset: Any) -> Callable[[list[Any]], Any]:
    """Return a function from examples to a batch, for data sets that return whole batches."""

    def of_examples(examples: list[Any]) -> Any:
        batch: Any = default_collate(examples)
        if type(examples[0]) is tuple:
            batch = tuple(batch)
        return batch if gathers(dataset, loader.collate_fn) else loader.collate_fn(batch)

    return of_examples


def _row(batch: Any) -> Any:
    """Return the example of a batch of one."""
    if isinstance(batch, Mapping):
        return {name: _row(part) for name, part in batch.items()}
    if type(batch) in (tuple, list):
        return type(batch)(_row(part) for part in batch)
    try:
        return batch[0]
    except (TypeError, LookupError) as error:
        raise ConfigurationError(
            "data.example_transforms: the data set's batches are of "
            f"{type(batch).__name__}, of which no example can be taken: return a DataLoader with a "
            "batch_size over single examples"
        ) from error
