"""Logged numbers of a run, read from its event files and, if logged once, from ``results.json``.

Rounds are counted from 1. A federated run logs once a round; a central one counts batches, and the
epoch logged with them tells the round.
"""

from __future__ import annotations

from pathlib import Path

from fl_lightning.federation import logged_once

Curve = dict[int, float]  # round to value


def curves(run: Path) -> dict[str, Curve]:
    """Return every metric of a run's folder, by name.

    Where a resumed run logged a round again, the later value counts; what was logged after the
    last round, or once, as the test's metrics are, has the number of a round more; ``epoch`` has those
    of the rounds that there were.
    """
    # a second to import
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(run), size_guidance={"scalars": 0}).Reload()
    names = events.Tags()["scalars"]
    epochs: dict[int, int] = {}
    for event in events.Scalars("epoch") if "epoch" in names else ():
        # the first of a step: a test in another process begins to count anew
        epochs.setdefault(event.step, round(event.value))
    found = {
        name: {epochs.get(e.step, e.step) + 1: e.value for e in events.Scalars(name)}
        for name in names
        if name != "epoch"
    }
    afterwards = max(epochs.values(), default=0) + 2
    once = {name: {afterwards: value} for name, value in logged_once(run).items()}
    rounds: Curve = {epoch + 1: float(epoch) for epoch in epochs.values()}
    return {**once, **found, "epoch": rounds}
