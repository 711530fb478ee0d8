"""Clocks of asynchronous training: when clients finish, by simulated durations or as recorded in a file.

A run over a network writes a table of arrivals; a simulation can replay the order in that table.
"""

from __future__ import annotations

import csv
import heapq
import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, NamedTuple, final

from fl_lightning.client.devices import WorkResult
from fl_lightning.core.errors import ConfigurationError
from fl_lightning.core.traits import Trait, Traits

# Maps a client id and the number of the client's start to the result of its work.
ResultOf = Callable[[int, int], WorkResult]


class StartedClient(NamedTuple):
    """A client at work: it has started and not yet finished.

    Attributes:
        client: client id.
        version: version of the model from which the client started.
        number: number of this start, counted from 0 over the run.
    """

    client: int
    version: int
    number: int


class FinishedClient(NamedTuple):
    """A client that has finished.

    Attributes:
        client: client id.
        version: version of the model from which the client started.
        seconds: duration of the work.
        is_lost: whether the server got no update.
    """

    client: int
    version: int
    seconds: float
    is_lost: bool = False


class VirtualClock:
    """Clock of virtual time: clients finish after simulated durations.

    Args:
        result_of: returns the duration of a client's work, and whether its update arrives.

    Attributes:
        now: virtual time in seconds.
    """

    def __init__(self, result_of: ResultOf) -> None:
        self._result_of = result_of
        self._at_work: list[tuple[float, int, FinishedClient]] = []  # a heap, by time of the end
        self.now = 0.0

    def start(self, visit: StartedClient) -> None:
        """Start a client, and compute when it finishes."""
        result = self._result_of(visit.client, visit.number)
        ended = FinishedClient(visit.client, visit.version, result.seconds, result.is_lost)
        heapq.heappush(self._at_work, (self.now + result.seconds, visit.number, ended))

    def wait(self) -> list[FinishedClient]:
        """Advance to the next time at which a client finishes, and return the clients that finish then."""
        self.now = self._at_work[0][0]
        ended = []
        while self._at_work and self._at_work[0][0] == self.now:
            ended.append(heapq.heappop(self._at_work)[2])
        return ended


class RecordedClock:
    """Clock that replays the recorded arrivals of an earlier run; after the last one it waits for real ones.

    Args:
        record: recorded arrivals in order; real arrivals are appended.
        next_ended: waits for and returns the next client to finish, given the clients at work; called
            after the end of the record.

    Example:
        >>> clock = RecordedClock([FinishedClient(1, 0, 2.0)], lambda at_work: FinishedClient(at_work[0].client, 0, 3.0))
        >>> clock.start(StartedClient(0, 0, 0)), clock.start(StartedClient(1, 0, 1))
        (None, None)
        >>> [ended.client for _ in range(2) for ended in clock.wait()], clock.now
        ([1, 0], 3.0)
    """

    def __init__(
        self,
        record: Iterable[FinishedClient],
        next_ended: Callable[[Sequence[StartedClient]], FinishedClient],
    ) -> None:
        self.record, self._next_ended = list(record), next_ended
        self._place = 0
        self._at_work: dict[int, tuple[StartedClient, float]] = {}
        self.now = 0.0

    def start(self, visit: StartedClient) -> None:
        """Note that a client has started."""
        self._at_work[visit.client] = visit, self.now

    def wait(self) -> list[FinishedClient]:
        """Return the client that finishes next, as a list of length 1.

        Raises:
            ConfigurationError: if the record names a client that is not at work.
        """
        if self._place == len(self.record):
            self.record.append(self._next_ended([visit for visit, _ in self._at_work.values()]))
        ended = self.record[self._place]
        self._place += 1
        visit, began = self._at_work.pop(ended.client, (None, 0.0))
        if visit is None or visit.version != ended.version:
            raise ConfigurationError(
                f"federation.devices: the recorded arrivals are of another run: client {ended.client} is not at "
                f"work from version {ended.version}. Use seed, asynchronous and num_clients of the run that wrote "
                f"the file"
            )
        self.now = max(self.now, began + ended.seconds)
        return [ended]


Clock = VirtualClock | RecordedClock

FILE = "arrivals.csv"
_COLUMNS = ["round", "client", "version", "seconds", "lost"]


@final
@dataclass(frozen=True, kw_only=True)
class RecordedArrivals:
    """Replays the order in which updates arrived in an earlier asynchronous run over a network.

    Args:
        file: path of ``arrivals.csv`` in the folder of the earlier run.

    Raises:
        ConfigurationError: if the file cannot be read.
    """

    is_recorded: ClassVar[bool] = True
    traits: ClassVar[Traits] = Traits(
        needs={Trait.SIMULATION: "replays an earlier run"},
        instead={Trait.SIMULATION: "leave devices out"},
    )

    file: str

    def __post_init__(self) -> None:
        self.arrivals()

    def arrivals(self) -> list[FinishedClient]:
        """Read the file, and return the arrivals of updates in their recorded order."""
        try:
            with Path(self.file).open(newline="") as file:
                return [_read(row) for row in csv.DictReader(file)]
        except (OSError, KeyError, TypeError, ValueError, csv.Error) as error:
            raise ConfigurationError(
                f"RecordedArrivals: file must be the {FILE} that an asynchronous run over a network wrote, but "
                f"{self.file} is no record of arrivals ({error!r}): give the path of that file"
            ) from None


def write_arrivals(path: Path, ended: Sequence[FinishedClient], buffer_size: int) -> None:
    """Write to a CSV file the order in which clients finished, and the round to which each update was added.

    Args:
        path: path of the table.
        ended: arrivals in order.
        buffer_size: number of updates per round.
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


def _read(row: dict[str, str]) -> FinishedClient:
    return FinishedClient(
        int(row["client"]), int(row["version"]), float(row["seconds"]), bool(int(row["lost"]))
    )
