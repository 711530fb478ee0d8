"""Logged numbers of a run: from ``rounds.jsonl``, and from ``results.json`` if they were logged once.

Rounds are counted from 1; a central run has epochs instead.
"""

from __future__ import annotations

import json
import math
from pathlib import Path

from fl_lightning.federation import logged_once

Curve = dict[int, float]  # round to value


def curves(run: Path) -> dict[str, Curve]:
    """Return every metric of a run's folder, by name.

    What was logged once, as the test's metrics are, has the number of a round more than there were;
    ``epoch`` has those of the rounds that there were.
    """
    path = run / "rounds.jsonl"
    found: dict[str, Curve] = {}
    rounds: Curve = {}
    for text in path.read_text(encoding="utf-8").splitlines() if path.exists() else ():
        line = json.loads(text)
        rounds[line["round"]] = line["round"] - 1.0
        for name, value in line["metrics"].items():
            found.setdefault(name, {})[line["round"]] = math.nan if value is None else value
    afterwards = max(rounds, default=0) + 1
    once = {name: {afterwards: value} for name, value in logged_once(run).items()}
    return {**once, **found, "epoch": rounds}
