"""Rounds whose updates the server cannot read: what goes with them, and what they cost.

Clients' metrics and buffers are no part of a secure sum: the first travel in clear beside it, which
is said before training, models with the second are refused.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from lightning.pytorch.utilities import rank_zero_info

from fl_lightning.core.errors import ConfigurationError
from fl_lightning.core.update import ClientUpdate, GlobalModel
from fl_lightning.federation.checks.privacy import shown_by
from fl_lightning.federation.round_record import RoundRecord
from fl_lightning.federation.run import Run
from fl_lightning.federation.stage import Processes, Stage, Upload
from fl_lightning.server.protected import Protected
from fl_lightning.updates.message import bytes_up


class SecureRounds(Stage):
    """The part of a round around an aggregator that hides updates.

    Attributes:
        aggregator: as given.
    """

    def __init__(self, aggregator: Protected, run: Run) -> None:
        self.aggregator = aggregator
        self._is_told = False
        self._shown = shown_by([*run.trainer.callbacks, *run.data.transforms])  # type: ignore[attr-defined]

    def open(self, round_index: int, model: GlobalModel) -> None:
        """Refuse a model of which more than the update would travel; say once what the server sees."""
        if num_buffers := model.buffers.numel():
            raise ConfigurationError(
                f"federation.aggregator {type(self.aggregator).__name__} hides deltas, and the model "
                f"has {num_buffers} numbers in buffers (statistics of batch norm), or in frozen "
                "parameters that clients change, which would travel in clear: use group or layer "
                "norm, or track_running_stats: false"
            )
        if not self._is_told:
            self._is_told = True
            clear = [
                "who takes part and who fails",
                "the metrics that clients log, with the number of examples they are means over",
                *self._shown,
            ]
            rank_zero_info(f"secure: {self.aggregator.hides}; in clear go " + ", ".join(clear))

    def up(self, upload: Upload) -> Iterable[Upload]:
        """Count no deltas: what travels instead is told by the aggregator when it is done."""
        whole, arrived = bytes_up(upload.arrived), upload.arrived
        rest = bytes_up(replace(arrived, deltas=arrived.deltas[:, :0]))
        return (upload._replace(num_bytes=upload.num_bytes + rest - whole),)

    def more_bytes(self, model: GlobalModel, num_clients: int) -> tuple[int, int]:
        """Extra bytes that a client uploads, and downloads, because its update is hidden."""
        up, down = self.aggregator.typical_bytes(len(model.params), max(2, num_clients))
        none = model.params[:0]  # of buffers as well; metrics are not counted
        dense, empty = (bytes_up(ClientUpdate(0, p, none, 1, 1)) for p in (model.params, none))
        return up + empty - dense, down

    def settle(self, record: RoundRecord, processes: Processes) -> None:
        """Tell the aggregator whose updates will not come."""
        self.aggregator.miss(record.skipped.keys() | set(record.lost))

    def close(self, record: RoundRecord) -> None:
        """Put what the round has cost into its record."""
        cost = self.aggregator.protection_cost
        absent = record.skipped.keys() | set(record.lost)
        record.total_bytes_up += sum(cost.bytes_up.values())
        record.total_bytes_down += sum(cost.bytes_down.values())
        record.bytes_up_of_absent += sum(n for c, n in cost.bytes_up.items() if c in absent)
        record.more |= {f"secure/{name}": value for name, value in cost.seconds.items()}
