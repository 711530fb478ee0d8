"""How many clients in slots are trained both ways: so many that it takes at most 1 % of the time.

    fraction = 1 / max(200, 100 · r)        r: how many times faster clients train in slots

A check takes as long as r clients in slots. Where no trial has measured r, the first checks do, by their
own seconds and those of the slots, each per local step; until then it is one client in 200.
"""

from __future__ import annotations

import math

import numpy as np

from fl_lightning.client.work import GroupWork
from fl_lightning.core.seeds import uniform_numbers

_MOST_OFTEN = 1 / 200
_SHARE_OF_TIME = 0.01


class SpotRate:
    """Decides which clients are checked, and learns how many there may be.

    Args:
        asked: fraction that the user wants; as many as take little time if None.

    Attributes:
        times_faster: r, as a trial has measured it, or else as the checks have; None before.

    Example:
        >>> rate = SpotRate(None)
        >>> rate.times_faster = 4.6
        >>> rate.remark
        ', one client in 460 is trained both ways as a check'
    """

    def __init__(self, asked: float | None) -> None:
        self._asked = asked
        self.times_faster: float | None = None
        self._seconds_in_slots = self._seconds_alone = math.inf
        self._measures = False

    @property
    def fraction(self) -> float:
        """Of all clients in slots, those that are checked."""
        if self._asked is not None:
            return self._asked
        return min(_MOST_OFTEN, _SHARE_OF_TIME / (self.times_faster or 1.0))

    @property
    def remark(self) -> str:
        """Say how many they are, for the line that says how clients train."""
        if self.fraction == 0:
            return ", none of them checked (federation.spot_check: 0)"
        if self.fraction == 1:
            return ", every client is trained both ways as a check"
        is_open = self._asked is None and self.times_faster is None
        or_fewer = ", or fewer to take 1 % of the time," if is_open else ""
        return f", one client in {1 / self.fraction:.0f}{or_fewer} is trained both ways as a check"

    def note(self, seconds_in_slots: float, seconds_alone: float | None = None) -> None:
        """Measure where no trial has: the shortest times of a local step so far count.

        A first group compiles and a first check warms up: each takes longer than those that follow.

        Args:
            seconds_in_slots: of a local step in slots.
            seconds_alone: of one of a client that was checked; None if there was none.
        """
        if self.times_faster is not None and not self._measures:
            return
        self._seconds_in_slots = min(self._seconds_in_slots, seconds_in_slots)
        self._seconds_alone = min(self._seconds_alone, seconds_alone or math.inf)
        if math.isfinite(self._seconds_alone):
            self._measures = True
            self.times_faster = self._seconds_alone / max(self._seconds_in_slots, 1e-9)


def drawn(work: GroupWork, fraction: float) -> GroupWork:
    """Return the clients that are checked: which ones depends on seed, round and client alone.

    With a smaller fraction they are some of those with a larger one.

    Example:
        >>> import torch
        >>> from fl_lightning.client.work import ClientWork
        >>> work = GroupWork.of([ClientWork(i, 1, torch.tensor([i]), [1]) for i in range(9)])
        >>> [[client.client_id for client in drawn(work, f)] for f in (0.0, 0.3, 0.6)]
        [[], [4], [1, 3, 4, 8]]
    """
    if not fraction or not len(work):
        return work.where(np.zeros(len(work), bool))
    numbers = uniform_numbers(work.root_seed, "spot check", work.rounds, work.client_ids)
    return work.where(numbers < fraction)
