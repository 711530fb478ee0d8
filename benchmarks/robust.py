"""How long robust rules take over a round: ``OMP_NUM_THREADS=1 python -m benchmarks.robust``.

100 updates of 21 million numbers (8.4 GB), of which a gigabyte stays in memory and the rest goes to a
file. Seconds are process CPU time on one thread, and wall time, which has the waiting for the disk as
well; memory is the peak of the whole process so far, with what it has mapped of the file just then.
"""

from __future__ import annotations

import argparse
import resource
import time
from collections.abc import Callable

import numpy as np
import torch

from fl_lightning.core.update import ClientUpdate
from fl_lightning.server.robust.krum import Bulyan, Krum
from fl_lightning.server.robust.matrix import UpdateRows
from fl_lightning.server.robust.passes import squared_distances
from fl_lightning.server.robust.reweighted import CentredClipping, GeometricMedian
from fl_lightning.server.robust.rule import (
    Median,
    NearestNeighbourMixing,
    RobustRule,
    RuleContext,
    TrimmedMean,
)


def measured(name: str, call: Callable[[], object]) -> None:
    """Print how long a call takes and the memory that the process has needed until then."""
    began, cpu = time.perf_counter(), time.process_time()
    call()
    wall, cpu = time.perf_counter() - began, time.process_time() - cpu
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    print(f"{name:40}{cpu:9.1f}{wall:9.1f}{peak:9.2f}", flush=True)


def collect(num_updates: int, size: int, memory_gb: float, folder: str | None) -> UpdateRows:
    """Return a round of normally distributed updates."""
    rows = UpdateRows(torch.empty(size), memory_limit=int(memory_gb * 2**30), folder=folder)
    generator = np.random.default_rng(0)
    for client in range(num_updates):
        delta = torch.from_numpy(generator.standard_normal(size, np.float32))
        rows.append(ClientUpdate(client, delta, torch.empty(0), 1, 1))
    return rows


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--updates", type=int, default=100, help="default %(default)s")
    parser.add_argument("--size", type=int, default=21_000_000, help="numbers of an update")
    parser.add_argument("--memory-gb", type=float, default=1.0, help="default %(default)s")
    parser.add_argument("--folder", help="of the file, the system's temporary folder if left out")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    f = (arguments.updates - 3) // 4
    rules: list[RobustRule] = [Median(), TrimmedMean(f), Krum(f), GeometricMedian()]
    rules += [CentredClipping(), NearestNeighbourMixing(TrimmedMean(f), f), Bulyan(f)]
    print(f"{'':40}{'CPU s':>9}{'wall s':>9}{'GiB':>9}")
    kept: list[UpdateRows] = []
    size = (arguments.updates, arguments.size, arguments.memory_gb, arguments.folder)
    measured("draw and collect", lambda: kept.append(collect(*size)))
    measured("distances", lambda: squared_distances(kept[0]))
    for rule in rules:
        name = str(rule).replace("num_attackers=", "")
        measured(name[:39], lambda: rule.combine(kept[0], RuleContext()))  # noqa: B023


if __name__ == "__main__":
    main()
