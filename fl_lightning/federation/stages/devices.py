"""Simulated devices: how long clients take, and whose updates do not come, in virtual time."""

from __future__ import annotations

from fl_lightning.client.devices import Fleet
from fl_lightning.client.work import GroupWork
from fl_lightning.federation.plan import WorkPlan
from fl_lightning.federation.round_record import RoundRecord
from fl_lightning.federation.stage import Stage


class SimulatedDevices(Stage):
    """The devices of a server that waits for its cohort.

    Args:
        fleet: the clients' devices.
        plan: the batches of their local steps.
    """

    def __init__(self, fleet: Fleet, plan: WorkPlan) -> None:
        self._fleet, self._plan = fleet, plan

    def work(self, work: GroupWork, record: RoundRecord) -> GroupWork:
        """Return what clients manage on their devices; those whose update will not come are out."""
        sending = []
        for client in work:
            steps = self._plan.batches_of_steps(client)
            fate = self._fleet.fate(client.client_id, len(steps), draw=client.round_index)
            record.durations[client.client_id] = fate.seconds
            if fate.is_lost and steps:
                record.lost.append(client.client_id)
            else:
                sending.append(client.head(sum(steps[: fate.num_steps])))
        return GroupWork.of(sending)

    def settle(self, record: RoundRecord) -> None:
        """Let virtual time go on until the last client has ended."""
        record.ended_at = record.began_at + max(record.durations.values(), default=0.0)
