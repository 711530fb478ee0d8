"""A partition at work: what it looks at, and whose examples are whose by it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from fl_lightning.core.errors import ConfigurationError
from fl_lightning.data.columns import read_column
from fl_lightning.data.partitions.flat_shards import FlatShards
from fl_lightning.data.partitions.partition import Partition, PartitionRule, as_rule
from fl_lightning.data.training_set import TrainingSet


def divide(
    examples: TrainingSet,
    partition: Partition,
    num_clients: int | None,
    classes: Callable[[], npt.NDArray[Any]],
    seed: int,
) -> FlatShards:
    """Return the examples of every client, of those that the training loader draws.

    Args:
        examples: what is divided.
        partition: by which rule.
        num_clients: among how many; None if the partition knows.
        classes: finds one label per example of the data set, for partitions that look at them.
        seed: of the partition's draws.

    Raises:
        ConfigurationError: if there is no number of clients, or the partition cannot do it.
    """
    name, drawn = type(partition).__name__, examples.drawn.indices
    rule = as_rule(partition)
    column = _column(examples, rule, name, classes)
    if drawn is not None:
        column = column[drawn.numpy()]
    if num_clients is None and rule.owners is not None:
        num_clients = len(np.unique(column))
    if num_clients is None:
        raise ConfigurationError(f"FederatedDataModule needs num_clients with {name}")
    shards = FlatShards.of(rule.assign(column, num_clients, seed))
    if len(shards) != num_clients:
        raise ConfigurationError(
            f"{name}.assign must return a shard for each of {num_clients} clients, got {len(shards)}"
        )
    last = int(shards.indices.max(initial=-1))
    if last >= len(column):
        raise ConfigurationError(
            f"{name}.assign must return indices below the number of training examples, {len(column)}, "
            f"got {last}"
        )
    # a partition counts the examples that are drawn
    return shards if drawn is None else FlatShards(drawn.numpy()[shards.indices], shards.sizes)


def _column(
    examples: TrainingSet,
    rule: PartitionRule,
    name: str,
    classes: Callable[[], npt.NDArray[Any]],
) -> npt.NDArray[Any]:
    """Return what a partition of a name looks at, one value per example of the data set."""
    if rule.owners is not None:
        return read_column(examples.dataset, rule.owners, "partition.attribute")
    if not rule.uses_labels:
        return np.zeros(len(examples), np.int8)
    labels = classes()
    if labels.ndim > 1:
        raise ConfigurationError(
            f"{name} needs one label per example, got rows of {labels.shape[1]} "
            "numbers that are not one-hot: set data.labels to what names one class, e.g. a function of "
            "the data set"
        )
    return labels
