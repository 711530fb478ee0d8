"""Partitions in which clients differ in which classes they see.

    LabelShards         every client exactly Nc classes, sizes within one
    McMahanShards       sort by label, cut into K·s shards, deal s to each client
    DirichletPerClass   every class spread over clients with q ~ Dir_K(alpha)
    DirichletPerClient  every client draws its classes from q ~ Dir(alpha · prior), sizes within one

Sources: McMahan et al. 2017 (1602.05629), section 3 (shards); Yurochkin et al. 2019 (1905.12022),
section 4, and Li et al. 2022 (2102.02079) (per class); Hsu et al. 2019 (1909.06335)
(per client).
Differs: all examples are always used, also where N is no multiple of K; DirichletPerClass never
steers examples away from clients that are already large, and gives up with a message.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from scipy.sparse import csr_matrix
from scipy.sparse.csgraph import maximum_flow

from fl_lightning.core.errors import ConfigurationError
from fl_lightning.core.seeds import numpy_generator
from fl_lightning.data.partition import (
    check_at_least,
    check_concentration,
    check_sizes,
    deal,
    even_sizes,
    shards_of,
)

MAX_REDRAWS = 10_000  # of DirichletPerClass, fewer where a draw is large: seconds, then a message
MAX_DRAWN_SHARES = 20_000_000
MAX_GRAPHS = 32  # of LabelShards: nearly always the first or second will do
EVENNESS = (1.0, 0.9, 0.75, 0.5, 0.25, 0.0)  # of a client's classes, the best that is possible


@dataclass(frozen=True, kw_only=True)
class LabelShards:
    """Every client holds exactly ``classes_per_client`` classes, and all are equally large.

    Classes get clients in proportion to their size, a random bipartite graph says which, and a
    maximum flow through it how many examples go where. Sizes differ by at most one wherever one
    of the graphs drawn allows it. Some labels allow none (one class per client and classes of
    unequal size); then the largest client is made as small as possible, next the smallest as
    large as possible. The other promises hold always: exactly so many classes, disjoint, all used.

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

    def assign(self, labels: np.ndarray, num_clients: int, seed: int) -> list[np.ndarray]:
        """Return the shards, as `Partition.assign` says."""
        check_sizes(labels, num_clients)
        _, classes, class_sizes = np.unique(labels, return_inverse=True, return_counts=True)
        self._check(class_sizes, num_clients)
        rng = numpy_generator(seed, "partition", num_clients)
        slots = _class_slots(class_sizes, num_clients, self.classes_per_client, rng)
        counts = _most_equal_counts(class_sizes, num_clients, slots, rng)
        return deal(counts, classes, rng)

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


@dataclass(frozen=True, kw_only=True)
class McMahanShards:
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

    def assign(self, labels: np.ndarray, num_clients: int, seed: int) -> list[np.ndarray]:
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


@dataclass(frozen=True, kw_only=True)
class DirichletPerClass:
    """Every class is spread over the clients with its own draw from Dir_K(alpha).

    Clients differ in size as well as in classes. The draw is repeated until every client has
    ``min_examples``.

    Args:
        alpha: concentration, > 0: at 1e6 all clients are alike, at 0.1 a class sits with few.
        min_examples: the least size of a client, ≥ 1; Li et al. have 10.

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
        check_at_least("min_examples", self.min_examples, 1)

    def assign(self, labels: np.ndarray, num_clients: int, seed: int) -> list[np.ndarray]:
        """Return the shards, as `Partition.assign` says."""
        check_sizes(labels, num_clients)
        _, classes, class_sizes = np.unique(labels, return_inverse=True, return_counts=True)
        rng = numpy_generator(seed, "partition", num_clients)
        tries = max(20, min(MAX_REDRAWS, MAX_DRAWN_SHARES // (num_clients * len(class_sizes))))
        if self.min_examples * num_clients > len(labels):
            tries = 0
        for _ in range(tries):
            counts = self._draw(class_sizes, num_clients, rng)
            if counts.sum(axis=1).min() >= self.min_examples:
                return deal(counts, classes, rng)
        raise ConfigurationError(
            f"min_examples must be reachable: in {tries} draws with alpha={self.alpha} some of "
            f"the {num_clients} clients always had fewer than {self.min_examples} of the "
            f"{len(labels)} examples. Raise alpha, lower min_examples or num_clients, or use "
            "DirichletPerClient, whose clients are equally large"
        )

    def _draw(
        self, class_sizes: np.ndarray, num_clients: int, rng: np.random.Generator
    ) -> np.ndarray:
        shares = rng.dirichlet(np.full(num_clients, self.alpha), size=len(class_sizes))
        cuts = np.rint(shares.cumsum(axis=1) * class_sizes[:, None]).astype(np.int64)
        cuts[:, -1] = class_sizes  # whatever the rounding, nothing is left over
        return np.asarray(np.diff(cuts, axis=1, prepend=0).T)


@dataclass(frozen=True, kw_only=True)
class DirichletPerClient:
    """Every client draws its own mix of classes from Dir(alpha · prior); sizes within one.

    One client after the other draws its examples without replacement; when a class runs out, the
    client's mix is renormalised over the others. So the last clients get what is left over.

    Args:
        alpha: concentration, > 0: at 1e6 all clients are alike, at 1e-3 most see one class.

    Example:
        >>> labels = np.repeat(np.arange(3), 50)
        >>> shards = DirichletPerClient(alpha=0.1).assign(labels, num_clients=4, seed=0)
        >>> sorted(len(shard) for shard in shards)
        [37, 37, 38, 38]
    """

    alpha: float

    def __post_init__(self) -> None:
        check_concentration(self.alpha)

    def assign(self, labels: np.ndarray, num_clients: int, seed: int) -> list[np.ndarray]:
        """Return the shards, as `Partition.assign` says."""
        check_sizes(labels, num_clients)
        _, classes, class_sizes = np.unique(labels, return_inverse=True, return_counts=True)
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
    """Draw a mix of classes, then ``size`` examples one by one; a class that runs out leaves it.

    Drawing many at once, dropping what a class no longer has and drawing the dropped ones again
    from the classes that remain has the same distribution, and takes a turn per exhausted class.

    A Dirichlet draw renormalised over some of its parts is itself a Dirichlet draw over them,
    independent of the others. So where floating point has no mass on the open classes (alpha is
    small and all that the client wanted is gone), a new mix over them is exact.
    """
    mix, taken = np.zeros(len(left)), np.zeros_like(left)
    while (missing := size - int(taken.sum())) > 0:
        is_open = taken < left
        mix[~is_open] = 0.0
        if mix.sum() < 1e-12:
            mix[is_open] = rng.dirichlet(concentration[is_open])
        mix /= mix.sum()
        taken = np.minimum(taken + rng.multinomial(missing, mix), left)
    return taken


def _class_slots(
    class_sizes: np.ndarray, num_clients: int, classes_per_client: int, rng: np.random.Generator
) -> np.ndarray:
    """Return how many clients each class has: proportional to its size, in [1, num_clients].

    Adams' divisor rule: the next slot goes to the class with the most examples per slot so far,
    which makes the largest client as small as possible if a client has one class.
    """
    held = np.arange(1, num_clients)
    priority = class_sizes[:, None] / held
    priority[held >= class_sizes[:, None]] = 0.0  # every client of a class needs an example of it
    ties = rng.random(priority.size)
    num_more = num_clients * classes_per_client - len(class_sizes)
    best = np.lexsort((ties, -priority.ravel()))[:num_more]
    return 1 + np.bincount(best // max(len(held), 1), minlength=len(class_sizes))


@dataclass(frozen=True)
class _Graph:
    """Which client holds which class, edge by edge, and the sizes of the classes."""

    client: np.ndarray
    klass: np.ndarray
    class_sizes: np.ndarray
    num_clients: int

    @classmethod
    def draw(
        cls, class_sizes: np.ndarray, num_clients: int, slots: np.ndarray, rng: np.random.Generator
    ) -> _Graph:
        """Give each client in turn the classes with most slots left: so none is left at the end."""
        degree = int(slots.sum()) // num_clients
        left = slots.copy()
        klass = np.empty((num_clients, degree), dtype=np.int64)
        for client in range(num_clients):
            klass[client] = np.lexsort((rng.random(len(left)), -left))[:degree]
            left[klass[client]] -= 1
        client_of_edge = np.repeat(np.arange(num_clients), degree)
        return cls(client_of_edge, klass.ravel(), class_sizes, num_clients)

    def edge_floor(self, evenness: float) -> np.ndarray:
        """Return the least examples per edge: 1, or that part of an even split of the class."""
        share = self.class_sizes / np.bincount(self.klass)
        even = np.floor(evenness * share[self.klass]).astype(np.int64)
        return np.asarray(np.maximum(1, even))

    def counts(self, smallest: int, largest: int, evenness: float = 0.0) -> np.ndarray | None:
        """Return examples per client and class, with all clients in [smallest, largest].

        Source → class → client → sink; what a client has above ``smallest`` passes by one more
        node. Each edge's floor is set aside first. None if it cannot be done.
        """
        floor = self.edge_floor(evenness)
        supply = self.class_sizes - _sums(self.klass, floor)
        base = _sums(self.client, floor)
        must = np.maximum(smallest - base, 0)
        may = largest - base - must
        extra = supply.sum() - must.sum()
        if min(supply.min(), may.min(), extra) < 0:
            return None
        klass = np.arange(len(supply))
        client = len(supply) + np.arange(self.num_clients)
        source, above, sink = (np.array([len(supply) + self.num_clients + i]) for i in range(3))
        arcs = [
            (source, klass, supply),
            (self.klass, client[self.client], supply[self.klass]),
            (client, sink, must),
            (client, above, may),
            (above, sink, extra),
        ]
        flow = _saturating_flow(arcs, int(supply.sum()))
        if flow is None:
            return None
        examples = np.zeros((self.num_clients, len(supply)), dtype=np.int64)
        moved = flow[self.klass, client[self.client]]
        examples[self.client, self.klass] = floor + np.asarray(moved).ravel()
        return examples

    def tightest(self) -> tuple[int, int]:
        """Return (largest, smallest) client size: the least largest, then the greatest smallest."""
        mean = int(self.class_sizes.sum()) // self.num_clients
        low, high = mean, int(self.class_sizes.sum())
        while low < high:  # the least largest size for which there is a flow
            middle = (low + high) // 2
            counts = self.counts(0, middle)
            low, high = (middle + 1, high) if counts is None else (low, _largest(counts))
        largest, low, high = high, 0, mean
        while low < high:  # the greatest smallest size
            middle = (low + high + 1) // 2
            counts = self.counts(middle, largest)
            low, high = (low, middle - 1) if counts is None else (_smallest(counts), high)
        return largest, low


def _saturating_flow(
    arcs: list[tuple[np.ndarray, np.ndarray, np.ndarray]], wanted: int
) -> csr_matrix | None:
    """Return the flow of that value along arcs (tails, heads, capacities), None if there is none.

    The source is the first arcs' tail, the sink the last arcs' head and the last node.
    """
    rows = [np.broadcast_arrays(*arc) for arc in arcs]
    tail, head, capacity = (np.concatenate(part) for part in zip(*rows, strict=True))
    source, sink = int(tail[0]), int(head[-1])
    capacity = capacity.astype(np.int32)  # all that SciPy's flow takes
    network = csr_matrix((capacity, (tail, head)), shape=(sink + 1, sink + 1))
    result = maximum_flow(network, source, sink)
    return result.flow if result.flow_value == wanted else None


def _sums(groups: np.ndarray, values: np.ndarray) -> np.ndarray:
    return np.bincount(groups, values).astype(np.int64)


def _largest(counts: np.ndarray) -> int:
    return int(counts.sum(axis=1).max())


def _smallest(counts: np.ndarray) -> int:
    return int(counts.sum(axis=1).min())


def _most_equal_counts(
    class_sizes: np.ndarray, num_clients: int, slots: np.ndarray, rng: np.random.Generator
) -> np.ndarray:
    """Return examples per client and class, client sizes within one if a drawn graph allows it."""
    smallest = int(class_sizes.sum()) // num_clients
    largest = -(-int(class_sizes.sum()) // num_clients)
    graphs = []
    for _ in range(MAX_GRAPHS):
        graph = _Graph.draw(class_sizes, num_clients, slots, rng)
        if graph.counts(smallest, largest) is not None:
            break
        graphs.append(graph)
    else:
        found = [(graph.tightest(), graph) for graph in graphs[: MAX_GRAPHS // 4]]
        (largest, smallest), graph = min(found, key=lambda pair: (pair[0][0], -pair[0][1]))
    splits = (graph.counts(smallest, largest, evenness) for evenness in EVENNESS)
    return next(counts for counts in splits if counts is not None)
