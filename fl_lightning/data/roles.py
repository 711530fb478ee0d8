"""Roles of a client's examples (training, search, validation, test), and the partition into clients.

    shard = train ∪ search ∪ validation ∪ test, disjoint; parts are held out one by one, at random

In a search over architectures, the weights are trained on one half of a client's examples, and the
architecture's choices on the other half. A batch contains as many examples of each half of one client:

    {"train": examples of the first half, "search": their partners in the second half}

The partner of an example is drawn once per run. So a batch is a function of its training examples, and a
shuffled pass over one half is a shuffled pass over the other. Source: Liu et al. 2019, section 2.2 (two
halves of the training set); He et al. 2020, section 3.2 (two halves of every client's).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.utils.data import Dataset

from fl_lightning.core.errors import ConfigurationError, check_range
from fl_lightning.core.seeds import numpy_generator
from fl_lightning.data.columns import read_column
from fl_lightning.data.partitions.partition import Partition
from fl_lightning.data.shards import FlatShards
from fl_lightning.data.training_set import TrainingSet

# largest share of a client's examples that can be held out: a tenth is left for training
_MOST_HELD_OUT = 0.9


@dataclass(frozen=True)
class Roles:
    """Every client's examples, divided by use: training, architecture search, validation and test.

    Attributes:
        train: training examples; in a search over architectures, those for the weights.
        search: examples that train the architecture's choices in a search; empty otherwise.
        learning: training and search examples together, in their order before the split.
        validation: examples for validation.
        test: examples for the test.

    Example:
        >>> roles = Roles.of(FlatShards.of([np.arange(10)]), validation=0.2, test=0.3, seed=0)
        >>> [len(shards[0]) for shards in (roles.train, roles.validation, roles.test)]
        [5, 2, 3]
    """

    train: FlatShards
    search: FlatShards
    learning: FlatShards
    validation: FlatShards
    test: FlatShards

    @classmethod
    def of(
        cls, shards: FlatShards, *, validation: float, test: float, search: float = 0.0, seed: int
    ) -> Self:
        """Split every client's examples at random into parts for training, search, validation and test.

        Args:
            shards: all examples of each client.
            validation: share for validation, in [0, 1).
            test: share for the test, in [0, 1).
            search: share of the rest for a search, in [0, 0.5].
            seed: seed of the choice.
        """
        rest, validated = shards.hold_out(validation, numpy_generator(seed, "client validation"))
        share_of_rest = test / (1 - validation)
        learning, tested = rest.hold_out(share_of_rest, numpy_generator(seed, "client test"))
        train, searched = learning, FlatShards.of([])
        if search:
            half = numpy_generator(seed, "search half")
            train, searched = learning.hold_out(search, half, at_most_half=True)
        return cls(train, searched, learning, validated, tested)

    def placed(self, places: Mapping[int, int], num_clients: int) -> Self:
        """Renumber the clients as clients of a larger federation, whose other clients get no examples.

        Args:
            places: number of the local client, by number of the federation's client.
            num_clients: number of clients of the federation.

        Raises:
            ConfigurationError: if there is no such client.

        Example:
            >>> roles = Roles.of(FlatShards.of([np.arange(4)]), validation=0.0, test=0.0, seed=0)
            >>> roles.placed({2: 0}, num_clients=3).train.num_examples
            array([0, 0, 4])
        """
        for client, place in places.items():
            if not (0 <= client < num_clients and 0 <= place < len(self.train)):
                raise ConfigurationError(
                    f"site.yaml: clients has {client}: {place}, but the federation has clients 0 to "
                    f"{num_clients - 1}, and this site's data have clients 0 to {len(self.train) - 1}"
                )
        clients = sorted(places)

        def moved(shards: FlatShards) -> FlatShards:
            indices, sizes = shards.take([places[client] for client in clients])
            num_examples = np.zeros(num_clients, np.int64)
            num_examples[clients] = sizes
            return FlatShards(indices.numpy(), num_examples)

        parts = (self.train, self.search, self.learning, self.validation, self.test)
        return type(self)(*(moved(part) if len(part) else part for part in parts))


def check_fractions(validation: float, test: float, search: float = 0.0) -> None:
    """Raise ConfigurationError if the share of examples for validation, test or search is out of range."""
    if not 0 <= search <= 0.5:
        raise ConfigurationError(
            f"search_fraction must be 0 or in (0, 0.5], got {search}: it is the share of a client's "
            "examples that train the architecture's choices and not the weights"
        )
    advice = ": it is the share of its examples that a client never trains on"
    check_range("client_val_fraction", validation, "in [0, 1)", advice)
    check_range("client_test_fraction", test, "in [0, 1)", advice)
    if validation + test > _MOST_HELD_OUT:
        raise ConfigurationError(
            f"client_val_fraction and client_test_fraction must be at most {_MOST_HELD_OUT} together, got "
            f"{validation} and {test}: clients train on the rest"
        )


def check_drawn_once(training: TrainingSet) -> None:
    """Raise ConfigurationError if the source's sampler repeats examples, so that clients cannot hold any out."""
    drawn = training.drawn.indices
    if drawn is not None and len(drawn.unique()) < len(drawn):
        raise ConfigurationError(
            "client_val_fraction and client_test_fraction need a sampler that draws each example once, "
            f"got {len(drawn)} draws of {len(drawn.unique())} examples: a client would train on its own "
            "held-out examples. Use a WeightedRandomSampler instead, or leave both fractions at 0"
        )


def partners(training: FlatShards, search: FlatShards) -> Tensor:
    """Pair each training example with a search example of its client; return partners by index, -1 for none.

    Args:
        training: examples of each client that train the weights.
        search: examples of each client that train the architecture; no more than the others.

    Raises:
        ConfigurationError: if a client has examples in one half only, or an example belongs to several
            clients, so that it would have several partners.

    Example:
        >>> partners(FlatShards.of([np.array([4, 0])]), FlatShards.of([np.array([2])]))
        tensor([ 2, -1, -1, -1,  2])
    """
    lonely = np.flatnonzero((training.num_examples > 0) & (search.num_examples == 0))
    if len(lonely):
        raise ConfigurationError(
            f"search_fraction: client {lonely[0]} has one example, and a search needs two per "
            "client, one for the weights and one for the architecture: use a partition with more "
            "examples per client"
        )
    mine, theirs = training.indices, search.indices
    if len(np.unique(mine)) < len(mine) or len(np.unique(theirs)) < len(theirs):
        raise ConfigurationError(
            "search_fraction: some examples belong to several clients, and would need several partners: use "
            "a partition whose shards do not overlap"
        )
    owner = np.repeat(np.arange(len(training)), training.num_examples)
    rank = np.arange(len(mine)) - training.starts[owner]
    found = torch.full((int(mine.max(initial=-1)) + 1,), -1)
    chosen = theirs[search.starts[owner] + rank % search.num_examples[owner]]
    found[torch.from_numpy(mine).long()] = torch.from_numpy(chosen).long()
    return found


def divide(
    training: TrainingSet,
    partition: Partition,
    num_clients: int | None,
    classes: Callable[[], npt.NDArray[Any]],
    seed: int,
) -> FlatShards:
    """Divide among the clients, by a partition, the examples that the training loader draws.

    Args:
        training: the training data set, of which all examples or some are drawn.
        partition: the rule.
        num_clients: number of clients; None if the partition determines it.
        classes: function that returns one label per example, for partitions that read labels.
        seed: seed of the partition.

    Raises:
        ConfigurationError: if there is no number of clients, or the partition is impossible.
    """
    name, drawn = type(partition).__name__, training.drawn.indices
    if not len(training if drawn is None else drawn):
        raise ConfigurationError("the source has no training examples: there is nothing to divide")
    owners = getattr(partition, "attribute", None)
    column = _column(training.dataset, partition, classes)
    if drawn is not None:
        column = column[drawn.numpy()]
    if num_clients is None and owners is not None:
        num_clients = len(np.unique(column))
    if num_clients is None:
        raise ConfigurationError(
            f"FederatedDataModule needs num_clients with the partition {name}: set it to the number of clients"
        )
    shards = FlatShards.of(partition.assign(column, num_clients, seed))
    if len(shards) != num_clients:
        raise ConfigurationError(
            f"{name}.assign must return a shard for each of {num_clients} clients, got {len(shards)}"
        )
    if (last := int(shards.indices.max(initial=-1))) >= len(column):
        raise ConfigurationError(
            f"{name}.assign must return indices below the number of training examples, {len(column)}, "
            f"got {last}"
        )
    # the partition's indices count only the drawn examples
    return (
        shards if drawn is None else FlatShards(drawn.numpy()[shards.indices], shards.num_examples)
    )


def _column(
    dataset: Dataset[Any], partition: Partition, classes: Callable[[], npt.NDArray[Any]]
) -> npt.NDArray[Any]:
    """Return the values by which a partition divides examples, e.g. labels or owners, one per example."""
    if (owners := getattr(partition, "attribute", None)) is not None:
        return read_column(dataset, owners, "partition.attribute")
    if not getattr(partition, "uses_labels", True):
        return np.zeros(len(dataset), np.int8)  # type: ignore[arg-type]
    labels = classes()
    if labels.ndim > 1:
        raise ConfigurationError(
            f"{type(partition).__name__} needs one label per example, got rows of {labels.shape[1]} "
            "numbers that are not one-hot: set data.labels to a column of classes, or to a function that "
            "returns one class per example"
        )
    return labels
