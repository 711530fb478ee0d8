"""Partitions with Dirichlet-distributed mixtures of classes.

    DirichletPerClass   every class spread over the K clients with q ~ Dir_K(alpha)
    DirichletPerClient  every client draws its classes from q ~ Dir(alpha · prior), sizes within one

Sources: Yurochkin et al. 2019 (1905.12022), section 4, and Li et al. 2022 (2102.02079) (per class);
Hsu et al. 2019 (1909.06335) (per client).
Differs: all examples are used, even if N is no multiple of K; DirichletPerClass does not redirect
examples away from large clients, and raises after a number of draws.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

import numpy as np
from typing_extensions import override

from fl_lightning.core.errors import ConfigurationError, check_range
from fl_lightning.core.seeds import numpy_generator
from fl_lightning.data.columns import classes_of
from fl_lightning.data.partitions.partition import (
    Partition,
    check_concentration,
    check_sizes,
    check_smallest,
    deal,
    even_sizes,
)
from fl_lightning.data.shards import FlatShards

MAX_REDRAWS = 10_000  # draws of DirichletPerClass before it raises, fewer if a draw is large
MAX_DRAWN_SHARES = 20_000_000


@final
@dataclass(frozen=True, kw_only=True)
class DirichletPerClass(Partition):
    """Spreads each class over the K clients in shares drawn from a Dirichlet distribution, Dir_K(alpha).

    Clients differ in size as well as in classes. The draw is repeated until every client has
    ``min_examples``.

    Args:
        alpha: concentration, > 0: at 1e6 all clients are alike, at 0.1 few clients have most of a class.
        min_examples: smallest number of examples of a client, ≥ 1; Li et al. use 10.

    Example:
        >>> labels = np.repeat(np.arange(3), 50)
        >>> rule = DirichletPerClass(alpha=0.5, min_examples=10)
        >>> shards = rule.assign(labels, num_clients=4, seed=0)
        >>> sum(len(shard) for shard in shards), min(len(shard) for shard in shards) >= 10
        (150, True)
    """

    alpha: float
    min_examples: int = 1

    def __post_init__(self) -> None:
        check_concentration(self.alpha)
        check_range("min_examples", self.min_examples, "at least 1")

    @override
    def assign(self, labels: np.ndarray, num_clients: int, seed: int) -> FlatShards:
        check_sizes(labels, num_clients)
        classes, class_sizes = classes_of(labels, type(self).__name__)
        rng = numpy_generator(seed, "partition", num_clients)
        check_smallest(self.min_examples, num_clients, len(labels))
        tries = max(20, min(MAX_REDRAWS, MAX_DRAWN_SHARES // (num_clients * len(class_sizes))))
        for _ in range(tries):
            counts = self._draw(class_sizes, num_clients, rng)
            if counts.sum(axis=1).min() >= self.min_examples:
                return deal(counts, classes, rng)
        raise ConfigurationError(
            f"min_examples: in each of {tries} draws with alpha={self.alpha}, one of the {num_clients} "
            f"clients had fewer than {self.min_examples} of the {len(labels)} examples. Raise alpha, lower "
            "min_examples or num_clients, or use DirichletPerClient, whose clients are equally large"
        )

    def _draw(
        self, class_sizes: np.ndarray, num_clients: int, rng: np.random.Generator
    ) -> np.ndarray:
        shares = rng.dirichlet(np.full(num_clients, self.alpha), size=len(class_sizes))
        cuts = np.rint(shares.cumsum(axis=1) * class_sizes[:, None]).astype(np.int64)
        cuts[:, -1] = class_sizes  # no example is left over by rounding
        return np.asarray(np.diff(cuts, axis=1, prepend=0).T)


@final
@dataclass(frozen=True, kw_only=True)
class DirichletPerClient(Partition):
    """Gives every client its own mix of classes, drawn from Dir(alpha · class frequencies); all clients are equally large.

    Sizes differ by at most one. One client after the other draws its examples without replacement; if a class is exhausted, the
    client's mix is renormalised over the others. So the last clients get the remaining examples.

    Args:
        alpha: concentration, > 0: at 1e6 all clients are alike, at 1e-3 most have one class.

    Example:
        >>> labels = np.repeat(np.arange(3), 50)
        >>> shards = DirichletPerClient(alpha=0.1).assign(labels, num_clients=4, seed=0)
        >>> sorted(len(shard) for shard in shards)
        [37, 37, 38, 38]
    """

    alpha: float

    def __post_init__(self) -> None:
        check_concentration(self.alpha)

    @override
    def assign(self, labels: np.ndarray, num_clients: int, seed: int) -> FlatShards:
        check_sizes(labels, num_clients)
        classes, class_sizes = classes_of(labels, type(self).__name__)
        rng = numpy_generator(seed, "partition", num_clients)
        concentration = self.alpha * (class_sizes / len(labels))
        left = class_sizes.copy()
        counts = np.empty((num_clients, len(left)), dtype=np.int64)
        for client, size in enumerate(even_sizes(len(labels), num_clients, rng)):
            counts[client] = _draw_client(concentration, left, int(size), rng)
            left -= counts[client]
        return deal(counts, classes, rng)


def _draw_client(
    concentration: np.ndarray, left: np.ndarray, size: int, rng: np.random.Generator
) -> np.ndarray:
    """Draw one client's examples from those left over; return how many of each class, shape (num_classes,).

    It draws a mix of classes, then ``size`` examples one by one. An exhausted class leaves the mix.

    The examples are drawn together: those beyond a class's remainder are dropped and drawn again from
    the other classes. This has the same distribution, with one repetition per exhausted class.

    A Dirichlet draw renormalised over some of its parts is itself a Dirichlet draw over them,
    independent of the others. So if floating point has no mass on the open classes (alpha is small and
    all classes of the mix are exhausted), a new mix over them is exact.
    """
    if np.count_nonzero(left) == len(left):  # the usual case with many clients
        mix = rng.dirichlet(concentration)
        mix /= mix.sum()
        taken = rng.multinomial(size, mix)
        if (taken <= left).all():
            return taken
        taken = np.minimum(taken, left)
    else:
        mix, taken = np.zeros(len(left)), np.zeros_like(left)
    while (missing := size - int(taken.sum())) > 0:
        is_open = taken < left
        mix[~is_open] = 0.0
        if mix.sum() < 1e-12:
            mix[is_open] = rng.dirichlet(concentration[is_open])
        mix /= mix.sum()
        taken = np.minimum(taken + rng.multinomial(missing, mix), left)
    return taken
