"""Ledger of the privacy that a site's clients have spent in all runs, a file on the site's disk.

An entry is for a run, its configuration and a day: the cost of one release, and the number of releases of each
client. The costs of a client compose over the entries of the period, see `composed_epsilon`. The file is written
before an answer leaves, whole or not at all. With a file that cannot be read, nothing is released.
"""

from __future__ import annotations

import json
import math
import os
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields
from datetime import date, timedelta
from pathlib import Path
from typing import Any, BinaryIO

from fl_lightning.core.errors import ConfigurationError
from fl_lightning.core.plain_json import shown
from fl_lightning.flower.class_paths import Refused
from fl_lightning.privacy.accounting.gaussian import ReleaseCost, composed_epsilon

# days that count, today's among them; None for all
PERIODS = {"day": 1, "week": 7, "month": 31, "year": 366, "ever": None}
_DELTA = 1e-5


@dataclass(frozen=True, kw_only=True)
class PrivacyBudget:
    """The most privacy that each client of a site may spend.

    Args:
        epsilon: largest ε over all runs of a period, > 0.
        delta: δ at which ε is computed, in (0, 1); the δ of a run does not matter.
        per: period that ends now: ``day``, ``week``, ``month``, ``year`` or ``ever``.

    Raises:
        ConfigurationError: for values out of range.
    """

    epsilon: float
    delta: float = _DELTA
    per: str = "ever"

    def __post_init__(self) -> None:
        for name, most in (("epsilon", math.inf), ("delta", 1.0)):
            value = getattr(self, name)
            if type(value) not in (int, float) or not 0 < value < most:
                raise ConfigurationError(
                    f"most_epsilon: {name} must be a number above 0 and below {most:g}, got {shown(value)}"
                )
        if self.per not in PERIODS:
            raise ConfigurationError(
                f"most_epsilon: per must be one of {', '.join(PERIODS)}, got {shown(self.per)}"
            )

    @classmethod
    def of(cls, told: Any) -> PrivacyBudget:
        """Read a privacy budget as YAML gives it: a number, which is ε, or a mapping with ε, δ and period."""
        given = told if isinstance(told, dict) else {"epsilon": told}
        names = [field.name for field in fields(cls)]
        if "epsilon" not in given or not given.keys() <= set(names):
            raise ConfigurationError(
                f"most_epsilon must be a number, or a mapping with {', '.join(names)}, got {shown(told)}"
            )
        return cls(**given)

    def __str__(self) -> str:
        return f"ε {self.epsilon:g} at δ {self.delta:g}, per: {self.per}"


@dataclass(frozen=True)
class Ledger:
    """Records on disk the privacy that a site's clients have spent, and checks their budget.

    Attributes:
        file: path of the ledger; the first release creates it.
        budget: privacy budget of each client; None for no limit, and ε of all time at δ 1e-5.
        run: id of the run whose updates are charged.
        configuration: hash of the configuration of this run.
    """

    file: Path
    budget: PrivacyBudget | None
    run: str = ""
    configuration: str = ""

    @property
    def delta(self) -> float:
        """The δ at which the ledger computes ε."""
        return _DELTA if self.budget is None else self.budget.delta

    def entries(self) -> list[dict[str, Any]]:
        """Return the ledger's entries of all days: how many updates of each client have left, and their privacy cost.

        Raises:
            Refused: if the file cannot be read, because the remaining budget is then unknown.
        """
        if not self.file.exists():
            return []
        try:
            entries: list[dict[str, Any]] = json.loads(self.file.read_text())["entries"]
            for entry in entries:
                ReleaseCost(**entry["cost"])
                date.fromisoformat(entry["day"])
                Counter(entry["releases"]).total()
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise Refused(
                f"the privacy ledger {self.file} cannot be read ({error}), so the budget that is left is "
                "unknown: restore it from a copy"
            ) from None
        return entries

    def spent(self) -> float:
        """Return the largest ε that any client has spent in the budget's period."""
        made = {frozenset(each.items()) for each in _by_client(self.of_period()).values()}
        return max((composed_epsilon(dict(each), self.delta) for each in made), default=0.0)

    def left(self) -> float | None:
        """Return how much ε is left for the client that has spent most; None if the site has no budget."""
        return None if self.budget is None else max(0.0, self.budget.epsilon - self.spent())

    def of_period(self) -> list[dict[str, Any]]:
        """Return the entries of the budget's period."""
        days = None if self.budget is None else PERIODS[self.budget.per]
        if days is None:
            return self.entries()
        first = date.today() - timedelta(days=days - 1)
        return [each for each in self.entries() if date.fromisoformat(each["day"]) >= first]

    def check(self, cost: ReleaseCost, clients: Iterable[int], turns: int | None = None) -> None:
        """Raise if a client's updates in this run, past ones included, would exceed its privacy budget.

        Args:
            cost: privacy cost of one update.
            clients: ids of the clients.
            turns: planned number of updates of each client; None for one more than so far.

        Raises:
            Refused: with the budget and the ε that the client would have spent.
        """
        if self.budget is None:
            return
        own = _by_client(each for each in self.entries() if self._has(each))
        spent = _by_client(each for each in self.of_period() if not self._has(each))
        nothing = Counter[ReleaseCost]()
        cases = {
            (frozenset(spent.get(c, nothing).items()), own.get(c, nothing).total()): c
            for c in clients
        }
        for (others, made), client in cases.items():
            before, number = Counter(dict(others)), made + 1 if turns is None else max(turns, made)
            epsilon = composed_epsilon(before + Counter({cost: number}), self.delta)
            if not epsilon <= self.budget.epsilon:  # NaN neither
                raise Refused(
                    f"most_epsilon is {self.budget} at this site, and client {client} would have spent "
                    f"{epsilon:.4g}, {composed_epsilon(before, self.delta):.4g} of it in other runs: add "
                    "noise, or train fewer rounds"
                )

    def charge(self, cost: ReleaseCost, clients: Iterable[int]) -> None:
        """Record one update of each client on disk, before the updates leave."""
        entries = self.entries()
        about = {"run": self.run, "configuration": self.configuration, "cost": asdict(cost)}
        about["day"] = date.today().isoformat()
        entry = next((e for e in entries if about.items() <= e.items()), None)
        if entry is None:
            entries.append(entry := {**about, "releases": {}})
        for client in clients:
            entry["releases"][str(client)] = entry["releases"].get(str(client), 0) + 1
        with whole_file(self.file) as file:
            file.write(json.dumps({"entries": entries}, indent=1).encode())

    def _has(self, entry: Mapping[str, Any]) -> bool:
        return (entry["run"], entry["configuration"]) == (self.run, self.configuration)


def _by_client(entries: Iterable[Mapping[str, Any]]) -> dict[int, Counter[ReleaseCost]]:
    """Count each client's releases (updates that have left) by their privacy cost."""
    found: dict[int, Counter[ReleaseCost]] = {}
    for entry in entries:
        cost = ReleaseCost(**entry["cost"])
        for client, number in entry["releases"].items():
            found.setdefault(int(client), Counter())[cost] += number
    return found


@contextmanager
def whole_file(path: Path) -> Iterator[BinaryIO]:
    """Open a file for writing; when the block ends, the new content replaces the old content atomically."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".part")
    with partial.open("wb") as opened:
        yield opened
        opened.flush()
        os.fsync(opened.fileno())
    partial.replace(path)
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)  # else the old file may be back after a power failure
    finally:
        os.close(folder)
