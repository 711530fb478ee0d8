"""Stages of an asynchronous server: arrivals of updates, stored model versions, staleness.

Step v of the server aggregates the next K updates to arrive, each from a client that started from model
version u ≤ v and trained as in any round. When a client ends, another starts; this never depends on weights.
A clock says which client ends next. In simulation it runs on virtual time: all steps are a pure function of
(seed, devices, numbers of local steps), and nothing needs to be saved. Over a network the order in which
answers arrive is recorded, which makes the steps reproducible as well.

A client does not start again while its update waits in the buffer: it trains once per version. Updates
that arrive at the same moment are all received before another client starts.

`Versions` keeps models from which clients still train; `StaleUpdates` scales updates by their staleness.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor

from fl_lightning.client.clocks import Clock, FinishedClient, StartedClient
from fl_lightning.client.state.round_start import Options
from fl_lightning.client.work import GroupWork
from fl_lightning.core.errors import ConfigurationError
from fl_lightning.core.seeds import numpy_generator
from fl_lightning.core.space import Space
from fl_lightning.core.update import GlobalModel
from fl_lightning.data.cohorts.cohort import Cohort
from fl_lightning.data.cohorts.population import ClientIds, Population
from fl_lightning.federation.round_record import RoundRecord
from fl_lightning.federation.run import Run
from fl_lightning.federation.stage import Stage, Start, Upload
from fl_lightning.server.staleness import AsyncRule

# Largest number of updates that may be lost in a row before one arrives.
MOST_LOST_IN_A_ROW = 10_000


@dataclass(frozen=True)
class ServerStep:
    """One server step: the clients whose updates it aggregates, their model versions and times."""

    # model version from which each client started, by increasing client id
    versions: dict[int, int]
    durations: dict[int, float]  # training time of each client, in seconds
    seconds: float  # the time of the step
    in_flight: frozenset[int]  # versions from which a client still trains

    def staleness(self, present: int) -> float:
        """Return the mean staleness of this step's updates: server steps between a client's start and its arrival."""
        return sum(present - version for version in self.versions.values()) / len(self.versions)


class Arrivals:
    """Order in which updates arrive at an asynchronous server, step by step, computed on first access.

    Args:
        clock: says which client ends next.
        num_clients: number of clients.
        concurrency: clients that train at any time, in [1, num_clients].
        buffer_size: updates per server step, in [1, num_clients].
        seed: seed of the choice of clients to start.

    Raises:
        ConfigurationError: if there are too few clients.

    Example:
        >>> from fl_lightning.client.clocks import VirtualClock
        >>> from fl_lightning.client.devices import WorkResult
        >>> clock = VirtualClock(lambda client, start: WorkResult(1, 1.0 + 2.0 * client, False))
        >>> arrivals = Arrivals(clock, 2, 2, 1, 0)
        >>> [arrivals.step(number).versions for number in range(4)]
        [{0: 0}, {0: 1}, {1: 0}, {0: 2}]
    """

    def __init__(
        self, clock: Clock, num_clients: int, concurrency: int, buffer_size: int, seed: int
    ) -> None:
        most = max(concurrency, buffer_size)
        if most > num_clients:
            raise ConfigurationError(
                f"federation.asynchronous: concurrency and buffer_size must be at most the number "
                f"of clients, {num_clients}, got {concurrency} and {buffer_size}"
            )
        self._clock, self._seed = clock, seed
        self._num_clients, self._concurrency = num_clients, concurrency
        self._buffer_size = buffer_size
        self._steps: list[ServerStep] = []
        self._at_work: dict[int, int] = {}  # version, by client
        self._arrived: list[FinishedClient] = []  # not yet in the buffer
        self._busy: set[int] = set()
        self._num_started = 0

    def step(self, number: int) -> ServerStep:
        """Return which clients' updates a server step aggregates, with model versions and times; steps count from 0."""
        while len(self._steps) <= number:
            self._steps.append(self._next())
        return self._steps[number]

    def _next(self) -> ServerStep:
        buffer: list[FinishedClient] = []
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
                    f"federation.devices: {num_lost} updates in a row were lost: lower its drop_rate"
                )
        self._busy -= {ended.client for ended in buffer}
        buffer.sort(key=lambda ended: ended.client)
        waiting = (ended.version for ended in self._arrived)
        return ServerStep(
            versions={ended.client: ended.version for ended in buffer},
            durations={ended.client: ended.seconds for ended in buffer},
            seconds=self._clock.now,
            in_flight=frozenset([*waiting, *self._at_work.values()]),
        )

    def _start_clients(self) -> None:
        version = len(self._steps)
        for client in self._drawn(self._concurrency - len(self._at_work)):
            self._clock.start(StartedClient(client, version, self._num_started))
            self._num_started += 1
            self._at_work[client] = version
            self._busy.add(client)

    def _drawn(self, wanted: int) -> list[int]:
        """Draw idle clients uniformly at random, as many as wanted or available."""
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
        """Advance time until the next client has finished, and return how many updates were lost then."""
        ended = self._clock.wait()
        for each in ended:
            del self._at_work[each.client]
        self._busy -= {each.client for each in ended if each.is_lost}
        self._arrived = [each for each in ended if not each.is_lost]
        return len(ended) - len(self._arrived)


@dataclass(frozen=True)
class ArrivingCohort(Cohort):
    """Cohort of an asynchronous run: the clients whose updates a server step aggregates; empty over a network."""

    arrivals: Arrivals | None
    buffer_size: int

    def expected_size(self, num_clients: int) -> int:
        """Return the number of updates that a server step aggregates (the buffer size)."""
        return self.buffer_size

    def sample(self, round_index: int, population: Population, seed: int) -> ClientIds:
        """Return the ids of the clients whose updates a server step aggregates; none if arrivals are not simulated."""
        known = {} if self.arrivals is None else self.arrivals.step(round_index).versions
        return np.array(list(known), np.int64)


class StaleUpdates(Stage):
    """Scales down updates of clients that started from an old version of the global model."""

    def __init__(self, rule: AsyncRule) -> None:
        self._rule = rule

    def up(self, upload: Upload) -> Iterable[Upload]:
        """Return updates scaled by staleness, the number of server steps since their clients started."""
        start, updates = upload.start, upload.arrived
        drift = start.present.params - start.model.params if start.staleness else None
        deltas = self._rule.weighed(updates.deltas, start.staleness, drift)
        buffers = updates.buffers
        if buffers.numel():
            # mixed with the current buffers, so that variances stay positive
            share = self._rule.weighed(buffers.new_ones(()), start.staleness, None)
            buffers = torch.lerp(start.present.buffers.expand_as(buffers), buffers, share)
        return (upload._replace(arrived=replace(updates, deltas=deltas, buffers=buffers)),)


class KeptVersions(Stage):
    """Stores the versions of the global model from which clients still train."""

    key = "versions"

    def __init__(self) -> None:
        self._models: dict[int, GlobalModel] = {}
        self._options: dict[int, Options] = {}  # of clients' optimizers, by version as well
        self._present = 0

    def start(self, version: int, start: Start) -> Start:
        """Return the start (model, optimizer options) of clients that train from a given version of the global model."""
        if version == self._present:
            return start
        kept, present = self._models[version], start.present  # out of a checkpoint it is on the CPU
        return start._replace(
            model=GlobalModel(kept.params.to(present.params), kept.buffers.to(present.buffers)),
            staleness=self._present - version,
            options=self._options.get(version),
        )

    def place(self, space: Space, positions: Tensor | None) -> None:
        """Raise if masks change while clients are training."""
        if positions is not None and self._models:
            raise ConfigurationError(
                "federation.asynchronous does not work with masks that change during the run, because clients that "
                "are training would send other entries than the server expects: leave asynchronous out, or keep "
                "the masks fixed"
            )


class Versions(KeptVersions):
    """Stores the versions of the global model that simulated clients still need."""

    def __init__(self, arrivals: Arrivals) -> None:
        super().__init__()
        self._arrivals = arrivals

    def enter(self, run: Run) -> None:
        """Keep the run's sequential engine, which has the optimizer options, and its plan of clients' work."""
        self._local, self._plan = run.local, run.plan

    def open(self, round_index: int, model: GlobalModel) -> None:
        """Store the current global model if later steps need it, and drop versions that no later step needs."""
        version = self._present = round_index
        step = self._arrivals.step(version)
        if version in step.in_flight:
            self._models[version] = GlobalModel(model.params.clone(), model.buffers.clone())
            self._options[version] = self._local.round_start.options
        needed = step.in_flight | set(step.versions.values())
        self._models = {v: kept for v, kept in self._models.items() if v in needed}
        self._options = {v: kept for v, kept in self._options.items() if v in needed}

    def work(self, work: GroupWork, record: RoundRecord) -> GroupWork:
        """Return each client's work as drawn for the round in which it started, which may be an earlier round."""
        began, clients = self._arrivals.step(self._present).versions, work.client_ids.tolist()
        return self._plan.of(clients, [began.get(client, self._present) for client in clients])

    def down(self, start: Start, work: GroupWork) -> list[tuple[Start, GroupWork]]:
        """Return pairs of a model version and the work of the clients that started from it."""
        return [
            (self.start(version, start), work.where(work.rounds == version))
            for version in sorted(set(work.rounds.tolist()))
        ]

    def before_step(self, record: RoundRecord) -> None:
        """Set the round's end to the virtual time of the server step; record clients' durations and mean staleness."""
        step = self._arrivals.step(self._present)
        record.durations, record.ended_at = dict(step.durations), step.seconds
        record.more["round/staleness"] = step.staleness(self._present)

    def state_dict(self) -> dict[str, Any]:
        """Return the stored global models by version, and which updates arrived last."""
        return {
            "models": {version: dict(vars(model)) for version, model in self._models.items()},
            "options": dict(self._options),
            "present": self._present,
            "arrived": dict(self._arrivals.step(self._present).versions),
            "in_flight": sorted(self._arrivals.step(self._present).in_flight),
        }

    def load_state_dict(self, state: Mapping[str, Any], model: GlobalModel) -> None:
        """Restore the stored global models; raise if the simulated arrivals differ from the checkpoint's."""
        if "present" not in state:
            raise ConfigurationError(
                "the checkpoint is of an asynchronous run over a network, and was saved while sites were training: "
                "resume it by `network run`, or simulate the run from its start with RecordedArrivals"
            )
        step = self._arrivals.step(state["present"])
        if (step.versions, sorted(step.in_flight)) != (state["arrived"], state["in_flight"]):
            raise ConfigurationError(
                "the checkpoint belongs to a run with other devices or another asynchronous rule: "
                "resume with the configuration of the run that wrote it"
            )
        self._present = state["present"]
        device = model.params.device  # checkpoints are read to the CPU
        kept = apply_to_collection(state["models"], Tensor, lambda tensor: tensor.to(device))
        self._models = {version: GlobalModel(**tensors) for version, tensors in kept.items()}
        # masks lie on the device of the parameters, learning rates where they were
        self._options = apply_to_collection(
            dict(state.get("options", {})),
            Tensor,
            lambda tensor: tensor.to(device) if tensor.ndim else tensor,
        )
