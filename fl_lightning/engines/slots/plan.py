"""Which client trains in which slot, when, and on which examples.

G slots work side by side, one local step of each at a time; a slot whose client is done takes the
next one. Clients are handed out longest first, each to the slot that is free first (Graham 1969,
LPT rule): the last slot to finish is at most a third later than in the best plan.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from fl_lightning.client.work import ClientWork, GroupWork
from fl_lightning.core.modules import sent
from fl_lightning.core.seeds import Integers


@dataclass(frozen=True, eq=False)
class SlotSchedule:
    """The times of m clients in their slots, in order of their beginnings, then of slots.

    Attributes:
        clients: their positions in the packed work, shape (m,).
        slots: theirs, shape (m,).
        begins: the first step of each, counted from the start of the pass, shape (m,).
        ends: one past its last step, shape (m,).
    """

    clients: Integers
    slots: Integers
    begins: Integers
    ends: Integers

    @property
    def num_steps(self) -> int:
        """How many steps they take, all together."""
        return int(self.ends.max())

    def beginning(self, step: int) -> Integers:
        """Positions of the clients that begin with a step, in order of slots."""
        return np.arange(self._first_of[step], self._first_of[step + 1])

    def ending(self, step: int) -> Integers:
        """Positions of the clients whose last step this is, in order of slots."""
        return self._by_end[self._last_of[step] : self._last_of[step + 1]]

    @cached_property
    def _first_of(self) -> list[int]:
        firsts: list[int] = np.searchsorted(self.begins, np.arange(self.num_steps + 1)).tolist()
        return firsts

    @cached_property
    def _by_end(self) -> Integers:
        return np.lexsort((self.slots, self.ends))

    @cached_property
    def _last_of(self) -> list[int]:
        steps = np.arange(1, self.num_steps + 2)
        lasts: list[int] = np.searchsorted(self.ends[self._by_end], steps).tolist()
        return lasts


def pack(num_steps: Integers, num_slots: int) -> SlotSchedule:
    """Schedule with one entry per client; a pure function.

    Args:
        num_steps: local steps of each client, ≥ 1, shape (m,), m ≥ 1.
        num_slots: how many train side by side, ≥ 1.

    Example:
        >>> schedule = pack(np.array([2, 3, 1]), 2)
        >>> schedule.clients, schedule.slots, schedule.begins, schedule.ends
        (array([1, 0, 2]), array([0, 1, 1]), array([0, 0, 2]), array([3, 2, 3]))
        >>> schedule.beginning(0), schedule.ending(2)
        (array([0, 1]), array([0, 2]))
    """
    clients = np.arange(len(num_steps))
    if (num_steps == num_steps[0]).all():  # slots take turns
        begins = clients // num_slots * num_steps
        return SlotSchedule(clients, clients % num_slots, begins, begins + num_steps)
    clients = np.argsort(-num_steps, kind="stable")
    slots, begins = np.empty_like(clients), np.empty_like(clients)
    free = [(0, slot) for slot in range(num_slots)]
    for place, steps in enumerate(num_steps[clients].tolist()):
        begins[place], slots[place] = begin, slot = free[0]
        heapq.heapreplace(free, (begin + steps, slot))
    order = np.lexsort((slots, begins))
    clients, begins = clients[order], begins[order]
    return SlotSchedule(clients, slots[order], begins, begins + num_steps[clients])


class SlotClient(NamedTuple):
    """A client in a slot.

    Attributes:
        work: what it does there.
        slot: where.
        begin: its first step, counted from the start of the pass.
        end: one past its last step.
    """

    work: ClientWork
    slot: int
    begin: int
    end: int


class StepPlan(NamedTuple):
    """One step of all slots.

    Attributes:
        number: of the step, counted from the start of the pass.
        indices: of its examples, shape (G, B); smaller batches repeat their last one.
        valid: 1 where an example counts, 0 where it is a repetition, shape (G, B).
        sizes: of the batches, 0 where a slot has none, shape (G,).
    """

    number: int
    indices: Tensor
    valid: Tensor
    sizes: Integers


def slot_client(schedule: SlotSchedule, position: int, work: GroupWork) -> SlotClient:
    """Client at a position of the schedule."""
    client, slot, begin, end = (
        int(x[position]) for x in (schedule.clients, schedule.slots, schedule.begins, schedule.ends)
    )
    return SlotClient(work[client], slot, begin, end)


def plan_steps(
    schedule: SlotSchedule, work: GroupWork, num_slots: int, batch_size: int, device: torch.device
) -> list[StepPlan]:
    """Return all steps; a slot without a client repeats an example that somebody has."""
    counts = work.num_steps[schedule.clients]
    within = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
    when = within + np.repeat(schedule.begins, counts)
    where = np.repeat(schedule.slots, counts)
    steps = within + np.repeat(work.first_steps[schedule.clients], counts)
    begins, sizes = work.begins[steps, None], work.sizes[steps, None]
    of_slots = np.zeros((schedule.num_steps, num_slots), np.int64)
    of_slots[when, where] = sizes[:, 0]
    columns = np.arange(batch_size)
    order = work.order.numpy()
    shape = schedule.num_steps, num_slots, batch_size
    indices, valid = np.full(shape, order[0]), np.zeros(shape, np.float32)
    indices[when, where] = order[begins + np.minimum(columns, sizes - 1)]
    valid[when, where] = columns < sizes
    valids = sent(torch.from_numpy(valid), device)
    steps_of_all = zip(torch.from_numpy(indices), valids, of_slots, strict=True)
    return [StepPlan(number, *step) for number, step in enumerate(steps_of_all)]


def in_part(plan: StepPlan, slots: list[int] | None) -> Tensor:
    """Which examples are in the batches of some slots; without any, in those of the largest size."""
    if slots is not None:
        return plan.valid[slots].bool()
    return plan.valid.bool() & torch.from_numpy(plan.sizes == plan.sizes.max()).unsqueeze(1).to(
        plan.valid.device
    )
