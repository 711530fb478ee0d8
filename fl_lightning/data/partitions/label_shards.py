"""Every client holds exactly Nc classes, all clients are equally large, everything is used.

Source: the idea of McMahan et al. 2017 (1602.05629), section 3, that a client sees only two digits;
their own construction, `fl_lightning.data.partitions.mcmahan_shards`, does not ensure it.
Differs: exactly so many classes, whatever the classes' sizes and however many clients there are.
How it is done: `fl_lightning.data.partitions.class_graph`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

import numpy as np

from fl_lightning.core.errors import ConfigurationError
from fl_lightning.core.seeds import numpy_generator
from fl_lightning.data.classes import classes_of
from fl_lightning.data.partitions.class_graph import (
    class_slots,
    draw_holders,
    even_counts,
    size_excess,
)
from fl_lightning.data.partitions.flat_shards import FlatShards
from fl_lightning.data.partitions.partition import PartitionRule, check_at_least, check_sizes, deal

MAX_GRAPHS = 16  # nearly always the first or second will do


@final
@dataclass(frozen=True, kw_only=True)
class LabelShards(PartitionRule):
    """Every client holds exactly ``classes_per_client`` classes, and all are equally large.

    Classes get clients in proportion to their size, a random bipartite graph says which. Sizes
    differ by at most one wherever one of the graphs drawn allows it. Some labels allow none (one
    class per client and classes of unequal size); then as few examples as possible are out of
    place. The other promises hold always: exactly so many classes, disjoint, all used.

    Args:
        classes_per_client: how many classes a client has, in [1, number of classes].

    Example:
        >>> labels = np.repeat(np.arange(4), 10)
        >>> shards = LabelShards(classes_per_client=2).assign(labels, num_clients=4, seed=0)
        >>> [(len(shard), len(set(labels[shard]))) for shard in shards]
        [(10, 2), (10, 2), (10, 2), (10, 2)]
    """

    classes_per_client: int

    def __post_init__(self) -> None:
        check_at_least("classes_per_client", self.classes_per_client, 1)

    def assign(self, labels: np.ndarray, num_clients: int, seed: int) -> FlatShards:
        """Return the shards, as `Partition.assign` says."""
        check_sizes(labels, num_clients)
        classes, class_sizes = classes_of(labels, type(self).__name__)
        self._check(class_sizes, num_clients)
        rng = numpy_generator(seed, "partition", num_clients)
        slots = class_slots(class_sizes, num_clients, self.classes_per_client, rng)
        return deal(_most_even(class_sizes, slots, num_clients, rng), classes, rng)

    def _check(self, class_sizes: np.ndarray, num_clients: int) -> None:
        wanted, num_classes = self.classes_per_client, len(class_sizes)
        if wanted > num_classes:
            raise ConfigurationError(
                f"classes_per_client must be at most the number of classes, {num_classes}, "
                f"got {wanted}: lower it"
            )
        if num_clients * wanted < num_classes:
            raise ConfigurationError(
                f"num_clients * classes_per_client must be at least the number of classes, "
                f"{num_classes}, got {num_clients} * {wanted}: some class would have no client. "
                "Raise either"
            )
        room = int(np.minimum(class_sizes, num_clients).sum())
        if num_clients * wanted > room:
            raise ConfigurationError(
                f"classes_per_client must be at most {room // num_clients} for {num_clients} "
                f"clients, got {wanted}: the classes have too few examples for every client to "
                "get one of each of its classes. Lower classes_per_client or num_clients"
            )


def _most_even(
    class_sizes: np.ndarray, slots: np.ndarray, num_clients: int, rng: np.random.Generator
) -> np.ndarray:
    """Return examples per client and class over the first graph that allows equal sizes.

    If none of those drawn does, over the one that comes closest.
    """
    found = []
    for _ in range(MAX_GRAPHS if slots.sum() > num_clients else 1):  # one class each: all alike
        counts = even_counts(draw_holders(slots, num_clients, rng), class_sizes)
        if size_excess(counts) == 0:
            return counts
        found.append(counts)
    return min(found, key=size_excess)
