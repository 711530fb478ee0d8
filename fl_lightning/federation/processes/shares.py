"""Which process trains which of a round's clients: as even as the clients' work allows.

Longest processing time first: clients in decreasing order of their work, each to the process with
the least so far. The busiest process then has at most 4/3 of the best possible share (Graham 1969,
Bounds on multiprocessing timing anomalies, Theorem 2). A pure function: every process works out
all shares for itself.
"""

from __future__ import annotations

import heapq

import numpy as np

from fl_lightning.core.whole_numbers import Integers


def shares(work: Integers, num_shares: int) -> list[Integers]:
    """Divide clients among processes.

    Args:
        work: of each client, e.g. local batches, shape (number of clients,).
        num_shares: number of processes; some get nothing if there are fewer clients.

    Returns:
        For every process the positions in ``work``, increasing.

    Example:
        >>> [share.tolist() for share in shares(np.array([5, 1, 4, 1, 3]), 2)]
        [[0, 1, 3], [2, 4]]
    """
    loads = [(0, share) for share in range(num_shares)]
    parts: list[list[int]] = [[] for _ in range(num_shares)]
    for client in np.argsort(-work, kind="stable").tolist():
        load, share = heapq.heappop(loads)
        parts[share].append(client)
        heapq.heappush(loads, (load + int(work[client]), share))
    return [np.sort(np.array(part, np.int64)) for part in parts]
