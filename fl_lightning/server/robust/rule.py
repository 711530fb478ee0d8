"""Robust rules, which need all updates of a round together: base classes, medians and pre-aggregation.

Updates are kept (see `UpdateRows`) until the round ends. They have equal weights unless the rule weighs
them: the number of examples is only a client's claim.

Buffers (batch norm's statistics) can be poisoned like deltas. A rule that treats each coordinate by
itself combines them as it does deltas. Other rules judge a whole update by its direction or length,
which does not include buffers; with such a rule each buffer becomes its coordinate-wise median.

Coordinate-wise median and trimmed mean.

    median_j = median_i x_ij,      trimmed_j = mean of x_(f+1)j … x_(n-f)j, in increasing order

Source: Yin et al. 2018, Byzantine-Robust Distributed Learning, Definitions 1 and 2; there a
fraction β of the updates is trimmed at each end, here a number f of them. The median of an even
number is the mean of the two in the middle (torch's is the lower one). Clients have equal weights.

Pre-aggregation: mix updates, so that they differ less, and apply a robust rule to the mixtures.

    nearest-neighbour mixing   y_i = mean of the n - f updates nearest to x_i, x_i among them
    bucketing                  y_b = mean of the s updates in bucket b of a random order

Source: Allouah et al. 2023, Fixing by Mixing, Algorithm 1; Karimireddy et al. 2022, Byzantine-Robust
Learning on Heterogeneous Datasets via Bucketing, Algorithm 1. Robust rules fail where honest
clients' data differ; mixed updates differ less. The last bucket may be smaller than the others.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass, field
from typing import ClassVar, final

import numpy as np
import torch
from torch import Tensor
from typing_extensions import override

from fl_lightning.core.errors import ConfigurationError, Ranged, RoundFailure
from fl_lightning.core.seeds import check_seed, numpy_generator, run_seed
from fl_lightning.core.traits import Trait, Traits
from fl_lightning.server.aggregator import KeptUpdates
from fl_lightning.server.robust.matrix import Floats, Rows, UpdateRows, mixed_rows
from fl_lightning.server.robust.passes import (
    median_weights,
    sorted_sum,
    squared_distances,
    trimmed_weights,
)


@dataclass
class RuleContext:
    """Inputs of a robust rule besides the updates: the round's number, and vectors kept between rounds."""

    round_index: int = 0  # number of the round, for rules that draw at random
    # vectors of shape (k,) by name, which the rule may change; kept from round to round
    memory: dict[str, Floats] = field(default_factory=dict)


@dataclass(kw_only=True)
class RobustRule(Ranged, KeptUpdates):
    """Base of robust aggregators such as the median; subclasses are dataclasses that define `combine`.

    Args:
        memory_gb: memory for updates in GiB (2³⁰ bytes), ≥ 0; the rest goes to a file. With several
            processes, each of them holds all updates of the round at its end.
        folder: folder of that file; the system's temporary folder if None.

    Attributes:
        by_coordinate: whether the rule treats every coordinate separately and in the same way.

    Example:
        >>> class Largest(RobustRule):
        ...     by_coordinate = True
        ...     def combine(self, rows, context):
        ...         return np.concatenate([block.max(0) for _, block in rows.blocks()])
        >>> from fl_lightning.core.update import ClientUpdate
        >>> rule = Largest()
        >>> rule.open(torch.empty(1))
        >>> for client, value in enumerate((1.0, 3.0, 2.0)):
        ...     rule.add(ClientUpdate(client, torch.tensor([value]), torch.empty(0), 1, 1))
        >>> rule.close()
        tensor([3.])
    """

    memory_gb: float = field(default=1.0, repr=False)
    folder: str | None = field(default=None, repr=False)

    ranges: ClassVar[dict[str, str]] = {"memory_gb": "at least 0 and finite"}
    by_coordinate: ClassVar[bool] = False
    _round_index = 0

    @property
    def trusted_client(self) -> int | None:
        """Id of the client whose update judges the others, and which must be in every round; else None."""
        return None

    @property
    def min_updates(self) -> int:
        """Smallest number of updates for which the rule is defined, ≥ 1."""
        return 1

    @abstractmethod
    def combine(self, rows: Rows, context: RuleContext) -> Floats:
        """Return the aggregate of the rows (updates), shape (k,)."""

    @property
    @override
    def traits(self) -> Traits:
        whole = {Trait.ONE_MASK: "compares whole updates, which have the same coordinates"}
        ways = {Trait.ONE_MASK: "share one mask, or set aggregator to OverlapMean"}
        return super().traits | Traits(needs=whole, instead=ways)

    @override
    def start_round(self, round_index: int) -> None:
        self._round_index = round_index

    @override
    def new_rows(self, like: Tensor) -> UpdateRows:
        limit = int(self.memory_gb * 2**30)
        return UpdateRows(like, memory_limit=limit, folder=self.folder)

    @override
    def open(self, like: Tensor) -> None:
        self._like, self._rows = like, self.new_rows(like)
        self.buffers = None

    def close(self) -> Tensor:
        """Apply the rule to the updates and return the aggregate, shape (k,).

        Raises:
            RoundFailure: if the rule needs more updates than there are.
        """
        if (count := len(self._rows)) < self.min_updates:
            raise RoundFailure(
                f"round {self._round_index + 1}: federation.aggregator {self} needs at least {self.min_updates} "
                f"updates, got {count}: use a larger cohort, or lower num_attackers"
            )
        self.buffers = self._combined_buffers(self._rows.buffer_rows())
        memory = {name: value.cpu().numpy() for name, value in self.memory.items()}
        vector = self.combine(self._rows, RuleContext(self._round_index, memory))
        self.memory = {name: torch.from_numpy(value) for name, value in memory.items()}
        del self._rows  # and its file
        return torch.from_numpy(np.ascontiguousarray(vector)).to(self._like)

    def _combined_buffers(self, rows: UpdateRows) -> Tensor | None:
        if not rows.num_columns:
            return None
        if self.by_coordinate:
            vector = self.combine(rows, RuleContext(self._round_index))
        else:
            vector = sorted_sum(rows, median_weights(len(rows)))
        return torch.from_numpy(vector).to(self._like.device)


@dataclass
class AgainstAttackers(RobustRule):
    """Base of robust aggregators that tolerate a given number f of attackers.

    Attributes:
        needed: (a, b): a round needs at least a f + b updates.
    """

    num_attackers: int

    ranges: ClassVar[dict[str, str]] = {"num_attackers": "at least 0 clients"}
    needed: ClassVar[tuple[int, int]]

    @property
    @override
    def min_updates(self) -> int:
        return self.needed[0] * self.num_attackers + self.needed[1]


@final
@dataclass
class Median(RobustRule):
    """The median of every coordinate; tolerates fewer than half of the clients as attackers."""

    by_coordinate = True

    @override
    def combine(self, rows: Rows, context: RuleContext) -> Floats:
        return sorted_sum(rows, median_weights(len(rows)))


@final
@dataclass
class TrimmedMean(AgainstAttackers):
    """The mean of every coordinate without its f smallest and its f largest values.

    Args:
        num_attackers: f ≥ 0; a round needs at least 2f + 1 updates. f = 0 gives the plain mean.

    Raises:
        ConfigurationError: if it is negative.
    """

    by_coordinate = True
    needed = 2, 1

    @override
    def combine(self, rows: Rows, context: RuleContext) -> Floats:
        return sorted_sum(rows, trimmed_weights(len(rows), self.num_attackers))


@final
@dataclass
class NearestNeighbourMixing(RobustRule):
    """Replaces every update by the mean of the n - f nearest updates (itself included), then applies a rule.

    Args:
        rule: rule for the mixed updates.
        num_attackers: f ≥ 0; a round needs at least 2f + 1 updates. f = 0 replaces all by their mean.

    Raises:
        ConfigurationError: if it is negative, or the rule has a trusted client.
    """

    rule: RobustRule
    num_attackers: int

    ranges: ClassVar[dict[str, str]] = {"num_attackers": "at least 0 clients"}

    def __post_init__(self) -> None:
        super().__post_init__()
        check_mixable(self.rule)
        self.weight_by_examples = self.rule.weight_by_examples

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
        return self.rule.combine(mixed_rows(rows, matrix), context)


@final
@dataclass
class Bucketing(RobustRule):
    """Averages updates in random buckets of s, and applies a robust rule to the averages.

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

    ranges: ClassVar[dict[str, str]] = {"bucket_size": "at least 1 update"}

    def __post_init__(self) -> None:
        super().__post_init__()
        check_seed("Bucketing", self.seed)
        check_mixable(self.rule)
        self.weight_by_examples = self.rule.weight_by_examples

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
        return self.rule.combine(mixed_rows(rows, matrix / matrix.sum(1, keepdims=True)), context)


def check_mixable(rule: RobustRule) -> None:
    """Raise ConfigurationError if a rule relies on a trusted client's update, which mixing would change."""
    if rule.trusted_client is not None:
        raise ConfigurationError(
            f"{type(rule).__name__} needs the update of its trusted client, and pre-aggregation mixes the updates "
            f"of several clients: use {type(rule).__name__} alone"
        )
