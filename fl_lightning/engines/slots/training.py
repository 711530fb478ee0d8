"""Training of many clients at once in G slots; when a client finishes, its slot trains the next one.

Updates equal those of sequential training: each client starts from the global model with an empty
optimizer state and trains on its batches in order. Only the order of floating-point operations inside
a batch differs. Slots do not wait for each other (see `pack`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial

import numpy as np
import torch
from torch import Tensor

from fl_lightning.client.corrections.correction import GradientTerm
from fl_lightning.client.state.tensors import is_number
from fl_lightning.client.work import ClientWork, GroupWork
from fl_lightning.core.seeds import Integers
from fl_lightning.core.space import Space
from fl_lightning.core.update import GlobalModel, Updates
from fl_lightning.engines.compiler.compiling import HasChanged
from fl_lightning.engines.functional import CannotStack
from fl_lightning.engines.functional.functional_step import Tensors
from fl_lightning.engines.functional.metrics import GivenStep
from fl_lightning.engines.slots.inputs import ReadBatch, SlotInputs, StepPart
from fl_lightning.engines.slots.plan import (
    SlotClient,
    SlotSchedule,
    StepPlan,
    in_part,
    pack,
    plan_steps,
    slot_client,
)
from fl_lightning.engines.slots.results import OwnOf, SlotOwn, SlotResults, SlotRows
from fl_lightning.engines.slots.stacked_step import StackedStep

# Maps a client's id to the term that is added to its gradients.
TermOf = Callable[[int], GradientTerm]


class SlotTrainer:
    """Trains many small clients at once, in the slots of one stacked step (`vmap`).

    Args:
        step: stacked step, which holds the slots' tensors.
        space: layout of the trainable parameters.
        buffers: layout of the floating-point buffers.
        read: builds a batch from indices.
        batch_size: examples of a full batch, B.
        names: names of logged values in updates, by the name that the module logs, if different.
        reads_at_random: True if ``read`` draws random numbers (augmentation).
        own: personal parameters of clients; None if there are none.
        integers: returns the initial integer buffers by name; None for the module's current ones.
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
        integers: Callable[[], Tensors] | None = None,
    ) -> None:
        if any(step.buffers[name].is_complex() for name in buffers.names if step.buffers):
            raise CannotStack("clients change a buffer of complex numbers")
        self._own = own
        self._left_out: set[int] = set()
        self._results = SlotResults(step, space, buffers, names or {})
        self._step = step
        self._batch_size = batch_size
        self._num_slots = step.options.num_slots
        self._inputs = SlotInputs(
            read,
            num_slots=self._num_slots,
            batch_size=batch_size,
            padded=step.options.padded,
            reads_at_random=reads_at_random,
        )
        self._space, self._buffers = space, buffers
        params = [step.params[name] for name in space.names]
        stacked_buffers = [step.buffers[name] for name in buffers.names if step.buffers]
        present = {n: b for n, b in step.buffers.items() if not is_number(b)}
        self._integer_names = list(present)
        self._integer_starts = [buffer[0].clone() for buffer in present.values()]
        self._integers = integers
        self._stacked = [*params, *stacked_buffers, *present.values()]
        self._rows = SlotRows(self._stacked)
        self._fresh = SlotRows()

    def train(
        self,
        start: GlobalModel,
        clients: Iterable[ClientWork],
        term: TermOf | None = None,
        own: OwnOf | None = None,
    ) -> Iterator[Updates]:
        """Train clients and yield their updates, in groups of about as many clients as there are slots.

        At the end the module's metrics are updated with the examples of all clients, except for those that
        were passed to `leave_out`.

        Args:
            start: the global model.
            clients: local work of each client, with at least one batch.
            term: term of each client's gradients, all with the same pull; None for no term.
            own: personal parameters of each client; None to start from those of the global model.
        """
        work, has_yielded = GroupWork.of(clients), False
        try:
            for group in self._train(start, work, term, own):
                has_yielded = True
                yield group
        except HasChanged as change:
            if has_yielded:
                raise CannotStack(str(change)) from change
        else:
            return
        # raised before the first step, so that nothing has changed
        self._step.graphs.forget()
        yield from self._train(start, work, term, own)

    def _train(
        self, start: GlobalModel, work: GroupWork, term: TermOf | None, own: OwnOf | None
    ) -> Iterator[Updates]:
        self._step.read_options()
        sizes = {self._batch_size, *work.sizes.tolist()}
        rehearsal = self._step.graphs.rehearse(partial(self._inputs.batch_like, work[0]), sizes)
        self._refuse_constants()
        rehearsals = self._step.graphs.rehearsals
        draws = {size: r.draws for size, r in rehearsals.items()} if rehearsal.draws.numbers else {}
        pull = 0.0 if term is None else term(int(work.client_ids[0])).pull
        named_start = self._open(start, work, pull, own)
        schedule = pack(work.num_steps, self._num_slots)
        plans = plan_steps(
            schedule, work, self._num_slots, self._batch_size, self._step.count.device
        )
        has_own = bool(self._step.shifts) or self._own is not None
        names_newcomers = has_own or self._inputs.depends_on_clients(draws)
        together = self._begin_alike(work)
        given: list[tuple[StepPlan, list[int] | None, list[Tensor]]] = []
        self._left_out.clear()
        for plan in plans:
            new, done = schedule.beginning(plan.number), schedule.ending(plan.number)
            newcomers = (
                [slot_client(schedule, position, work) for position in new]
                if names_newcomers
                else []
            )
            part, *apart = self._inputs.next(plan, newcomers, draws)
            if self._step.shifts:
                self._shift(newcomers, term)
            alike = together and bool(len(new))
            if alike and len(done):
                yield self._only(named_start, part, schedule.clients[done])
            elif alike:
                self._step.first(named_start, part)
            else:
                self._reset(schedule.slots[new].tolist())
                self._enter(newcomers)
                self._step(part, apart)
            if len(rehearsal.feed):
                given += [(plan, slots, tensors) for slots, tensors in self._step.given]
            if not alike:
                slots, ended = schedule.slots[done].tolist(), schedule.clients[done].tolist()
                yield from self._finish(slots, ended, work)
        yield from self._results.pop()
        if given:
            self._mark_left_out(schedule, work, plans)
            is_padded = self._step.options.padded
            counts = (p.valid.bool() if is_padded else in_part(p, slots) for p, slots, _ in given)
            parts = zip((tensors for _, _, tensors in given), counts, strict=True)
            rehearsal.feed.feed([GivenStep(*part) for part in parts])

    def _refuse_constants(self) -> None:
        """Raise CannotStack if the training step writes to a buffer that updates do not contain."""
        known = {*self._buffers.names, *self._integer_names}
        if self._own is None and (unknown := self._step.graphs.written - known):
            raise CannotStack(f"training_step changes the buffer {min(unknown)}")

    def _open(self, start: GlobalModel, work: GroupWork, pull: float, own: OwnOf | None) -> Tensors:
        """Prepare for a group of clients; return the global model's parameters by name."""
        named_start = self._space.full(start.params)
        self._step.pull_to(named_start, pull)
        self._start = list(named_start.values())
        if self._integers is not None:
            start_of = self._integers()
            self._integer_starts = [start_of[name] for name in self._integer_names]
        self._results.open(start, work)
        self._start_buffers = self._buffers.views(start.buffers) if self._step.buffers else []
        self._state_rows = [t for states in self._step.states.values() for t in states]
        if self._own is not None:
            self._own.open(own)
        return named_start

    def _mark_left_out(
        self, schedule: SlotSchedule, work: GroupWork, plans: Sequence[StepPlan]
    ) -> None:
        """Mark the examples of excluded clients as padding, which metrics ignore."""
        ids = work.client_ids[schedule.clients]
        for position in np.flatnonzero(np.isin(ids, list(self._left_out))):
            for plan in plans[schedule.begins[position] : schedule.ends[position]]:
                plan.valid[schedule.slots[position]] = 0

    def leave_out(self, client: int) -> None:
        """Exclude a client's examples from the module's metrics, because its update cannot be used."""
        self._left_out.add(client)

    def _begin_alike(self, work: GroupWork) -> bool:
        """True if all slots start new clients together, from the same parameters and with equal batch sizes."""
        alike = bool((work.num_steps == work.num_steps[0]).all())
        if not self._step.options.padded:
            firsts = work.sizes[work.first_steps[:-1]]
            alike = alike and bool((firsts == firsts[0]).all())
        has_own = bool(self._step.buffers) or self._own is not None
        return alike and not has_own and not self._step.graphs.functions.unused

    def _enter(self, newcomers: Sequence[SlotClient]) -> None:
        """Write the personal parameters of starting clients into the clients' slots."""
        if self._own is None:
            return
        for client in newcomers:
            self._own.enter(client.slot, client.work.client_id)

    def _only(self, start: Tensors, part: StepPart, clients: Integers) -> Updates:
        """Train clients that take only one step, and return their updates."""
        deltas, sums = self._step.only(start, part, self._space.active)
        count = len(clients)
        sums = {name: total[:count] for name, total in sums.items()}
        return self._results.group(clients, deltas[:count], sums)

    def _finish(self, slots: list[int], clients: list[int], work: GroupWork) -> Iterator[Updates]:
        """Collect the updates of finished clients in the buffer; if it is full, yield its content first."""
        if not slots:
            return
        if not self._results.has_room(len(slots)):
            yield from self._results.pop()
        deltas = self._results.collect(slots, clients)
        if self._own is None:
            return
        for delta, slot, client in zip(deltas, slots, clients, strict=True):
            if not self._own.leave(slot, int(work.client_ids[client])):
                delta.fill_(torch.nan)  # unusable without finite personal parameters

    @torch.no_grad()
    def _shift(self, newcomers: Sequence[SlotClient], term: TermOf | None) -> None:
        """Write into the slots the vectors that a correction adds to starting clients' gradients."""
        shifts = self._step.shifts
        for client in newcomers:
            rows = {name: shift[client.slot] for name, shift in shifts.items()}
            vector = None if term is None else term(client.work.client_id).shift
            if vector is None:
                torch._foreach_zero_(list(rows.values()))
                continue
            for name, view in self._space.named_views(vector).items():
                index = self._space.active.get(name)
                if index is None:
                    rows[name].copy_(view)
                else:  # frozen entries stay 0
                    rows[name].view(-1).index_copy_(0, index, view)

    @torch.no_grad()
    def _reset(self, slots: list[int]) -> None:
        if not slots:
            return
        step = self._step
        fresh = [*step.sums.values(), *self._state_rows, step.count]
        starts = [*self._start, *self._start_buffers, *self._integer_starts]
        if len(slots) == self._num_slots:
            torch._foreach_zero_(fresh)
            for tensor, value in zip(self._stacked, starts, strict=True):
                tensor.copy_(value)
            return
        self._fresh = self._fresh.following(fresh)
        torch._foreach_zero_(self._fresh.of(slots))
        torch._foreach_copy_(self._rows.of(slots), starts * len(slots))
