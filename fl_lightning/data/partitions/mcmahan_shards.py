"""Sort the examples by label, cut them into K · s equal pieces, deal s pieces to each of K clients.

Source: McMahan et al. 2017 (1602.05629), section 3, with 200 pieces of 300 digits for 100 clients.
Differs: all examples are used, also where their number is no multiple of K · s. Their *shard* is a
*piece* here: a shard is all that a client has.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

import numpy as np

from fl_lightning.core.errors import ConfigurationError
from fl_lightning.core.seeds import numpy_generator
from fl_lightning.data.partitions.flat_shards import FlatShards
from fl_lightning.data.partitions.partition import (
    PartitionRule,
    check_at_least,
    check_sizes,
    shards_of,
)


@final
@dataclass(frozen=True, kw_only=True)
class McMahanShards(PartitionRule):
    """Sort the examples by label, cut them into equal pieces, deal the pieces out at random.

    A client sees few classes, but not a fixed number: a piece may straddle two classes, and two
    pieces may be of the same class. `LabelShards` fixes the number.

    Args:
        shards_per_client: pieces that each client gets, ≥ 1; the paper has 2.

    Example:
        >>> labels = np.repeat(np.arange(10), 60)
        >>> shards = McMahanShards(shards_per_client=2).assign(labels, num_clients=10, seed=0)
        >>> {len(shard) for shard in shards}, max(len(set(labels[shard])) for shard in shards)
        ({60}, 2)
    """

    shards_per_client: int = 2

    def __post_init__(self) -> None:
        check_at_least("shards_per_client", self.shards_per_client, 1)

    def assign(self, labels: np.ndarray, num_clients: int, seed: int) -> FlatShards:
        """Return the shards, as `Partition.assign` says."""
        check_sizes(labels, num_clients)
        num_pieces, num_examples = num_clients * self.shards_per_client, len(labels)
        if num_pieces > num_examples:
            raise ConfigurationError(
                f"num_clients * shards_per_client must be at most the number of examples, "
                f"{num_examples}, got {num_clients} * {self.shards_per_client}: lower either"
            )
        rng = numpy_generator(seed, "partition", num_clients)
        shuffled = rng.permutation(num_examples)
        by_label = shuffled[np.argsort(labels[shuffled], kind="stable")]
        piece = np.arange(num_examples) * num_pieces // num_examples
        owner = np.empty(num_examples, dtype=np.int64)
        owner[by_label] = (rng.permutation(num_pieces) % num_clients)[piece]
        return shards_of(owner, num_clients)
