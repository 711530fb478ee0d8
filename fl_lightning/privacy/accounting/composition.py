"""What releases of several costs cost together, where nobody is sampled.

Gaussians compose exactly: n_i releases of sensitivity over noise μ_i are one of √(Σ n_i μ_i²). With Skellam
noise among them Rényi divergences add up, see `skellam`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from fl_lightning.privacy.accounting.gaussian import gaussian_epsilon
from fl_lightning.privacy.accounting.skellam import ORDERS, rdp_epsilon, skellam_rdp


@dataclass(frozen=True)
class ReleaseCost:
    """Noise and sensitivity of one release of a client.

    Attributes:
        l2: by how much the client moves what is released.
        variance: of the noise, in the same units squared, ≥ 0.
        skellam_size: numbers in a vector of whole numbers with Skellam noise; 0 for Gaussian noise.
    """

    l2: float
    variance: float
    skellam_size: int = 0

    def divergence(self) -> npt.NDArray[np.float64]:
        """Return the Rényi divergence at `ORDERS`."""
        if not self.skellam_size:
            gaussian: npt.NDArray[np.float64] = ORDERS * self.l2**2 / (2 * self.variance)
            return gaussian
        l1 = min(math.sqrt(self.skellam_size) * self.l2, self.l2**2)
        return skellam_rdp(ORDERS, self.variance, self.l2, l1)


def composed_epsilon(releases: Mapping[ReleaseCost, int], delta: float) -> float:
    """Return ε of some releases of each cost together.

    Example:
        >>> releases = {ReleaseCost(1.0, 4.0): 3, ReleaseCost(1.0, 16.0): 4}
        >>> round(composed_epsilon(releases, 1e-5), 6)
        4.377178
    """
    made = {cost: n for cost, n in releases.items() if n}
    if not made:
        return 0.0
    if any(cost.variance <= 0 for cost in made):
        return math.inf
    if not any(cost.skellam_size for cost in made):
        return gaussian_epsilon(
            1 / math.sqrt(sum(n * cost.l2**2 / cost.variance for cost, n in made.items())), delta
        )
    divergences = [n * cost.divergence() for cost, n in made.items()]
    return rdp_epsilon(np.sum(divergences, axis=0), delta)
