"""How many processes can compute at once on this machine's CPUs without being in each other's way.

The physical cores among those that this process may use, and no more than its control group may
keep busy (a container's limit). Two threads of one core share its arithmetic units: a process on
each would gain next to nothing.

Which process trains which of a round's clients: as even as the clients' work allows.

Longest processing time first: clients in decreasing order of their work, each to the process with
the least so far. The busiest process then has at most 4/3 of the best possible share (Graham 1969,
Bounds on multiprocessing timing anomalies, Theorem 2). A pure function: every process works out
all shares for itself.
"""

from __future__ import annotations

import heapq
import os
from pathlib import Path

import numpy as np

from fl_lightning.core.whole_numbers import Integers

_CPUS = Path("/sys/devices/system/cpu")
_GROUPS = Path("/sys/fs/cgroup")


def num_usable_cores(cpus: Path = _CPUS, groups: Path = _GROUPS) -> int:
    """Return the number of cores, at least 1.

    Args:
        cpus: where Linux describes the processors; without it every thread counts as a core.
        groups: where it describes control groups.

    Example:
        >>> 1 <= num_usable_cores() <= os.cpu_count()
        True
    """
    can_ask = hasattr(os, "sched_getaffinity")
    mine = os.sched_getaffinity(0) if can_ask else range(os.cpu_count() or 1)
    cores = len({_core_of(cpu, cpus) for cpu in mine})
    return max(1, min(cores, int(_quota(groups) or cores)))


def _core_of(cpu: int, cpus: Path) -> str:
    """Return the same text for all threads of a core."""
    try:
        return (cpus / f"cpu{cpu}" / "topology" / "thread_siblings_list").read_text()
    except OSError:
        return str(cpu)


def _quota(groups: Path) -> float | None:
    """Return how many CPUs the control group may keep busy on average; None if there is no limit."""
    try:
        if (groups / "cpu.max").exists():  # version 2
            quota, period = (groups / "cpu.max").read_text().split()
        else:
            quota = (groups / "cpu" / "cpu.cfs_quota_us").read_text()
            period = (groups / "cpu" / "cpu.cfs_period_us").read_text()
        return (
            None if quota == "max" or float(quota) <= 0 else max(1.0, float(quota) / float(period))
        )
    except (OSError, ValueError):
        return None


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
