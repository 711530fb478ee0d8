"""Simulated devices: how long clients take, and whose updates do not come, in virtual time."""

from __future__ import annotations

from fl_lightning.client.devices import Fleet
from fl_lightning.client.work import GroupWork
from fl_lightning.federation.round_record import RoundRecord
from fl_lightning.federation.stage import Processes, Stage


class SimulatedDevices(Stage):
    """The devices of a server that waits for its cohort.

    Args:
        fleet: the clients' devices.
        accumulate: batches per local step.
    """

    def __init__(self, fleet: Fleet, accumulate: int) -> None:
        self._fleet, self._accumulate = fleet, accumulate

    def work(self, work: GroupWork, record: RoundRecord) -> GroupWork:
        """Return what clients manage on their devices; those whose update will not come are out."""
        sending = []
        for client in work:
            num_steps = -(-len(client.sizes) // self._accumulate)
            fate = self._fleet.fate(client.client_id, num_steps, draw=client.round_index)
            record.durations[client.client_id] = fate.seconds
            if fate.is_lost and num_steps:
                record.lost.append(client.client_id)
            else:
                sending.append(client.head(fate.num_steps * self._accumulate))
        return GroupWork.of(sending)

    def settle(self, record: RoundRecord, processes: Processes) -> None:
        """Let virtual time go on until the last client has ended."""
        record.ended_at = record.began_at + max(record.durations.values(), default=0.0)
