"""Many clients at once: G slots train side by side, and each takes the next client when one is done.

What comes out is what one client after the other would give: every slot starts from the global
model with an empty optimizer state and sees its client's batches in their order. Only the order of
floating-point operations inside a batch differs. Nothing waits for the largest client: a slot is
reset and refilled on its own (see `pack`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import groupby
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fl_lightning.client.correction import GradientTerm
from fl_lightning.client.functional_step import OWN_LOSS, Tensors
from fl_lightning.client.local_training import GlobalModel, check_finite
from fl_lightning.client.metric_feed import GivenStep
from fl_lightning.client.packing import Stay, pack
from fl_lightning.client.slot_inputs import ReadBatch, SlotInputs
from fl_lightning.client.slot_own import OwnOf, SlotOwn
from fl_lightning.client.stacked_step import StackedStep
from fl_lightning.client.work import ClientWork
from fl_lightning.core.errors import ClientFailure
from fl_lightning.core.seeds import preserve_global_generators
from fl_lightning.core.space import Space
from fl_lightning.core.update import GroupUpdate

# Gives a client's term by its id.
TermOf = Callable[[int], GradientTerm]


class SlotTrainer:
    """Trains groups of clients in the slots of one stacked step.

    Args:
        step: holds the slots.
        space: layout of the parameters that train.
        buffers: layout of the floating-point buffers.
        read: builds batches.
        batch_size: examples of a full batch, B.
        names: under which names logged values appear in updates, where those differ.
        reads_at_random: whether ``read`` draws random numbers (augmentation).
        own: what clients have for themselves; None for nothing.
    """

    def __init__(
        self,
        step: StackedStep,
        space: Space,
        buffers: Space,
        read: ReadBatch,
        batch_size: int,
        names: Mapping[str, str] | None = None,
        *,
        reads_at_random: bool = False,
        own: SlotOwn | None = None,
    ) -> None:
        self._own = own
        self._left_out: set[int] = set()
        self._names = names if names is not None else {}
        self._step = step
        self._batch_size = batch_size
        self._num_slots = step.options.num_slots
        self._inputs = SlotInputs(
            read,
            num_slots=self._num_slots,
            batch_size=batch_size,
            reads_at_random=reads_at_random,
        )
        self._space, self._buffers = space, buffers
        self._params = [step.params[name] for name in space.names]
        self._stacked_buffers = [step.buffers[name] for name in buffers.names if step.buffers]
        self._integers = [b for b in step.buffers.values() if not b.is_floating_point()]
        self._integer_starts = [b[0].clone() for b in self._integers]

    def train(
        self,
        start: GlobalModel,
        work: Sequence[ClientWork],
        term: TermOf | None = None,
        own: OwnOf | None = None,
    ) -> Iterator[GroupUpdate]:
        """Train the clients and yield their updates, those that end together at once.

        When all are yielded, the module's torchmetrics objects hold their examples, without those
        of clients that `leave_out` names until then.

        Args:
            start: the global model.
            work: of each client, with at least one batch.
            term: what clients add to their gradients, all with the same pull; None for nothing.
            own: what they have for themselves; None for what the global model has.
        """
        self._step.read_options()
        with preserve_global_generators():
            rehearsal = self._step.rehearse(lambda: self._inputs.batch_like(work[0]))
        draws = rehearsal.draws if rehearsal.draws.numbers else None
        pull = 0.0 if term is None else term(work[0].client_id).pull
        named_start = self._open(start, pull, own)
        stays = pack([len(client.sizes) for client in work], self._num_slots)
        indices, valid = self._plan(stays, work)
        begins = {begin: list(group) for begin, group in groupby(stays, lambda s: s.begin)}
        by_end = sorted(stays, key=lambda s: (s.end, s.slot))
        ends = {end: list(group) for end, group in groupby(by_end, lambda s: s.end)}
        together = self._begin_alike(work)
        given: list[list[Tensor]] = []
        self._left_out.clear()
        for number, (step_indices, step_valid) in enumerate(zip(indices, valid, strict=True)):
            new, done = begins.get(number, []), ends.get(number + 1, [])
            guests = [(stay, work[stay.client]) for stay in new]
            batch = self._inputs.next(number, step_indices, guests, draws)
            self._shift(guests, term)
            deltas, sums = None, self._step.sums
            if together and new and done:
                deltas, sums = self._step.only(named_start, batch, step_valid, self._space.active)
                deltas = deltas[: len(done)]
            elif together and new:
                self._step.first(named_start, batch, step_valid)
            else:
                self._reset([stay.slot for stay in new])
                self._enter(guests)
                self._step(batch, step_valid)
            if len(rehearsal.feed):
                given.append(self._step.given)
            if done:
                yield self._updates(start, done, work, sums, deltas)
        if given:
            self._count_out(stays, work, valid)
            steps = zip(given, valid.bool().unbind(), strict=True)
            rehearsal.feed.feed([GivenStep(tensors, counts) for tensors, counts in steps])

    def _open(self, start: GlobalModel, pull: float, own: OwnOf | None) -> Tensors:
        """Have clients begin from a global model; return its parameters by name."""
        named_start = self._space.full(start.params)
        self._step.pull_to(named_start, pull)
        self._start = list(named_start.values())
        self._start_buffers = self._buffers.views(start.buffers) if self._step.buffers else []
        self._state_rows = [t for states in self._step.states.values() for t in states]
        if self._own is not None:
            self._own.open(own)
        return named_start

    def _count_out(self, stays: list[Stay], work: Sequence[ClientWork], valid: Tensor) -> None:
        for stay in stays:
            if work[stay.client].client_id in self._left_out:
                valid[stay.begin : stay.end, stay.slot] = 0

    def leave_out(self, client: int) -> None:
        """Have no example of a client count whose update cannot be used."""
        self._left_out.add(client)

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

    def _begin_alike(self, work: Sequence[ClientWork]) -> bool:
        """Return whether all slots begin together, from the same parameters."""
        one_size = self._step.options.weighted and len({len(w.sizes) for w in work}) == 1
        return one_size and self._own is None

    def _enter(self, guests: Sequence[tuple[Stay, ClientWork]]) -> None:
        """Have what clients that begin have for themselves in their slots."""
        if self._own is None:
            return
        for stay, client in guests:
            self._own.enter(stay.slot, client.client_id)

    def _leave(self, slots: list[int], clients: list[ClientWork], deltas: Tensor) -> None:
        """Keep what clients have for themselves; without that their updates cannot be used."""
        if self._own is None:
            return
        for row, (slot, client) in enumerate(zip(slots, clients, strict=True)):
            if not self._own.leave(slot, client.client_id):
                deltas[row] = torch.nan

    @torch.no_grad()
    def _shift(self, guests: Sequence[tuple[Stay, ClientWork]], term: TermOf | None) -> None:
        """Have the clients that begin shift their gradients."""
        shifts = self._step.shifts
        for stay, client in guests if shifts else ():
            rows = {name: shift[stay.slot] for name, shift in shifts.items()}
            vector = None if term is None else term(client.client_id).shift
            if vector is None:
                torch._foreach_zero_(list(rows.values()))
                continue
            for name, view in self._space.named_views(vector).items():
                index = self._space.active.get(name)
                if index is None:
                    rows[name].copy_(view)
                else:  # what is frozen stays 0
                    rows[name].view(-1).index_copy_(0, index, view)

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
        deltas = self._deltas(rows, len(slots)) if deltas is None else deltas
        self._leave(slots, clients, deltas)
        own = {"train/loss": means.pop(OWN_LOSS)}  # a module may log a train/loss of its own
        return GroupUpdate(
            client_ids=[client.client_id for client in clients],
            deltas=deltas,
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
    return group.rows(usable.nonzero().flatten().tolist()), failures
