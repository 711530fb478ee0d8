"""Which client holds which class, and how many examples: the arithmetic behind `LabelShards`.

1. `class_slots`: each class gets clients in proportion to its size, in all as many as there are
   places (clients times classes per client).
2. `draw_holders`: a random bipartite graph of clients and classes with those degrees.
3. `even_counts`: examples n_e ≥ 1 for every edge e of the graph, by a linear program,

       minimise    Σ_e |n_e - s_e| + M Σ_i excess_i
       subject to  Σ_(e of class c) n_e = size of c     for every class
                   excess_i = how far Σ_(e of client i) n_e lies outside [⌊N/K⌋, ⌈N/K⌉]

   with s_e the even share of the class, rounded down, and M larger than any first sum could repay.
   So client sizes come first: within one of each other wherever the graph allows it. The
   constraints are those of a network flow, so every corner of what they allow is a vector of whole
   numbers (Hoffman and Kruskal 1956), and the simplex method returns corners.

Legend: K clients, C classes, E = K · classes per client edges, N examples.
"""

from __future__ import annotations

import numpy as np
from scipy.optimize import linprog
from scipy.sparse import csr_matrix, hstack


def class_slots(
    class_sizes: np.ndarray, num_clients: int, classes_per_client: int, rng: np.random.Generator
) -> np.ndarray:
    """Return how many clients each class has: proportional to its size, in [1, num_clients].

    Adams' divisor rule: the next slot goes to the class with the most examples per slot so far,
    which makes the largest client as small as possible if a client has one class. No class has
    more slots than examples.

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
    """Return the classes of each client, distinct, shape (num_clients, classes_per_client).

    Each client in turn takes the classes with most slots left, ties at random: so none is left
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
    """Return the examples of each class at each client: the linear program above.

    Args:
        holders: the classes of each client, shape (num_clients, classes_per_client).
        class_sizes: examples of each class, shape (num_classes,), no fewer than its clients.

    Returns:
        Whole numbers of shape (num_clients, num_classes), ≥ 1 where a client holds a class.

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

    # above and below the share, the one example more that is allowed, above and below that
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
    """Return how many examples lie outside [⌊N/K⌋, ⌈N/K⌉] over all clients; 0 is within one.

    Example:
        >>> size_excess(np.array([[2, 0], [3, 2]]))
        2
    """
    sizes = counts.sum(axis=1)
    smallest, remainder = divmod(int(sizes.sum()), len(sizes))
    outside = np.maximum(smallest - sizes, sizes - smallest - int(remainder > 0))
    return int(np.maximum(outside, 0).sum())


def _incidence(rows_of_columns: list[np.ndarray], num_rows: int) -> csr_matrix:
    """Return the matrix whose column j has a 1 in each of the rows ``rows_of_columns[:][j]``."""
    num_columns = len(rows_of_columns[0])
    rows = np.concatenate(rows_of_columns)
    columns = np.tile(np.arange(num_columns), len(rows_of_columns))
    return csr_matrix((np.ones(len(rows)), (rows, columns)), shape=(num_rows, num_columns))
