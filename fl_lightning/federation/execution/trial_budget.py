"""How long a trial may take: told before it begins, and kept to.

    limit = 5 % of what is to be trained, at least 30 s, at most 120 s

A try that has begun is finished; none begins for which there is no time left.
"""

from __future__ import annotations

import time

from lightning.pytorch.utilities import rank_zero_info

LEAST_SECONDS, MOST_SECONDS = 30.0, 120.0
_SHARE = 0.05


class TrialBudget:
    """Seconds of a trial, from now on.

    Args:
        total: seconds of training that are ahead, about; may be infinite.

    Attributes:
        limit: seconds of the trial.
        is_cut: whether a try was left out for want of time.

    Example:
        >>> TrialBudget(100.0).limit, TrialBudget(1e6).limit
        (30.0, 120.0)
    """

    def __init__(self, total: float) -> None:
        self.limit = min(MOST_SECONDS, max(LEAST_SECONDS, _SHARE * total))
        self.is_cut = False
        self._began = time.monotonic()
        self._longest = 0.0

    def announce(self, what: str) -> None:
        """Say what is measured, and how long at most.

        Args:
            what: in words.
        """
        rank_zero_info(f"engine: measuring {what}, for about {self.limit:.0f} s at most")

    def note(self, seconds: float) -> None:
        """Know how long a try has taken, as another one may.

        Args:
            seconds: of it.
        """
        self._longest = max(self._longest, seconds)

    def has_room(self) -> bool:
        """Return whether there is time for another try as long as the longest so far."""
        has_room = time.monotonic() - self._began + self._longest <= self.limit
        self.is_cut |= not has_room
        return has_room
