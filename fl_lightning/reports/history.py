"""The metrics of a run by round, in ``rounds.jsonl`` with one line of JSON per round.

    {"round": 3, "metrics": {"val/loss": 0.41, …}, "clients": {"ids": [4, 9], "train/loss": [0.5, 0.3]}}

A round's line is written before its checkpoint, so a run that was killed has at least one line for each completed
round; a resumed run drops the lines after its checkpoint. Rounds are counted from 1. A value that is not finite
is null.
"""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from fl_lightning.core.processes import write_whole

NAME = "rounds.jsonl"
IDS = "ids"
_LOSS = "train/loss"

Curve = dict[int, float]  # round to value


@dataclass(frozen=True)
class RoundLine:
    """Metrics of one round of a run: a line of ``rounds.jsonl``.

    Attributes:
        number: number of the round, from 1.
        metrics: values logged in the round, by name.
        clients: ids of the clients that took part, under ``ids``, and their metrics in the same order;
            empty if privacy forbids it or there are too many clients.
    """

    number: int
    metrics: Mapping[str, float]
    clients: Mapping[str, Sequence[float]] = field(default_factory=dict)

    def text(self) -> str:
        """Return the round as a line of JSON.

        Example:
            >>> RoundLine(1, {"val/loss": float("nan")}).text()
            '{"round": 1, "metrics": {"val/loss": null}}'
        """
        line = {"round": self.number, "metrics": _finite(self.metrics)}
        if self.clients:
            line["clients"] = _finite(self.clients)
        return json.dumps(line)

    def without(self, names: Collection[str]) -> RoundLine:
        """Return a copy of the round without the metrics of the given names."""
        metrics = {name: value for name, value in self.metrics.items() if name not in names}
        clients = {name: values for name, values in self.clients.items() if name not in names}
        return RoundLine(self.number, metrics, clients)

    @classmethod
    def of(cls, text: str) -> RoundLine:
        """Return the round that a line of ``rounds.jsonl`` describes."""
        line = json.loads(text)
        metrics = {name: _number(value) for name, value in line["metrics"].items()}
        clients = {name: [*map(_number, each)] for name, each in line.get("clients", {}).items()}
        return cls(line["round"], metrics, clients)


@dataclass(frozen=True)
class History:
    """The metrics of all rounds of a run, in the order of rounds."""

    rounds: Sequence[RoundLine]

    @classmethod
    def read(cls, folder: Path) -> History:
        """Read ``rounds.jsonl`` in a run's folder; empty without that file. A round's last line counts."""
        path = folder / NAME
        if not path.exists():
            return cls(())
        found: dict[int, RoundLine] = {}
        for text in path.read_text(encoding="utf-8").splitlines():
            try:
                line = RoundLine.of(text)
            except (ValueError, KeyError):  # killed while it was written
                continue
            found[line.number] = line
        return cls([found[number] for number in sorted(found)])

    @property
    def names(self) -> list[str]:
        """Names of all metrics of the run, in the order in which they were first logged."""
        return list(dict.fromkeys(name for line in self.rounds for name in line.metrics))

    @property
    def unit(self) -> str:
        """Plural of what the history counts: ``rounds`` in a federation, ``epochs`` in a central run."""
        return "rounds" if any(name.startswith("round/") for name in self.names) else "epochs"

    def without_twin(self) -> History:
        """Return the history without ``train/loss`` if the module logs an equal loss under another name.

        Two losses are the same if their values are equal in every round.

        Example:
            >>> numbers = {"train/loss": 0.5, "train/loss_std": 0.1, "loss": 0.5, "loss_std": 0.1}
            >>> History([RoundLine(1, numbers)]).without_twin().names
            ['loss', 'loss_std']
        """
        names = (_LOSS, f"{_LOSS}_std")
        own, std = map(self.curve, names)
        has_twin = any(
            _are_equal(self.curve(name), own) and _are_equal(self.curve(f"{name}_std"), std)
            for name in self.names
            if name != _LOSS and "loss" in name.lower() and std
        )
        return History([line.without(names) for line in self.rounds]) if has_twin else self

    def curve(self, name: str) -> Curve:
        """Return the values of one metric by round number; empty if it was not logged."""
        return {r.number: r.metrics[name] for r in self.rounds if name in r.metrics}

    def of_clients(self, name: str) -> dict[int, Sequence[float]]:
        """Return, by round number, the values of one metric for the round's clients."""
        return {r.number: r.clients[name] for r in self.rounds if name in r.clients}

    def bytes_by_purpose(self, way: str, once: Mapping[str, float]) -> dict[str, Curve]:
        """Return the bytes that all clients sent (or received), first by purpose, such as updates, then by round.

        Args:
            way: ``up`` (from clients) or ``down`` (to clients).
            once: metrics that the run has logged once; bytes among them count as round 0.

        Example:
            >>> history = History([RoundLine(1, {"round/total_bytes_up": 8.0})])
            >>> history.bytes_by_purpose("up", {"head/total_bytes_up": 2.0})
            {'updates': {1: 8.0}, 'head': {0: 2.0}}
        """
        end, found = f"/total_bytes_{way}", dict[str, Curve]()
        for name in dict.fromkeys([*self.names, *once]):
            if name.endswith(end):
                ahead = {0: once[name]} if name in once else {}
                purpose = name.removesuffix(end)
                found["updates" if purpose == "round" else purpose] = ahead | self.curve(name)
        return {purpose: curve for purpose, curve in found.items() if any(curve.values())}

    @property
    def client_names(self) -> list[str]:
        """Names of the metrics that were recorded for single clients."""
        names = dict.fromkeys(name for line in self.rounds for name in line.clients)
        return [name for name in names if name != IDS]


def begin(folder: Path, after: int) -> None:
    """Rewrite ``rounds.jsonl`` in a folder with only the rounds up to number ``after``."""
    kept = [line for line in History.read(folder).rounds if line.number <= after]
    write_whole(folder / NAME, "".join(f"{line.text()}\n" for line in kept))


def append(folder: Path, line: RoundLine) -> None:
    """Append the line of a round to ``rounds.jsonl`` in a folder."""
    with (folder / NAME).open("a", encoding="utf-8") as file:
        file.write(f"{line.text()}\n")


def _are_equal(one: Curve, other: Curve) -> bool:
    """Return whether two metrics have the same rounds, and equal values up to single-precision rounding."""
    values, others = [*one.values()], [*other.values()]
    return one.keys() == other.keys() and np.allclose(values, others, atol=0, equal_nan=True)


def _finite(value: Any) -> Any:
    """Replace NaN and infinite numbers by None, which JSON writes as null."""
    if isinstance(value, Mapping):
        return {name: _finite(each) for name, each in value.items()}
    if isinstance(value, Sequence):
        return [*map(_finite, value)]
    return value if math.isfinite(value) else None


def _number(value: float | None) -> float:
    return math.nan if value is None else value
