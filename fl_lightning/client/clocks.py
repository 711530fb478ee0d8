"""When clients end that are at work all the time: in virtual time, or in the order on record.

The record of a run over a network is a table, so that its order of arrival can be simulated.
"""

from __future__ import annotations

import csv
import heapq
import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, NamedTuple, final

from fl_lightning.client.devices import Fate
from fl_lightning.core.errors import ConfigurationError
from fl_lightning.core.traits import Trait, Traits

# (client, number of the start) -> what becomes of its work
FateOf = Callable[[int, int], Fate]


class Visit(NamedTuple):
    """A client at work.

    Attributes:
        client: who.
        version: of the model that it began from.
        number: of the start, counted from 0.
    """

    client: int
    version: int
    number: int


class Ended(NamedTuple):
    """The end of a client's work.

    Attributes:
        client: who.
        version: of the model that it began from.
        seconds: how long it was at work.
        is_lost: whether nothing has come of it.
    """

    client: int
    version: int
    seconds: float
    is_lost: bool = False


class VirtualClock:
    """Time that is worked out.

    Args:
        fate_of: how long a client takes, and whether its update arrives.

    Attributes:
        now: the time, in seconds.
    """

    def __init__(self, fate_of: FateOf) -> None:
        self._fate_of = fate_of
        self._at_work: list[tuple[float, int, Ended]] = []  # by when they end
        self.now = 0.0

    def start(self, visit: Visit) -> None:
        """Work out when a client will end."""
        fate = self._fate_of(visit.client, visit.number)
        ended = Ended(visit.client, visit.version, fate.seconds, fate.is_lost)
        heapq.heappush(self._at_work, (self.now + fate.seconds, visit.number, ended))

    def wait(self) -> list[Ended]:
        """Advance time to the next client that ends, and return the clients that end then."""
        self.now = self._at_work[0][0]
        ended = []
        while self._at_work and self._at_work[0][0] == self.now:
            ended.append(heapq.heappop(self._at_work)[2])
        return ended


class RecordedClock:
    """Time that has passed: clients end in the order on record, and then as somebody says.

    Args:
        record: in the order in which they ended; what is said later is added.
        go_on: says who ends next of those at work, when nobody is left on record.

    Attributes:
        record: so far.

    Example:
        >>> clock = RecordedClock([Ended(1, 0, 2.0)], lambda at_work: Ended(at_work[0].client, 0, 3.0))
        >>> clock.start(Visit(0, 0, 0)), clock.start(Visit(1, 0, 1))
        (None, None)
        >>> [ended.client for _ in range(2) for ended in clock.wait()], clock.now
        ([1, 0], 3.0)
    """

    def __init__(self, record: Iterable[Ended], go_on: Callable[[Sequence[Visit]], Ended]) -> None:
        self.record, self._go_on = list(record), go_on
        self._place = 0
        self._at_work: dict[int, tuple[Visit, float]] = {}
        self.now = 0.0

    def start(self, visit: Visit) -> None:
        """Start a client's work."""
        self._at_work[visit.client] = visit, self.now

    def wait(self) -> list[Ended]:
        """Return the clients that finish next.

        Raises:
            ConfigurationError: if by the record it is somebody who is not at work.
        """
        if self._place == len(self.record):
            self.record.append(self._go_on([visit for visit, _ in self._at_work.values()]))
        ended = self.record[self._place]
        self._place += 1
        visit, began = self._at_work.pop(ended.client, (None, 0.0))
        if visit is None or visit.version != ended.version:
            raise ConfigurationError(
                f"the recorded order of arrival does not fit: client {ended.client} is not at work from "
                f"version {ended.version}. Take seed, asynchronous and num_clients of the run that wrote it"
            )
        self.now = max(self.now, began + ended.seconds)
        return [ended]


# Says who ends next.
Clock = VirtualClock | RecordedClock

FILE = "arrivals.csv"
_COLUMNS = ["round", "client", "version", "seconds", "lost"]


@final
@dataclass(frozen=True, kw_only=True)
class RecordedArrivals:
    """Clients whose updates arrive in the order on record, so that a run over a network is simulated.

    Args:
        file: ``arrivals.csv`` in the folder of that run.

    Raises:
        ConfigurationError: if it cannot be read.
    """

    is_recorded: ClassVar[bool] = True
    traits: ClassVar[Traits] = Traits(
        needs={Trait.SIMULATION: "simulates a run that has been"},
        instead={Trait.SIMULATION: "leave devices out"},
    )

    file: str

    def __post_init__(self) -> None:
        self.arrivals()

    def arrivals(self) -> list[Ended]:
        """Arrivals of the record, in order."""
        try:
            with Path(self.file).open(newline="") as file:
                return [_read(row) for row in csv.DictReader(file)]
        except (OSError, KeyError, ValueError) as error:
            raise ConfigurationError(
                f"devices: {self.file} is no record of arrivals ({error!r}): take the {FILE} that a run over "
                "a network has written"
            ) from None


def write_arrivals(path: Path, ended: Sequence[Ended], buffer_size: int) -> None:
    """Write the arrivals, and the round in which each counted, to a file.

    Args:
        path: of the table.
        ended: in order.
        buffer_size: updates per round.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".part")
    with partial.open("w", newline="") as file:
        table = csv.writer(file)
        table.writerow(_COLUMNS)
        arrived = 0
        for each in ended:
            numbers = each.client, each.version, f"{each.seconds:.3f}", int(each.is_lost)
            table.writerow([arrived // buffer_size, *numbers])
            arrived += not each.is_lost
    os.replace(partial, path)


def _read(row: dict[str, str]) -> Ended:
    return Ended(
        int(row["client"]), int(row["version"]), float(row["seconds"]), bool(int(row["lost"]))
    )
