"""The least noise that keeps to a budget.

ε falls as noise rises, so the noise multiplier is found by halving intervals: first on the quick
grid, whose ε is a little too high, then on the fine one just below.
"""

from __future__ import annotations

from typing import Protocol

from fl_lightning.core.errors import ConfigurationError

_MOST = 1e6
# of the noise multiplier, relative
_TOLERANCE = 2e-5


class EpsilonOf(Protocol):
    """ε of a run by its noise multiplier."""

    def __call__(self, noise_multiplier: float, *, quick: bool) -> float:
        """Return ε; ``quick`` allows a slightly higher one."""


def noise_for_budget(epsilon_of: EpsilonOf, budget: float) -> float:
    """Return the smallest noise multiplier whose ε is at most the budget, to 2e-5 of it or better.

    Args:
        epsilon_of: falls with the noise multiplier.
        budget: ε, > 0.

    Raises:
        ConfigurationError: if a million clip norms of noise are not enough.

    Example:
        >>> from fl_lightning.privacy.accounting.gaussian import gaussian_epsilon
        >>> z = noise_for_budget(lambda z, quick: gaussian_epsilon(z / 10, 1e-5), budget=1.0)
        >>> round(z, 2)  # 100 rounds with everybody
        37.31
    """
    low, high = 1e-2, 1.0
    while epsilon_of(high, quick=True) > budget:
        low, high = high, 2 * high
        if high > _MOST:
            raise ConfigurationError(
                f"federation.privacy: no noise keeps this run within epsilon={budget}: raise "
                "epsilon or delta, or train fewer rounds"
            )
    low, high = _halved(epsilon_of, low, high, budget, quick=True)
    below = high
    while below > 1e-3:
        below *= 0.999
        if epsilon_of(below, quick=False) > budget:
            break
        high = below
    return _halved(epsilon_of, below, high, budget, quick=False)[1]


def _halved(
    epsilon_of: EpsilonOf, low: float, high: float, budget: float, *, quick: bool
) -> tuple[float, float]:
    while high - low > _TOLERANCE * high:
        middle = (low + high) / 2
        if epsilon_of(middle, quick=quick) > budget:
            low = middle
        else:
            high = middle
    return low, high
