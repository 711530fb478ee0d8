"""Partitions that give a client few classes: `LabelShards`, a fixed number of them, and `McMahanShards`.

`LabelShards`: every client has exactly Nc classes, all clients are equally large, all examples are
used. The idea that a client sees only two digits is from McMahan et al. 2017 (1602.05629), section 3;
their own construction, `McMahanShards`, does not ensure it. The steps:

1. `class_slots`: the number of clients of each class, in proportion to its size; their sum is the
   number of clients times the classes per client.
2. `draw_holders`: a random bipartite graph of clients and classes with those degrees.
3. `even_counts`: examples n_e ≥ 1 for every edge e of the graph, by a linear program,

       minimise    Σ_e |n_e - s_e| + M Σ_i excess_i
       subject to  Σ_(e of class c) n_e = size of c     for every class
                   excess_i = distance of Σ_(e of client i) n_e from [⌊N/K⌋, ⌈N/K⌉]

   with s_e the even share of the class, rounded down, and M so large that client sizes have priority:
   they are within one of each other if the graph allows it. The constraints are those of a network
   flow, so every vertex of the feasible set is integer (Hoffman and Kruskal 1956), and the simplex
   method returns vertices.

Legend: K clients, C classes, E = K · classes per client edges, N examples.

`McMahanShards`: sort the examples by label, cut them into K · s equal pieces, give s random pieces to
each of K clients. Source: the same, section 3, with 200 pieces of 300 digits for 100 clients.
Differs: all examples are used, even if their number is no multiple of K · s. Their *shard* is a *piece*
here: a shard is the set of all examples of a client.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, final

import numpy as np
from scipy.optimize import linprog
from scipy.sparse import csr_matrix, hstack
from typing_extensions import override

from fl_lightning.core.errors import ConfigurationError, Ranged
from fl_lightning.core.seeds import numpy_generator
from fl_lightning.data.columns import classes_of
from fl_lightning.data.partitions.partition import (
    Partition,
    check_sizes,
    deal,
    shards_of,
)
from fl_lightning.data.shards import FlatShards

MAX_GRAPHS = 16  # nearly always the first or second allows equal sizes


@final
@dataclass(frozen=True, kw_only=True)
class LabelShards(Ranged, Partition):
    """Gives every client examples of exactly ``classes_per_client`` classes; clients are as equally large as possible.

    The number of clients of a class is proportional to its size; a random bipartite graph assigns
    them. Sizes differ by at most one if one of the drawn graphs allows it. Otherwise (one class per
    client and classes of unequal size) the sizes are as equal as possible. The number of classes is
    always exact, shards are disjoint, and all examples are used.

    Args:
        classes_per_client: number of classes of a client, in [1, number of classes].

    Example:
        >>> labels = np.repeat(np.arange(4), 10)
        >>> shards = LabelShards(classes_per_client=2).assign(labels, num_clients=4, seed=0)
        >>> [(len(shard), len(set(labels[shard]))) for shard in shards]
        [(10, 2), (10, 2), (10, 2), (10, 2)]
    """

    ranges: ClassVar[dict[str, str]] = {"classes_per_client": "at least 1"}

    classes_per_client: int

    @override
    def assign(self, labels: np.ndarray, num_clients: int, seed: int) -> FlatShards:
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
                "Raise one of them"
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
    """Assign classes to clients several times; return the counts (num_clients, num_classes) with the most equal clients."""
    found = []
    for _ in range(MAX_GRAPHS if slots.sum() > num_clients else 1):  # one class each: all alike
        counts = even_counts(draw_holders(slots, num_clients, rng), class_sizes)
        if size_excess(counts) == 0:
            return counts
        found.append(counts)
    return min(found, key=size_excess)


def class_slots(
    class_sizes: np.ndarray, num_clients: int, classes_per_client: int, rng: np.random.Generator
) -> np.ndarray:
    """Return how many clients get each class: in proportion to its examples, in [1, num_clients].

    Adams' divisor rule: the next slot goes to the class with the most examples per slot so far,
    which minimises the largest client if clients have one class. No class gets more slots than it has
    examples.

    Example:
        >>> class_slots(np.array([30, 70]), 5, 1, np.random.default_rng(0))
        array([2, 3])
    """
    held = np.arange(1, num_clients)
    priority = class_sizes[:, None] / held
    priority[held >= class_sizes[:, None]] = 0.0  # every client of a class needs an example of it
    ties = rng.random(priority.size)
    num_more = num_clients * classes_per_client - len(class_sizes)
    best = np.lexsort((ties, -priority.ravel()))[:num_more]
    return 1 + np.bincount(best // max(len(held), 1), minlength=len(class_sizes))


def draw_holders(slots: np.ndarray, num_clients: int, rng: np.random.Generator) -> np.ndarray:
    """Draw each client's classes, all different, given how many clients get each; (num_clients, classes_per_client).

    Each client in turn gets the classes with most slots left, ties at random, so that no slot is left
    at the end.

    Example:
        >>> draw_holders(np.array([2, 1, 1]), 2, np.random.default_rng(0))
        array([[0, 2],
               [0, 1]])
    """
    left = slots.copy()
    holders = np.empty((num_clients, int(slots.sum()) // num_clients), dtype=np.int64)
    for client in range(num_clients):
        holders[client] = np.lexsort((rng.random(len(left)), -left))[: holders.shape[1]]
        left[holders[client]] -= 1
    return holders


def even_counts(holders: np.ndarray, class_sizes: np.ndarray) -> np.ndarray:
    """Compute how many examples of each class each client gets, so that clients are as equally large as possible.

    Args:
        holders: the classes of each client, shape (num_clients, classes_per_client).
        class_sizes: examples of each class, shape (num_classes,), no fewer than its clients.

    Returns:
        Integers of shape (num_clients, num_classes), ≥ 1 where a client has a class.

    Example:
        >>> even_counts(np.array([[0, 1], [1, 2]]), np.array([4, 4, 2]))
        array([[4, 1, 0],
               [0, 3, 2]])
    """
    num_clients, num_classes = len(holders), len(class_sizes)
    klass, client = holders.ravel(), np.repeat(np.arange(num_clients), holders.shape[1])
    share = (class_sizes // np.bincount(klass))[klass]
    smallest, remainder = divmod(int(class_sizes.sum()), num_clients)

    # one row per class, then one per client; a column per edge, or per client
    of_edges = _incidence([klass, num_classes + client], num_classes + num_clients)
    of_clients = _incidence([num_classes + np.arange(num_clients)], num_classes + num_clients)
    totals = np.concatenate([class_sizes, np.full(num_clients, smallest)]) - of_edges @ share

    # variables: above and below the share; the one allowed extra example; above and below the sizes
    columns = [of_edges, -of_edges, -of_clients, -of_clients, of_clients]
    most = [np.inf, share - 1, int(remainder > 0), np.inf, np.inf]
    price = [1, 1, 0, 2 * len(klass) + 1, 2 * len(klass) + 1]
    widths = [block.shape[1] for block in columns]
    cost = np.repeat(price, widths)
    upper = np.concatenate([np.broadcast_to(m, w) for m, w in zip(most, widths, strict=True)])
    bounds = np.stack([np.zeros(len(upper)), upper], axis=1)
    solution = linprog(cost, A_eq=hstack(columns), b_eq=totals, bounds=bounds, method="highs-ds")
    assert solution.success, solution.message  # excess_i has no upper bound
    above, below = np.rint(solution.x[: 2 * len(klass)]).astype(np.int64).reshape(2, -1)
    counts = np.zeros((num_clients, num_classes), dtype=np.int64)
    counts[client, klass] = share + above - below
    return counts


def size_excess(counts: np.ndarray) -> int:
    """Return how unequal client sizes are: their summed distances from [⌊N/K⌋, ⌈N/K⌉]; 0 for equal sizes.

    Example:
        >>> size_excess(np.array([[2, 0], [3, 2]]))
        2
    """
    sizes = counts.sum(axis=1)
    smallest, remainder = divmod(int(sizes.sum()), len(sizes))
    outside = np.maximum(smallest - sizes, sizes - smallest - int(remainder > 0))
    return int(np.maximum(outside, 0).sum())


def _incidence(rows_of_columns: list[np.ndarray], num_rows: int) -> csr_matrix:
    """Return a sparse 0/1 matrix whose column j has a 1 in row ``rows[j]``, for each array in ``rows_of_columns``."""
    num_columns = len(rows_of_columns[0])
    rows = np.concatenate(rows_of_columns)
    columns = np.tile(np.arange(num_columns), len(rows_of_columns))
    return csr_matrix((np.ones(len(rows)), (rows, columns)), shape=(num_rows, num_columns))


@final
@dataclass(frozen=True, kw_only=True)
class McMahanShards(Ranged, Partition):
    """Sorts examples by label, cuts them into equal pieces, and gives every client some pieces (McMahan et al.).

    The sorted examples are cut into equal pieces, which are distributed at random. A client has few classes, but no fixed number: a piece may contain two classes, and two pieces may
    have the same class. `LabelShards` fixes the number.

    Args:
        shards_per_client: number of pieces per client, ≥ 1; 2 in the paper.

    Example:
        >>> labels = np.repeat(np.arange(10), 60)
        >>> shards = McMahanShards(shards_per_client=2).assign(labels, num_clients=10, seed=0)
        >>> {len(shard) for shard in shards}, max(len(set(labels[shard])) for shard in shards)
        ({60}, 2)
    """

    ranges: ClassVar[dict[str, str]] = {"shards_per_client": "at least 1"}

    shards_per_client: int = 2

    @override
    def assign(self, labels: np.ndarray, num_clients: int, seed: int) -> FlatShards:
        check_sizes(labels, num_clients)
        num_pieces, num_examples = num_clients * self.shards_per_client, len(labels)
        if num_pieces > num_examples:
            raise ConfigurationError(
                f"num_clients * shards_per_client must be at most the number of examples, "
                f"{num_examples}, got {num_clients} * {self.shards_per_client}: lower one of them"
            )
        rng = numpy_generator(seed, "partition", num_clients)
        shuffled = rng.permutation(num_examples)
        by_label = shuffled[np.argsort(labels[shuffled], kind="stable")]
        piece = np.arange(num_examples) * num_pieces // num_examples
        owner = np.empty(num_examples, dtype=np.int64)
        owner[by_label] = (rng.permutation(num_pieces) % num_clients)[piece]
        return shards_of(owner, num_clients)
