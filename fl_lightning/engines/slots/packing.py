"""Which client trains in which slot, and when.

G slots work side by side, one local step of each at a time; a slot whose client is done takes the
next one. Clients are handed out longest first, each to the slot that is free first (Graham 1969,
LPT rule): the last slot to finish is at most a third later than in the best plan.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from fl_lightning.core.whole_numbers import Integers


@dataclass(frozen=True, eq=False)
class Stays:
    """The times of m clients in their slots, in order of their beginnings, then of slots.

    Attributes:
        clients: who, as a position in what was packed, shape (m,).
        slots: where, shape (m,).
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
        """Return the stays that begin with a step, in order of slots."""
        return np.arange(self._first_of[step], self._first_of[step + 1])

    def ending(self, step: int) -> Integers:
        """Return the stays whose last step this is, in order of slots."""
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


def pack(num_steps: Integers, num_slots: int) -> Stays:
    """Return one stay per client; a pure function.

    Args:
        num_steps: local steps of each client, ≥ 1, shape (m,), m ≥ 1.
        num_slots: how many train side by side, ≥ 1.

    Example:
        >>> stays = pack(np.array([2, 3, 1]), 2)
        >>> stays.clients, stays.slots, stays.begins, stays.ends
        (array([1, 0, 2]), array([0, 1, 1]), array([0, 0, 2]), array([3, 2, 3]))
        >>> stays.beginning(0), stays.ending(2)
        (array([0, 1]), array([0, 2]))
    """
    clients = np.arange(len(num_steps))
    if (num_steps == num_steps[0]).all():  # slots take turns
        begins = clients // num_slots * num_steps
        return Stays(clients, clients % num_slots, begins, begins + num_steps)
    clients = np.argsort(-num_steps, kind="stable")
    slots, begins = np.empty_like(clients), np.empty_like(clients)
    free = [(0, slot) for slot in range(num_slots)]
    for place, steps in enumerate(num_steps[clients].tolist()):
        begins[place], slots[place] = begin, slot = free[0]
        heapq.heapreplace(free, (begin + steps, slot))
    order = np.lexsort((slots, begins))
    clients, begins = clients[order], begins[order]
    return Stays(clients, slots[order], begins, begins + num_steps[clients])
