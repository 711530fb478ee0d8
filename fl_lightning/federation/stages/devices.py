"""Simulated devices and virtual time, of synchronous and of asynchronous servers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from fl_lightning.client.clocks import Ended, RecordedArrivals, RecordedClock, VirtualClock, Visit
from fl_lightning.client.devices import Devices, Fleet, WorkResult
from fl_lightning.client.work import GroupWork
from fl_lightning.core.errors import ConfigurationError
from fl_lightning.federation.plan import WorkPlan
from fl_lightning.federation.round_record import RoundRecord
from fl_lightning.federation.stage import Processes, Stage
from fl_lightning.federation.stages.asynchrony import (
    Arrivals,
    ArrivingCohort,
)
from fl_lightning.server.staleness import AsyncRule


class SimulatedDevices(Stage):
    """Simulated devices where the server waits for its cohort."""

    def __init__(self, fleet: Fleet, plan: WorkPlan) -> None:
        self._fleet, self._plan = fleet, plan

    def work(self, work: GroupWork, record: RoundRecord) -> GroupWork:
        """Return the work that clients finish on their devices, without clients whose update is lost."""
        sending = []
        for client in work:
            steps = self._plan.batches_of_steps(client)
            result = self._fleet.result(client.client_id, len(steps), draw=client.round_index)
            record.durations[client.client_id] = result.seconds
            if result.is_lost and steps:
                record.lost.append(client.client_id)
            else:
                sending.append(client.head(sum(steps[: result.num_steps])))
        return GroupWork.of(sending)

    def settle(self, record: RoundRecord, processes: Processes) -> None:
        """Advance virtual time until the last client has ended."""
        record.ended_at = record.began_at + max(record.durations.values(), default=0.0)


@dataclass(frozen=True)
class VirtualTime:
    """Simulated time of a run: its devices and arrivals, and the rule of an asynchronous server."""

    fleet: Fleet | None = None  # the clients' devices; None if time is not simulated
    # weighs stale updates; None if the server waits for its cohort
    rule: AsyncRule | None = None
    # order of arrivals; None if the server waits for its cohort, or if clients are remote
    arrivals: Arrivals | None = None

    @classmethod
    def of(
        cls,
        devices: Devices | RecordedArrivals | None,
        rule: AsyncRule | None,
        num_steps: npt.NDArray[np.int64],
        seed: int,
        *,
        elsewhere: bool = False,
    ) -> VirtualTime:
        """Return the time of a run.

        Raises:
            ConfigurationError: for an asynchronous rule without devices.
        """
        if rule is None:
            if not isinstance(devices, Devices) or elsewhere:
                return cls()
            return cls(Fleet(devices, len(num_steps), seed))
        if elsewhere:
            return cls(rule=rule)
        counts = len(num_steps), rule.concurrency, rule.buffer_size
        if isinstance(devices, RecordedArrivals):
            clock = RecordedClock(devices.arrivals(), _nobody_more)
            return cls(rule=rule, arrivals=Arrivals(clock, *counts, seed))
        if devices is None:
            raise ConfigurationError(
                "federation: asynchronous needs devices: without speeds nobody would ever be late. Use "
                "fl_lightning.client.Devices"
            )
        fleet = Fleet(devices, len(num_steps), seed)

        def result_of(client: int, start: int) -> WorkResult:
            return fleet.result(client, max(1, int(num_steps[client])), draw=start)

        return cls(fleet, rule, Arrivals(VirtualClock(result_of), *counts, seed))

    @property
    def cohort(self) -> ArrivingCohort | None:
        """Cohorts of an asynchronous server; None if the server waits for its cohort."""
        rule = self.rule
        return None if rule is None else ArrivingCohort(self.arrivals, rule.buffer_size)


def _nobody_more(at_work: Sequence[Visit]) -> Ended:
    raise ConfigurationError(
        "federation.devices: the recorded run had no more rounds than this one has had: set trainer.max_epochs "
        "to as many as it had"
    )
