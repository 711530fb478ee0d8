"""Which client trains in which slot, and when.

G slots work side by side, one local step of each at a time; a slot whose client is done takes the
next one. Clients are handed out longest first, each to the slot that is free first (Graham 1969,
LPT rule): the last slot to finish is at most a third later than in the best plan.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from typing import NamedTuple


class Stay(NamedTuple):
    """One client's time in a slot.

    Attributes:
        client: its position in the list that was packed.
        slot: where it trains.
        begin: the first step, counted from the start of the pass.
        end: one past its last step.
    """

    client: int
    slot: int
    begin: int
    end: int


def pack(num_steps: Sequence[int], num_slots: int) -> list[Stay]:
    """Return one stay per client, in order of their beginnings; a pure function.

    Args:
        num_steps: local steps of each client, ≥ 1.
        num_slots: how many train side by side, ≥ 1.

    Example:
        >>> [(stay.client, stay.slot, stay.begin, stay.end) for stay in pack([2, 3, 1], 2)]
        [(1, 0, 0, 3), (0, 1, 0, 2), (2, 1, 2, 3)]
    """
    if len(set(num_steps)) == 1:  # slots take turns
        (steps,) = set(num_steps)
        begins = [client // num_slots * steps for client in range(len(num_steps))]
        return [Stay(c, c % num_slots, begin, begin + steps) for c, begin in enumerate(begins)]
    free = [(0, slot) for slot in range(num_slots)]
    stays = []
    for client in sorted(range(len(num_steps)), key=lambda c: -num_steps[c]):
        begin, slot = heapq.heappop(free)
        stays.append(Stay(client, slot, begin, begin + num_steps[client]))
        heapq.heappush(free, (begin + num_steps[client], slot))
    return sorted(stays, key=lambda stay: (stay.begin, stay.slot))
