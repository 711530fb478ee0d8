"""Logged numbers of a run: from ``rounds.jsonl``, and from ``results.json`` if they were logged once.

Rounds are counted from 1; a central run has epochs instead.
"""

from __future__ import annotations

from pathlib import Path

from fl_lightning.federation import logged_once
from fl_lightning.reports.history import Curve, History


def curves(run: Path) -> dict[str, Curve]:
    """Return every metric of a run's folder, by name.

    What was logged once, as the test's metrics are, has the number of a round more than there were;
    ``epoch`` has those of the rounds that there were.
    """
    history = History.read(run)
    rounds = {line.number: line.number - 1.0 for line in history.rounds}
    afterwards = max(rounds, default=0) + 1
    once = {name: {afterwards: value} for name, value in logged_once(run).items()}
    return {**once, **{name: history.curve(name) for name in history.names}, "epoch": rounds}
