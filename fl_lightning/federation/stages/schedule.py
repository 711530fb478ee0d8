"""Which updates arrive for which step of an asynchronous server: the whole story, told in advance.

When clients are at work all the time, who arrives when depends only on how fast devices are and on
who is started, not on any weight. So it is a pure function of (seed, devices, numbers of local
steps), worked out event by event ahead of the training: step v of the server takes the K updates
that arrive next, each from a client that was started when the model had version u ≤ v. Training
then is what it is in any round, from the model of version u. Nothing of it needs to be saved.

A client is not started again while its update waits in the buffer: of one version it trains once.
Updates that arrive at the same moment are taken in before anybody is started anew.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from fl_lightning.client.devices import Fate
from fl_lightning.core.errors import ConfigurationError
from fl_lightning.core.seeds import numpy_generator
from fl_lightning.data.cohorts.population import ClientIds, Population

# (client, number of the start) -> what becomes of its work
FateOf = Callable[[int, int], Fate]
# Steps that may pass, in virtual time, without an update that arrives.
MOST_LOST_IN_A_ROW = 10_000


@dataclass(frozen=True)
class ServerStep:
    """What a step of the server takes in.

    Attributes:
        versions: of the model that each client began from, by client, in increasing order of ids.
        durations: how long each was at work, in seconds of virtual time.
        seconds: the virtual time of the step.
        in_flight: versions from which somebody is still at work.
    """

    versions: dict[int, int]
    durations: dict[int, float]
    seconds: float
    in_flight: frozenset[int]


@dataclass(frozen=True)
class _Visit:
    client: int
    version: int
    fate: Fate


class Arrivals:
    """The steps of a run's server, worked out as far as they are asked for.

    Args:
        fate_of: how long a client takes, and whether its update arrives.
        num_clients: how many there are.
        concurrency: at work at any time, in [1, num_clients].
        buffer_size: updates per step, in [1, num_clients].
        seed: of who is started.

    Raises:
        ConfigurationError: if there are too few clients.

    Example:
        >>> arrivals = Arrivals(lambda client, start: Fate(1, 1.0 + 2.0 * client, False), 2, 2, 1, 0)
        >>> [arrivals.step(number).versions for number in range(4)]
        [{0: 0}, {0: 1}, {1: 0}, {0: 2}]
    """

    def __init__(
        self, fate_of: FateOf, num_clients: int, concurrency: int, buffer_size: int, seed: int
    ) -> None:
        most = max(concurrency, buffer_size)
        if most > num_clients:
            raise ConfigurationError(
                f"federation.asynchronous: concurrency and buffer_size must be at most the number "
                f"of clients, {num_clients}, got {concurrency} and {buffer_size}"
            )
        self._fate_of, self._seed = fate_of, seed
        self._num_clients, self._concurrency = num_clients, concurrency
        self._buffer_size = buffer_size
        self._steps: list[ServerStep] = []
        self._at_work: list[tuple[float, int, _Visit]] = []  # by when they end
        self._arrived: list[_Visit] = []  # not yet in the buffer
        self._busy: set[int] = set()
        self._now = 0.0
        self._num_started = 0

    def step(self, number: int) -> ServerStep:
        """Return what one step takes in, counted from 0."""
        while len(self._steps) <= number:
            self._steps.append(self._next())
        return self._steps[number]

    def _next(self) -> ServerStep:
        buffer: list[_Visit] = []
        num_lost = 0
        while True:
            room = self._buffer_size - len(buffer)
            buffer += self._arrived[:room]
            self._arrived = self._arrived[room:]
            if len(buffer) == self._buffer_size:
                break
            self._start_clients()
            num_lost += self._wait()
            if num_lost > MOST_LOST_IN_A_ROW:
                raise ConfigurationError(
                    f"federation.devices: {num_lost} updates in a row were lost: lower drop_rate"
                )
        self._busy -= {visit.client for visit in buffer}
        buffer.sort(key=lambda visit: visit.client)
        waiting = [*self._arrived, *(visit for _, _, visit in self._at_work)]
        return ServerStep(
            versions={visit.client: visit.version for visit in buffer},
            durations={visit.client: visit.fate.seconds for visit in buffer},
            seconds=self._now,
            in_flight=frozenset(visit.version for visit in waiting),
        )

    def _start_clients(self) -> None:
        for client in self._drawn(self._concurrency - len(self._at_work)):
            fate = self._fate_of(client, self._num_started)
            visit = _Visit(client, len(self._steps), fate)
            heapq.heappush(self._at_work, (self._now + fate.seconds, self._num_started, visit))
            self._num_started += 1
            self._busy.add(client)

    def _drawn(self, wanted: int) -> list[int]:
        """Return clients that are idle, uniformly at random, as many as wanted or as there are."""
        num_idle = self._num_clients - len(self._busy)
        if wanted >= num_idle:
            return [c for c in range(self._num_clients) if c not in self._busy] if num_idle else []
        generator = numpy_generator(self._seed, "start", self._num_started)
        drawn: set[int] = set()
        while len(drawn) < wanted:
            client = int(generator.integers(self._num_clients))
            if client not in self._busy:
                drawn.add(client)
        return sorted(drawn)

    def _wait(self) -> int:
        """Let time pass until somebody ends, and return how many updates were lost."""
        self._now = self._at_work[0][0]
        ended = []
        while self._at_work and self._at_work[0][0] == self._now:
            ended.append(heapq.heappop(self._at_work)[2])
        lost = [visit for visit in ended if visit.fate.is_lost]
        self._busy -= {visit.client for visit in lost}
        self._arrived = [visit for visit in ended if not visit.fate.is_lost]
        return len(lost)


@dataclass(frozen=True)
class ArrivingCohort:
    """The clients whose updates arrive, as a cohort."""

    arrivals: Arrivals
    buffer_size: int

    def expected_size(self, num_clients: int) -> int:
        """Return the size of the buffer."""
        return self.buffer_size

    def sample(self, round_index: int, population: Population, seed: int) -> ClientIds:
        """Return the ids of the clients whose updates the step takes in."""
        return np.array(list(self.arrivals.step(round_index).versions), np.int64)
