"""What a run logged, read from its event files.

Rounds are counted from 1. A federated run logs once a round; a central one counts batches, and the
epoch logged with them tells the round.
"""

from __future__ import annotations

from pathlib import Path

Curve = dict[int, float]  # round to value


def curves(run: Path) -> dict[str, Curve]:
    """Return every metric in a folder's event files, by name.

    Where a resumed run logged a round again, the later value counts; what was logged after the
    last round, as the test's metrics are, has the number of a round more.
    """
    # a second to import
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(run), size_guidance={"scalars": 0}).Reload()
    names = events.Tags()["scalars"]
    epochs: dict[int, int] = {}
    for event in events.Scalars("epoch") if "epoch" in names else ():
        # the first of a step: a test in another process begins to count anew
        epochs.setdefault(event.step, round(event.value))
    return {
        name: {epochs.get(e.step, e.step) + 1: e.value for e in events.Scalars(name)}
        for name in names
        if name != "epoch"
    }
