"""Simulated devices and virtual time, of synchronous and of asynchronous servers."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from fl_lightning.client.clocks import (
    Clock,
    FinishedClient,
    RecordedArrivals,
    RecordedClock,
    StartedClient,
    VirtualClock,
)
from fl_lightning.client.devices import Devices, Fleet, WorkResult
from fl_lightning.client.work import GroupWork
from fl_lightning.core.errors import ConfigurationError
from fl_lightning.core.seeds import Integers
from fl_lightning.federation.options import Options
from fl_lightning.federation.plan import WorkPlan
from fl_lightning.federation.round_record import RoundRecord
from fl_lightning.federation.stage import Stage
from fl_lightning.federation.stages.asynchrony import Arrivals


class SimulatedDevices(Stage):
    """Simulated devices under a synchronous server: a round lasts until its last client has ended."""

    def __init__(self, fleet: Fleet, plan: WorkPlan) -> None:
        self._fleet, self._plan = fleet, plan

    def work(self, work: GroupWork, record: RoundRecord) -> GroupWork:
        """Return the work that clients finish on their simulated devices; leave out clients whose update is lost."""
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

    def before_step(self, record: RoundRecord) -> None:
        """Set the round's end in virtual time: the moment when its last client has ended."""
        record.ended_at = record.began_at + max(record.durations.values(), default=0.0)


def simulated_time(options: Options, num_steps: Integers) -> tuple[Fleet | None, Arrivals | None]:
    """Return (simulated devices, order of arrivals at an asynchronous server) for the options; each may be None.

    Args:
        options: the options of the federation.
        num_steps: local steps of every client's round, shape (num_clients,).

    Returns:
        Devices are None if time is not simulated (without the option, or with remote clients), or if arrivals
        are recorded. Arrivals are None if the server waits for its cohort.

    Raises:
        ConfigurationError: for an asynchronous rule without devices.
    """
    devices, rule = options.devices, options.asynchronous
    if options.clients_side is not None:
        return None, None
    fleet = Fleet(devices, len(num_steps), options.seed) if isinstance(devices, Devices) else None
    if rule is None:
        return fleet, None
    clock: Clock
    if isinstance(devices, RecordedArrivals):
        clock = RecordedClock(devices.arrivals(), _nobody_more)
    elif fleet is None:
        raise ConfigurationError(
            "federation.asynchronous needs federation.devices, whose speeds decide when updates arrive: set "
            "it to fl_lightning.client.Devices"
        )
    else:
        clock = VirtualClock(partial(_result, fleet, num_steps))
    sizes = len(num_steps), rule.concurrency, rule.buffer_size
    return fleet, Arrivals(clock, *sizes, options.seed)


def _result(fleet: Fleet, num_steps: Integers, client: int, start: int) -> WorkResult:
    return fleet.result(client, max(1, int(num_steps[client])), draw=start)


def _nobody_more(at_work: Sequence[StartedClient]) -> FinishedClient:
    raise ConfigurationError(
        "federation.devices: the recorded run had no more rounds: set trainer.max_epochs to its number of rounds"
    )
