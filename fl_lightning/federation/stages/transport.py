"""Transforms of models on the way down and of updates on the way up, and the bytes of both.

    x → download → x'        Δ (+ a client's error feedback) → updates → Δ'

`SecureRounds` is for aggregators that hide updates from the server. Metrics are sent in the clear beside a
secure sum, which is logged before training. Models whose clients change buffers are rejected.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from functools import reduce
from operator import or_
from typing import Any

from lightning.pytorch.utilities import rank_zero_info
from torch import Tensor

from fl_lightning.client.work import GroupWork
from fl_lightning.core.errors import ConfigurationError
from fl_lightning.core.space import Space
from fl_lightning.core.traits import NO_TRAITS
from fl_lightning.core.update import ClientUpdate, GlobalModel, Updates
from fl_lightning.federation.checks.privacy import shown_by
from fl_lightning.federation.round_record import RoundRecord
from fl_lightning.federation.run import Run
from fl_lightning.federation.stage import Stage, Start, Upload, check_same
from fl_lightning.server.protected import Protected
from fl_lightning.updates.message import bytes_down, bytes_up
from fl_lightning.updates.path import OF_DOWNLOAD, Arrival, Broadcast, Step, UpdatePath
from fl_lightning.updates.transform import Transform

_FEEDBACK = "error feedback"


class Transport(Stage):
    """Stage that sends models and updates unchanged; base of `TransformingTransport`, which applies transforms.

    Attributes:
        path: transforms of updates.
        broadcast: transforms of models.
    """

    key = "updates"

    def __init__(self, updates: Sequence[Step], download: Sequence[Transform], seed: int) -> None:
        of_download = OF_DOWNLOAD if download else NO_TRAITS
        self.traits = reduce(or_, (step.traits for step in updates), of_download)
        self.path = UpdatePath(updates, seed)
        self.broadcast = Broadcast(download, seed)

    @staticmethod
    def of(updates: Sequence[Step], download: Sequence[Transform], seed: int) -> Transport:
        """Return a run's transport stage, which applies transforms such as compression; a plain stage without any."""
        kind = TransformingTransport if updates or download else Transport
        return kind(updates, download, seed)

    def enter(self, run: Run) -> None:
        """Keep the run and its client states, which hold the residuals of error feedback."""
        self._run, self._memory = run, run.memory

    @property
    def is_lossy(self) -> bool:
        """True if transforms change updates on their way to the server."""
        return not self.path.is_empty

    def place(self, space: Space, positions: Tensor | None) -> None:
        """Adopt a new layout of the exchanged vectors; in new entries, the residuals of error feedback are 0."""
        if positions is not None and self.path.has_memory:
            self._memory.relocate(_FEEDBACK, positions)
        self.path.place(space.shapes)
        self.broadcast.place(space.shapes)

    def sent(self, update: ClientUpdate, began: int) -> Arrival:
        """Return a client's update as it arrives at the server; with error feedback, store the part that was lost."""
        kept = self._memory.get(_FEEDBACK, update.client_id) if self.path.has_memory else None
        kept = None if kept is None else kept.to(update.delta.device)
        arrival = self.path.send(update, began, kept)
        if arrival.memory is not None:
            self._memory.put(_FEEDBACK, update.client_id, arrival.memory)
        return arrival

    def more_bytes(self, model: GlobalModel, num_clients: int) -> tuple[int, int]:
        """Return the approximate bytes that a client uploads and downloads per round, without metrics."""
        up = self.path.typical_bytes(model.params, model.buffers.numel())
        return up, self.broadcast.send(model.params, model.buffers, 0).num_bytes

    def state_dict(self) -> list[str]:
        """Return the names of the transforms of updates and of models."""
        return [*self.path.names, "down:", *self.broadcast.names]

    def check(self, state: Any) -> None:
        """Raise if the checkpoint is of a run with other transforms."""
        check_same("updates", state, self.state_dict())


class TransformingTransport(Transport):
    """Applies transforms, such as compression, to models and updates that are sent."""

    def down(self, start: Start, work: GroupWork) -> list[tuple[Start, GroupWork]]:
        """Return the start with the model after the download transforms, and with the bytes sent to a client."""
        model, round_index = start.model, self._run.round_index
        sent = self.broadcast.send(model.params, model.buffers, round_index)
        more = sent.num_bytes - bytes_down(model.params, model.buffers)
        if sent.params is not model.params:
            model = GlobalModel(sent.params, model.buffers)
        return [(start._replace(model=model, num_bytes=start.num_bytes + more), work)]

    def up(self, upload: Upload) -> Iterable[Upload]:
        """Return updates as they arrive at the server; one by one if transforms change them."""
        return (upload,) if self.path.is_empty else self._one_by_one(upload)

    def _one_by_one(self, upload: Upload) -> Iterator[Upload]:
        start, began = upload.start, self._run.round_index - upload.start.staleness
        whole = bytes_up(upload.arrived)
        for made, update in zip(upload.made, upload.arrived, strict=True):
            arrival = self.sent(update, began)
            num_bytes = upload.num_bytes + arrival.num_bytes - whole
            arrived = Updates.of(arrival.update)
            yield Upload(start, Updates.of(made), arrived, num_bytes, arrival.error)


class SecureRounds(Stage):
    """Checks and byte counts for secure aggregation, which hides single updates from the server."""

    def __init__(self, aggregator: Protected, run: Run) -> None:
        self.aggregator = aggregator
        self._is_told = False
        self._shown = shown_by([*run.trainer.callbacks, *run.data.transforms])  # type: ignore[attr-defined]

    def open(self, round_index: int, model: GlobalModel) -> None:
        """Raise if clients would send buffers unencrypted; log once what the server still sees."""
        if num_buffers := model.buffers.numel():
            raise ConfigurationError(
                f"federation.aggregator {type(self.aggregator).__name__} hides updates of parameters only, "
                f"and clients change {num_buffers} entries of buffers (statistics of batch norm) or of frozen "
                "parameters, which would be sent in the clear: use group or layer norm, or "
                "track_running_stats: false"
            )
        if not self._is_told:
            self._is_told = True
            clear = [
                "which clients take part and which fail",
                "the metrics that clients log, with their numbers of examples",
                *self._shown,
            ]
            rank_zero_info(f"secure: {self.aggregator.hides}; not hidden: " + ", ".join(clear))

    def up(self, upload: Upload) -> Iterable[Upload]:
        """Leave the plain updates out of the upload bytes; the aggregator counts the bytes of the hidden updates."""
        whole, arrived = bytes_up(upload.arrived), upload.arrived
        rest = bytes_up(replace(arrived, deltas=arrived.deltas[:, :0]))
        return (upload._replace(num_bytes=upload.num_bytes + rest - whole),)

    def more_bytes(self, model: GlobalModel, num_clients: int) -> tuple[int, int]:
        """Return the approximate extra bytes that a client uploads and downloads to hide its update."""
        up, down = self.aggregator.typical_bytes(len(model.params), max(2, num_clients))
        none = model.params[:0]  # of buffers as well; metrics are not counted
        dense, empty = (bytes_up(ClientUpdate(0, p, none, 1, 1)) for p in (model.params, none))
        return up + empty - dense, down

    def before_step(self, record: RoundRecord) -> None:
        """Tell the secure aggregator which clients' updates will not arrive."""
        self.aggregator.miss(record.skipped.keys() | set(record.lost))

    def close(self, record: RoundRecord) -> None:
        """Add the bytes and seconds that secure aggregation has cost to the round's metrics."""
        cost = self.aggregator.protection_cost
        absent = record.skipped.keys() | set(record.lost)
        record.total_bytes_up += sum(cost.bytes_up.values())
        record.total_bytes_down += sum(cost.bytes_down.values())
        record.bytes_up_of_absent += sum(n for c, n in cost.bytes_up.items() if c in absent)
        record.more |= {f"secure/{name}": value for name, value in cost.seconds.items()}
