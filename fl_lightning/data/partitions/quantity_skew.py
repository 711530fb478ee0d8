"""Partitions in which clients differ in their number of examples, not in their distribution.

    DirichletSizes   shares ~ Dir_K(alpha)
    PowerLawSizes    share of the r-th largest client ∝ r^-exponent,  r = 1 … K

Sizes are the shares times N, rounded by largest remainder, so that all N examples are used; the
examples of a client are drawn uniformly.

Sources: Li et al. 2022, *Federated Learning on Non-IID Data Silos* (2102.02079), quantity skew;
Li et al. 2020, *Federated Optimization in Heterogeneous Networks* (1812.06127), section 5, whose
devices' sizes follow a power law.
Differs: clients below ``min_examples`` are raised to it and the others shrink in proportion (the first
source draws again, and may never end for a small alpha).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar, final

import numpy as np

from fl_lightning.core.errors import ConfigurationError
from fl_lightning.core.seeds import numpy_generator
from fl_lightning.data.partitions.partition import (
    Partition,
    check_at_least,
    check_concentration,
    check_sizes,
    shards_of,
)
from fl_lightning.data.shards import FlatShards


@final
@dataclass(frozen=True, kw_only=True)
class DirichletSizes(Partition):
    """Sizes drawn from a symmetric Dirichlet distribution, examples IID.

    Args:
        alpha: concentration, > 0: at 1e6 sizes are nearly equal, at 0.1 few clients have most examples.
        min_examples: smallest number of examples of a client, ≥ 1.

    Example:
        >>> shards = DirichletSizes(alpha=0.5).assign(np.zeros(100), num_clients=4, seed=0)
        >>> sum(len(shard) for shard in shards), min(len(shard) for shard in shards) >= 1
        (100, True)
    """

    uses_labels: ClassVar[bool] = False

    alpha: float
    min_examples: int = 1

    def __post_init__(self) -> None:
        check_concentration(self.alpha)
        check_at_least("min_examples", self.min_examples, 1)

    def assign(self, labels: np.ndarray, num_clients: int, seed: int) -> FlatShards:
        """Return the shards, as `Partition.assign` says."""
        check_sizes(labels, num_clients)
        rng = numpy_generator(seed, "partition", num_clients)
        shares = rng.dirichlet(np.full(num_clients, self.alpha))
        return _deal_sizes(proportional_sizes(shares, len(labels), self.min_examples), rng)


@final
@dataclass(frozen=True, kw_only=True)
class PowerLawSizes(Partition):
    """Sizes that decrease as a power of the client's random rank, examples IID.

    Args:
        exponent: exponent ≥ 0: 0 gives equal sizes, 1 makes the second client half as large as the
            first.
        min_examples: smallest number of examples of a client, ≥ 1.

    Example:
        >>> shards = PowerLawSizes(exponent=1.0).assign(np.zeros(110), num_clients=3, seed=0)
        >>> sorted(len(shard) for shard in shards)
        [20, 30, 60]
    """

    uses_labels: ClassVar[bool] = False

    exponent: float
    min_examples: int = 1

    def __post_init__(self) -> None:
        if not (self.exponent >= 0 and math.isfinite(self.exponent)):
            raise ConfigurationError(
                f"exponent must be at least 0 and finite, got {self.exponent}: 0 means equal sizes"
            )
        check_at_least("min_examples", self.min_examples, 1)

    def assign(self, labels: np.ndarray, num_clients: int, seed: int) -> FlatShards:
        """Return the shards, as `Partition.assign` says."""
        check_sizes(labels, num_clients)
        rng = numpy_generator(seed, "partition", num_clients)
        shares = np.arange(1.0, num_clients + 1) ** -self.exponent
        sizes = proportional_sizes(shares, len(labels), self.min_examples)
        return _deal_sizes(rng.permutation(sizes), rng)


def proportional_sizes(shares: np.ndarray, total: int, min_examples: int) -> np.ndarray:
    """Integer sizes ≥ ``min_examples`` in proportion to ``shares`` that sum to ``total``.

    Args:
        shares: shape (num_clients,), ≥ 0, any positive sum.
        total: number of all examples.
        min_examples: smallest size of a client.

    Raises:
        ConfigurationError: if ``total`` is too small for that minimum.

    Example:
        >>> proportional_sizes(np.array([6.0, 3.0, 0.0]), 10, min_examples=1)
        array([6, 3, 1])
    """
    if min_examples * len(shares) > total:
        raise ConfigurationError(
            f"min_examples must be at most {total // len(shares)} ({total} examples over "
            f"{len(shares)} clients), got {min_examples}: lower it or num_clients"
        )
    lifted = np.zeros(len(shares), dtype=bool)
    while True:  # ends, because each iteration lifts at least one more client
        rest = total - min_examples * lifted.sum()
        exact = np.where(lifted, min_examples, rest * shares / max(shares[~lifted].sum(), 1e-300))
        below = ~lifted & (exact < min_examples)
        if not below.any():
            break
        lifted |= below
    sizes = np.floor(exact).astype(np.int64)
    largest_remainders = np.argsort(-(exact - sizes), kind="stable")[: total - sizes.sum()]
    sizes[largest_remainders] += 1
    return sizes


def _deal_sizes(sizes: np.ndarray, rng: np.random.Generator) -> FlatShards:
    owner = np.repeat(np.arange(len(sizes)), sizes)
    return shards_of(rng.permutation(owner), len(sizes))
