"""Transforms of models on their way down and of updates on their way up, and the bytes of both.

x → download → x'        Δ → updates, with what a client kept from its last round → Δ'
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import reduce
from operator import or_
from typing import Any

from torch import Tensor

from fl_lightning.client.work import GroupWork
from fl_lightning.core.space import Space
from fl_lightning.core.traits import NO_TRAITS
from fl_lightning.core.update import ClientUpdate, GlobalModel, Updates
from fl_lightning.federation.run import Run
from fl_lightning.federation.stage import Stage, Start, Upload, check_same
from fl_lightning.updates.message import bytes_down, bytes_up
from fl_lightning.updates.path import OF_DOWNLOAD, Arrival, Broadcast, Step, UpdatePath
from fl_lightning.updates.transform import Transform

_FEEDBACK = "error feedback"


class Transport(Stage):
    """Sends models and updates as they are.

    Attributes:
        path: of updates.
        broadcast: of models.
    """

    key = "updates"

    def __init__(self, updates: Sequence[Step], download: Sequence[Transform], seed: int) -> None:
        of_download = OF_DOWNLOAD if download else NO_TRAITS
        self.traits = reduce(or_, (step.traits for step in updates), of_download)
        self.path = UpdatePath(updates, seed)
        self.broadcast = Broadcast(download, seed)

    @staticmethod
    def of(updates: Sequence[Step], download: Sequence[Transform], seed: int) -> Transport:
        """Return the stage, which does nothing in a round where nothing is transformed."""
        kind = TransformingTransport if updates or download else Transport
        return kind(updates, download, seed)

    def enter(self, run: Run) -> None:
        """Learn whose clients remember what did not arrive, with error feedback."""
        self._run, self._memory = run, run.memory.clients

    @property
    def is_lossy(self) -> bool:
        """True if updates arrive changed."""
        return not self.path.is_empty

    def place(self, space: Space, positions: Tensor | None) -> None:
        """Learn which tensors travel from here on; what is new of a memory is 0."""
        if positions is not None and self.path.has_memory:
            self._memory.relocate(_FEEDBACK, positions)
        self.path.place(space.shapes)
        self.broadcast.place(space.shapes)

    def sent(self, update: ClientUpdate, began: int) -> Arrival:
        """Send a client's update, and have it keep what does not arrive."""
        kept = self._memory.get(_FEEDBACK, update.client_id) if self.path.has_memory else None
        kept = None if kept is None else kept.to(update.delta.device)
        arrival = self.path.send(update, began, kept)
        if arrival.memory is not None:
            self._memory.put(_FEEDBACK, update.client_id, arrival.memory)
        return arrival

    def more_bytes(self, model: GlobalModel, num_clients: int) -> tuple[int, int]:
        """Return about how long messages are, without metrics."""
        up = self.path.typical_bytes(model.params, model.buffers.numel())
        return up, self.broadcast.send(model.params, model.buffers, 0).num_bytes

    def state_dict(self) -> list[str]:
        """Return the paths of updates and of models."""
        return [*self.path.names, "down:", *self.broadcast.names]

    def check(self, state: Any) -> None:
        """Refuse a run in which something else happened."""
        check_same("updates", state, self.state_dict())


class TransformingTransport(Transport):
    """Sends what transforms make of models and updates."""

    def down(self, start: Start, work: GroupWork) -> list[tuple[Start, GroupWork]]:
        """Return the model as clients receive it."""
        model, round_index = start.model, self._run.round_index
        sent = self.broadcast.send(model.params, model.buffers, round_index)
        more = sent.num_bytes - bytes_down(model.params, model.buffers)
        if sent.params is not model.params:
            model = GlobalModel(sent.params, model.buffers)
        return [(start._replace(model=model, num_bytes=start.num_bytes + more), work)]

    def up(self, upload: Upload) -> Iterable[Upload]:
        """Return updates as they arrive: one by one, if transforms change them."""
        return (upload,) if self.path.is_empty else self._one_by_one(upload)

    def _one_by_one(self, upload: Upload) -> Iterator[Upload]:
        start, began = upload.start, self._run.round_index - upload.start.staleness
        whole = bytes_up(upload.arrived)
        for made, update in zip(upload.made, upload.arrived, strict=True):
            arrival = self.sent(update, began)
            num_bytes = upload.num_bytes + arrival.num_bytes - whole
            arrived = Updates.of(arrival.update)
            yield Upload(start, Updates.of(made), arrived, num_bytes, arrival.error)
