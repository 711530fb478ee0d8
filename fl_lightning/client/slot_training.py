"""Many clients at once: G slots train side by side, and each takes the next client when one is done.

What comes out is what one client after the other would give: every slot starts from the global
model with an empty optimizer state and sees its client's batches in their order. Only the order of
floating-point operations inside a batch differs. Nothing waits for the largest client: a slot is
reset and refilled on its own (see `pack`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fl_lightning.client.functional_step import OWN_LOSS, Tensors, map_tensors
from fl_lightning.client.local_training import GlobalModel, check_finite
from fl_lightning.client.packing import Stay, pack
from fl_lightning.client.stacked_step import StackedStep
from fl_lightning.core.errors import ClientFailure
from fl_lightning.core.space import Space
from fl_lightning.core.update import GroupUpdate

# Builds the batch of many indices, shape (N,), on the device where the model is.
ReadBatch = Callable[[Tensor], Any]


@dataclass(frozen=True)
class ClientWork:
    """What one client has to do in a round.

    Attributes:
        client_id: whose it is.
        num_examples: its aggregation weight.
        order: indices of its examples in the order in which local steps see them, shape (n,).
        sizes: how many of them each local step takes, Σ sizes = n.
    """

    client_id: int
    num_examples: int
    order: Tensor
    sizes: list[int]

    @property
    def batches(self) -> tuple[Tensor, ...]:
        """The indices of every local step."""
        return tuple(self.order.split(self.sizes))

    def head(self, num_steps: int) -> ClientWork:
        """Return its first local steps."""
        sizes = self.sizes[:num_steps]
        return replace(self, order=self.order[: sum(sizes)], sizes=sizes)


class SlotTrainer:
    """Trains groups of clients in the slots of one stacked step.

    Args:
        step: holds the slots.
        space: layout of the parameters that train.
        buffers: layout of the floating-point buffers.
        read: builds batches.
        batch_size: examples of a full batch, B.
        names: under which names logged values appear in updates, where those differ.
    """

    def __init__(
        self,
        step: StackedStep,
        space: Space,
        buffers: Space,
        read: ReadBatch,
        batch_size: int,
        names: Mapping[str, str] | None = None,
    ) -> None:
        self._names = names if names is not None else {}
        self._step = step
        self._read = read
        self._batch_size = batch_size
        self._num_slots = step.options.num_slots
        self._space, self._buffers = space, buffers
        self._params = [step.params[name] for name in space.names]
        self._stacked_buffers = [step.buffers[name] for name in buffers.names if step.buffers]
        self._integers = [b for b in step.buffers.values() if not b.is_floating_point()]
        self._integer_starts = [b[0].clone() for b in self._integers]

    def train(self, start: GlobalModel, work: Sequence[ClientWork]) -> Iterator[GroupUpdate]:
        """Train the clients and yield their updates, those that end together at once.

        Args:
            start: the global model.
            work: of each client, with at least one batch.
        """
        self._step.read_options()
        named_start = self._space.full(start.params)
        self._start = list(named_start.values())
        self._start_buffers = self._buffers.views(start.buffers) if self._step.buffers else []
        self._state_rows = [t for states in self._step.states.values() for t in states]
        stays = pack([len(client.sizes) for client in work], self._num_slots)
        indices, valid = self._plan(stays, work)
        begins = {begin: list(group) for begin, group in groupby(stays, lambda s: s.begin)}
        by_end = sorted(stays, key=lambda s: (s.end, s.slot))
        ends = {end: list(group) for end, group in groupby(by_end, lambda s: s.end)}
        # with clients of one size all slots begin together
        together = self._step.options.weighted and len({len(w.sizes) for w in work}) == 1
        for number, (step_indices, step_valid) in enumerate(zip(indices, valid, strict=True)):
            batch = map_tensors(self._by_slot, self._read(step_indices.reshape(-1)))
            if together and number in begins and number + 1 in ends:
                deltas, sums = self._step.only(named_start, batch, step_valid, self._space.active)
                count = len(ends[number + 1])
                yield self._updates(start, ends[number + 1], work, sums, deltas[:count])
                continue
            if together and number in begins:
                self._step.first(named_start, batch, step_valid)
            else:
                self._reset([stay.slot for stay in begins.get(number, [])])
                self._step(batch, step_valid)
            if number + 1 in ends:
                yield self._updates(start, ends[number + 1], work, self._step.sums)

    def _by_slot(self, tensor: Tensor) -> Tensor:
        return tensor.view(self._num_slots, self._batch_size, *tensor.shape[1:])

    def _plan(self, stays: list[Stay], work: Sequence[ClientWork]) -> tuple[Tensor, Tensor]:
        """Return the indices of every step, slot and example, and which of them count.

        Both have shape (T, G, B). What is padded repeats an example of the same client; a slot
        without a client repeats one that somebody has.
        """
        in_order = [work[stay.client] for stay in stays]
        steps = np.array([stay.end - stay.begin for stay in stays])
        rows = np.arange(steps.sum()) - np.repeat(np.cumsum(steps) - steps, steps)
        when = torch.from_numpy(rows + np.repeat([stay.begin for stay in stays], steps))
        where = torch.from_numpy(np.repeat([stay.slot for stay in stays], steps))
        sizes = torch.tensor([size for client in in_order for size in client.sizes])
        order = torch.cat([client.order for client in in_order])
        columns = torch.arange(self._batch_size)
        places = (sizes.cumsum(0) - sizes)[:, None] + torch.minimum(columns, sizes[:, None] - 1)

        shape = max(stay.end for stay in stays), self._num_slots, self._batch_size
        indices = order[:1].expand(shape).clone()
        indices[when, where] = order[places]
        valid = torch.zeros(shape, dtype=torch.float32)
        valid[when, where] = (columns < sizes[:, None]).float()
        return indices, valid.to(self._step.count.device)

    @torch.no_grad()
    def _reset(self, slots: list[int]) -> None:
        step = self._step
        everywhere = len(slots) == self._num_slots
        fresh = [*step.sums.values(), *self._state_rows, step.count]
        starts = [*self._start, *self._start_buffers, *self._integer_starts]
        stacked = [*self._params, *self._stacked_buffers, *self._integers]
        if everywhere:
            torch._foreach_zero_(fresh)
            for tensor, value in zip(stacked, starts, strict=True):
                tensor.copy_(value)
            return
        for slot in slots:
            torch._foreach_zero_([tensor[slot] for tensor in fresh])
            torch._foreach_copy_([tensor[slot] for tensor in stacked], starts)

    @torch.no_grad()
    def _updates(
        self,
        start: GlobalModel,
        stays: list[Stay],
        work: Sequence[ClientWork],
        sums: Tensors,
        deltas: Tensor | None = None,
    ) -> GroupUpdate:
        clients = [work[stay.client] for stay in stays]
        slots = [stay.slot for stay in stays]
        rows: Any = slice(None) if slots == list(range(self._num_slots)) else slots
        means = {name: s[rows, 0] / s[rows, 1] for name, s in sums.items()}
        own = {"train/loss": means.pop(OWN_LOSS)}  # a module may log a train/loss of its own
        return GroupUpdate(
            client_ids=[client.client_id for client in clients],
            deltas=self._deltas(rows, len(slots)) if deltas is None else deltas,
            buffers=self._final_buffers(start, rows, len(slots)),
            num_examples=[client.num_examples for client in clients],
            num_steps=[len(client.sizes) for client in clients],
            metrics=own | {self._names.get(name, name): v for name, v in means.items()},
        )

    def _deltas(self, rows: Any, count: int) -> Tensor:
        first = self._start[0]
        deltas = torch.empty(count, self._space.size, dtype=first.dtype, device=first.device)
        begin = 0
        for name, start, tensor in zip(self._space.names, self._start, self._params, strict=True):
            index = self._space.active.get(name)
            size = start.numel() if index is None else len(index)
            part = deltas[:, begin : begin + size]
            if index is None:
                torch.sub(start, tensor[rows], out=part.view(count, *start.shape))
            else:
                ends = tensor.flatten(1)[:, index][rows]
                torch.sub(start.flatten()[index], ends, out=part)
            begin += size
        return deltas

    def _final_buffers(self, start: GlobalModel, rows: Any, count: int) -> Tensor:
        if not self._stacked_buffers:
            return start.buffers.expand(count, -1)
        return torch.cat([buffer[rows].reshape(count, -1) for buffer in self._stacked_buffers], 1)


def usable_rows(group: GroupUpdate) -> tuple[GroupUpdate, list[ClientFailure]]:
    """Return the group without the clients whose update is not finite, and who they are."""
    loss = group.metrics["train/loss"]
    if bool((loss.sum() + group.norms.sum() + group.buffers.sum()).isfinite()):
        return group, []
    usable = loss.isfinite() & group.norms.isfinite() & group.buffers.isfinite().all(1)
    if bool(usable.all()):  # their sum was too large
        return group, []
    failures = []
    for update in group:
        try:
            check_finite(update)
        except ClientFailure as failure:
            failures.append(failure)
    rows = usable.nonzero().flatten()
    kept = rows.tolist()
    return GroupUpdate(
        client_ids=[group.client_ids[row] for row in kept],
        deltas=group.deltas[rows],
        buffers=group.buffers[rows],
        num_examples=[group.num_examples[row] for row in kept],
        num_steps=[group.num_steps[row] for row in kept],
        metrics={name: values[rows] for name, values in group.metrics.items()},
    ), failures
