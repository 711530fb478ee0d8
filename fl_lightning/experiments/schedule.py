"""Which run when: as many at a time as there are workers.

Runs do not share anything while they train, so their results do not depend on how many run side by
side, nor on the order.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait

from fl_lightning.experiments.plan import PlannedRun
from fl_lightning.experiments.progress import Watch
from fl_lightning.experiments.training import RunFailure, is_finished, seconds_of, train
from fl_lightning.reports.layout import laid_out
from fl_lightning.reports.screen import StatusLines

_SECONDS_BETWEEN_LOOKS = 0.5


def train_all(runs: Sequence[PlannedRun], lock: int, *, workers: int) -> dict[str, str]:
    """Train every run that is not finished, and say so in one line each; show how far they are.

    Args:
        runs: those that others start from come first.
        lock: of the folder of all runs.
        workers: processes at a time, at least 1.

    Returns:
        What went wrong, by the name of the run; the others have gone on.
    """
    missing = [run for run in runs if not is_finished(run)]
    if len(missing) < len(runs):
        print(f"{len(runs) - len(missing)} of {len(runs)} runs were finished before", flush=True)
    failures: dict[str, str] = {}
    watch, screen = Watch(len(missing), workers), StatusLines()
    pool = ThreadPoolExecutor(workers)
    started: dict[str, Future[None]] = {}
    screen.open()
    try:
        for run in missing:
            before = started.get(run.before.name) if run.before else None
            started[run.name] = pool.submit(_train_after, before, run, lock)
        pending = {future: run for run, future in zip(missing, started.values(), strict=True)}
        while pending:
            running = [run for future, run in pending.items() if future.running()]
            screen.show(watch.bars(running, screen.width))
            pause = _SECONDS_BETWEEN_LOOKS if screen.is_open else None
            for future in wait(pending, pause, FIRST_COMPLETED).done:
                run = pending.pop(future)
                ended = _ended(future, run, watch, failures)
                number = len(missing) - len(pending)
                told = f"[{number}/{len(missing)}] {run.name}: {ended}"
                print(laid_out(told, screen.width) if screen.is_open else told, flush=True)
    finally:  # interrupted: what runs is interrupted as well, what has not begun never will
        pool.shutdown(cancel_futures=True)
        screen.close()
    return failures


def _ended(future: Future[None], run: PlannedRun, watch: Watch, failures: dict[str, str]) -> str:
    """Note how a run has ended, and return it in words."""
    try:
        future.result()
    except RunFailure as failure:
        failures[run.name] = str(failure)
        watch.end()
        return f"FAILED: {failure}"
    watch.end(seconds_of(run))
    return f"{seconds_of(run):.0f} s"


def _train_after(before: Future[None] | None, run: PlannedRun, lock: int) -> None:
    # No deadlock: the run that is waited for came into the pool earlier, so it has a worker.
    if before is not None and before.exception() is not None:
        raise RunFailure(f"the run it starts from failed ({run.before and run.before.name})")
    train(run, lock)
