"""Schedule of slots: the clients of each slot, their steps, and the examples of each step.

G slots train side by side, one local step at a time. A slot whose client has finished takes the next
client. Clients are assigned longest first, each to the slot that is free first (Graham 1969, LPT rule).
The last slot then finishes at most a third later than in the best schedule.
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
    """Slot (place in the batch of models) and steps of each of m clients that train together; sorted by first step, then slot.

    Attributes:
        clients: position of each client in the packed work, shape (m,).
        slots: slot of each client, shape (m,).
        begins: first step of each client, counted from the start of the pass, shape (m,).
        ends: one more than each client's last step, shape (m,).
    """

    clients: Integers
    slots: Integers
    begins: Integers
    ends: Integers

    @property
    def num_steps(self) -> int:
        """Number of steps, each of all slots at once, until all clients have finished."""
        return int(self.ends.max())

    def beginning(self, step: int) -> Integers:
        """Positions in the schedule of the clients that start at this step, in order of slots."""
        return np.arange(self._first_of[step], self._first_of[step + 1])

    def ending(self, step: int) -> Integers:
        """Positions in the schedule of the clients whose last step this is, in order of slots."""
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
    """Assign clients to slots (clients trained as one batch), those with most steps first.

    Args:
        num_steps: local steps of each client, ≥ 1, shape (m,), m ≥ 1.
        num_slots: number of clients that train side by side, ≥ 1.

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
    """A client with its slot and the steps in which it trains there.

    Attributes:
        work: local work of the client.
        slot: index of the slot.
        begin: first step, counted from the start of the pass.
        end: one more than the last step.
    """

    work: ClientWork
    slot: int
    begin: int
    end: int


class StepPlan(NamedTuple):
    """Dataset indices of the examples that all slots use in one step.

    Attributes:
        number: index of the step, counted from the start of the pass.
        indices: dataset indices, shape (G, B); a smaller batch repeats its last index.
        valid: 1 for an example, 0 for a repetition, shape (G, B).
        sizes: batch sizes, 0 for an empty slot, shape (G,).
    """

    number: int
    indices: Tensor
    valid: Tensor
    sizes: Integers


def slot_client(schedule: SlotSchedule, position: int, work: GroupWork) -> SlotClient:
    """Return the client at a position of the schedule, with its work, slot and steps."""
    client, slot, begin, end = (
        int(x[position]) for x in (schedule.clients, schedule.slots, schedule.begins, schedule.ends)
    )
    return SlotClient(work[client], slot, begin, end)


def plan_steps(
    schedule: SlotSchedule, work: GroupWork, num_slots: int, batch_size: int, device: torch.device
) -> list[StepPlan]:
    """Return the examples of every step; an empty slot repeats an example of another client."""
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
    """Return a bool mask of the examples in some slots; by default in the slots with the largest batches."""
    if slots is not None:
        return plan.valid[slots].bool()
    return plan.valid.bool() & torch.from_numpy(plan.sizes == plan.sizes.max()).unsqueeze(1).to(
        plan.valid.device
    )
