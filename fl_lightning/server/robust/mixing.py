"""Pre-aggregation: mix updates, so that they differ less, and apply a robust rule to the mixtures.

    nearest-neighbour mixing   y_i = mean of the n - f updates nearest to x_i, x_i among them
    bucketing                  y_b = mean of the s updates in bucket b of a random order

Source: Allouah et al. 2023, Fixing by Mixing, Algorithm 1; Karimireddy et al. 2022, Byzantine-Robust
Learning on Heterogeneous Datasets via Bucketing, Algorithm 1. Robust rules fail where honest
clients' data differ; mixed updates differ less. The last bucket may be smaller than the others.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

import numpy as np
from typing_extensions import override

from fl_lightning.core.errors import ConfigurationError, check_range
from fl_lightning.core.seeds import check_seed, numpy_generator, run_seed
from fl_lightning.server.robust.matrix import Floats, MixedRows, Rows
from fl_lightning.server.robust.passes import squared_distances
from fl_lightning.server.robust.rule import RobustRule, RuleContext, check_num_attackers


@final
@dataclass(frozen=True)
class NearestNeighbourMixing(RobustRule):
    """Replaces every update by the mean of its n - f nearest ones.

    Args:
        rule: rule for the mixed updates.
        num_attackers: f ≥ 0; a round needs at least 2f + 1 updates. With 0 all become their mean.

    Raises:
        ConfigurationError: if it is negative, or the rule has a trusted client.
    """

    rule: RobustRule
    num_attackers: int

    def __post_init__(self) -> None:
        check_num_attackers(self, self.num_attackers)
        check_mixable(self.rule)

    @property
    @override
    def min_updates(self) -> int:
        return max(2 * self.num_attackers + 1, self.rule.min_updates)

    @override
    def combine(self, rows: Rows, context: RuleContext) -> Floats:
        count = len(rows) - self.num_attackers
        distances = squared_distances(rows)
        np.fill_diagonal(distances, -1)  # an update is nearest to itself, whatever equals it
        nearest = np.argsort(distances, axis=1, kind="stable")[:, :count]
        matrix = np.zeros((len(rows), len(rows)))
        np.put_along_axis(matrix, nearest, 1 / count, axis=1)
        return self.rule.combine(MixedRows(rows, matrix), context)


@final
@dataclass(frozen=True)
class Bucketing(RobustRule):
    """Replaces buckets of s updates, drawn at random each round, by their means.

    Args:
        rule: rule for the buckets' means; its number of attackers counts buckets.
        bucket_size: s ≥ 1; 1 changes nothing.
        seed: seed of the random buckets; the run's seed if None.

    Raises:
        ConfigurationError: if the size is below 1, or the rule has a trusted client.
    """

    rule: RobustRule
    bucket_size: int = 2
    seed: int | None = None

    def __post_init__(self) -> None:
        check_range("Bucketing: bucket_size", self.bucket_size, "at least 1 update")
        check_seed("Bucketing", self.seed)
        check_mixable(self.rule)

    @property
    @override
    def min_updates(self) -> int:
        return (self.rule.min_updates - 1) * self.bucket_size + 1

    @override
    def combine(self, rows: Rows, context: RuleContext) -> Floats:
        generator = numpy_generator(run_seed(self.seed), "bucketing", context.round_index)
        if self.bucket_size == 1:
            return self.rule.combine(rows, context)
        buckets = np.empty(len(rows), np.int64)
        buckets[generator.permutation(len(rows))] = np.arange(len(rows)) // self.bucket_size
        matrix = (np.arange(buckets.max() + 1)[:, None] == buckets).astype(float)
        return self.rule.combine(MixedRows(rows, matrix / matrix.sum(1, keepdims=True)), context)


def check_mixable(rule: RobustRule) -> None:
    """Raise ConfigurationError if the rule has a trusted client, whose own update it needs."""
    if rule.trusted_client is not None:
        raise ConfigurationError(
            f"{type(rule).__name__} needs the trusted client's own update, and a mixed update belongs to "
            "several clients: use it without pre-aggregation"
        )
