"""When to end a differentiable search before it collapses to skips.

    skips        the cell that α means has at least `limit` skips
    eigenvalue   the mean of the last `window` largest eigenvalues λ of the Hessian by α has grown:
                 mean(now - window) / mean(now) < ratio; take α of `window` measurements ago

DARTS without a stop ends in cells of skips alone: they train fastest while all share their weights.
Source: Liang et al. 2019, DARTS+ (two skips in a normal cell); Zela et al. 2020, section 4
(distance 5, ratio 0.75).
Differs: one number is the length of the mean and the distance between the two means.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, final

from fl_lightning.core.errors import ConfigurationError


def too_many_skips(operations: Sequence[int], skip: int, limit: int = 2) -> bool:
    """Return whether a cell has at least `limit` skips.

    Args:
        operations: the number of the operation on each row of the cell.
        skip: the number of the skip.
        limit: at least 1.

    Raises:
        ConfigurationError: if the limit is below 1: it would stop any search.

    Example:
        >>> too_many_skips([1, 3, 1], skip=1), too_many_skips([1, 3, 3], skip=1)
        (True, False)
    """
    if limit < 1:
        raise ConfigurationError(f"the limit of skips must be at least 1, got {limit}")
    return list(operations).count(skip) >= limit


@final
class EigenvalueStop:
    """Says when the largest eigenvalue has grown too much.

    Args:
        window: measurements in a mean, and from one mean to the other; at least 1.
        ratio: in (0, 1); below, the search ends.

    Raises:
        ConfigurationError: if one is out of its range.
    """

    def __init__(self, window: int = 5, ratio: float = 0.75) -> None:
        if window < 1:
            raise ConfigurationError(f"window must be at least 1, got {window}")
        if not 0 < ratio < 1:
            raise ConfigurationError(f"ratio must be in (0, 1), got {ratio}")
        self._window, self._ratio = window, ratio
        self._eigenvalues: list[float] = []

    @property
    def window(self) -> int:
        """How many measurements ago α was still good when the search ends."""
        return self._window

    def measured(self, eigenvalue: float) -> bool:
        """Note a measurement; return whether the search is to end."""
        window = self._window
        self._eigenvalues = [*self._eigenvalues, eigenvalue][-2 * window :]
        if len(self._eigenvalues) < 2 * window:
            return False
        earlier, now = (sum(part) / window for part in self._halves())
        # of negative means the ratio says nothing: α is not in a minimum at all
        return 0 < earlier < self._ratio * now

    def _halves(self) -> tuple[list[float], list[float]]:
        return self._eigenvalues[: self._window], self._eigenvalues[self._window :]

    def state_dict(self) -> dict[str, Any]:
        """Return the measurements that count."""
        return {"eigenvalues": list(self._eigenvalues)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take up where `state_dict` left off."""
        self._eigenvalues = list(state["eigenvalues"])
