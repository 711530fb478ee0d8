"""Which run when: as many at a time as there are workers.

Runs do not share anything while they train, so their results do not depend on how many run side by
side, nor on the order.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor, as_completed

from fl_lightning.experiments.plan import PlannedRun
from fl_lightning.experiments.training import RunFailure, is_finished, seconds_of, train


def train_all(runs: Sequence[PlannedRun], *, workers: int) -> dict[str, str]:
    """Train every run that is not finished, and say so in one line each.

    Args:
        runs: those that others start from come first.
        workers: processes at a time, at least 1.

    Returns:
        What went wrong, by the name of the run; the others have gone on.
    """
    missing = [run for run in runs if not is_finished(run)]
    if len(missing) < len(runs):
        print(f"{len(runs) - len(missing)} of {len(runs)} runs were finished before", flush=True)
    failures: dict[str, str] = {}
    pool = ThreadPoolExecutor(workers)
    started: dict[str, Future[None]] = {}
    try:
        for run in missing:
            before = started.get(run.before.name) if run.before else None
            started[run.name] = pool.submit(_train_after, before, run)
        by_future = {future: run for run, future in zip(missing, started.values(), strict=True)}
        for number, future in enumerate(as_completed(by_future), 1):
            run = by_future[future]
            try:
                future.result()
                ended = f"{seconds_of(run):.0f} s"
            except RunFailure as failure:
                failures[run.name] = str(failure)
                ended = f"FAILED: {failure}"
            print(f"[{number}/{len(missing)}] {run.name}: {ended}", flush=True)
    finally:  # interrupted: what runs is interrupted as well, what has not begun never will
        pool.shutdown(cancel_futures=True)
    return failures


def _train_after(before: Future[None] | None, run: PlannedRun) -> None:
    # No deadlock: the run that is waited for came into the pool earlier, so it has a worker.
    if before is not None and before.exception() is not None:
        raise RunFailure(f"the run it starts from failed ({run.before and run.before.name})")
    train(run)
