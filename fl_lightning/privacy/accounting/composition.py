"""What releases of several costs cost together, where nobody is sampled.

Gaussians compose exactly: n_i releases of sensitivity over noise μ_i are one of √(Σ n_i μ_i²). With Skellam
noise on whole numbers among them, Rényi divergences add up:

    ε_α ≤ α Δ₂² / 2μ + min(((2α - 1) Δ₂² + 6 Δ₁) / 4μ², 3 Δ₁ / 2μ)
    ε(δ) = min over α of  Σ n ε_α + log(1 - 1/α) - log(δ α) / (α - 1)

Source: Agarwal, Kairouz and Liu 2021 (2110.04995), Theorem 3.5; the conversion is Canonne, Kamath
and Steinke 2020 (2004.00010), Proposition 12.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from fl_lightning.privacy.accounting.gaussian import gaussian_epsilon

_ORDERS = np.concatenate([np.arange(2, 130), np.geomspace(130, 100_000, 200).astype(int)])


@dataclass(frozen=True)
class ReleaseCost:
    """Noise and sensitivity of one release of a client.

    Attributes:
        l2: by how much the client moves what is released, Δ₂.
        variance: of the noise, in the same units squared, μ ≥ 0.
        skellam_size: numbers k in a vector of whole numbers with Skellam noise, for which Δ₁ is at most
            min(√k Δ₂, Δ₂²); 0 for Gaussian noise.
    """

    l2: float
    variance: float
    skellam_size: int = 0

    def divergence(self, orders: npt.NDArray[np.int64] = _ORDERS) -> npt.NDArray[np.float64]:
        """Return the Rényi divergence ε_α at each order α, or more."""
        variance, l1 = self.variance, min(math.sqrt(self.skellam_size) * self.l2, self.l2**2)
        first = ((2 * orders - 1) * self.l2**2 + 6 * l1) / (4 * variance**2)
        beyond_gaussian = np.minimum(first, 3 * l1 / (2 * variance)) if self.skellam_size else 0.0
        divergence: npt.NDArray[np.float64] = orders * self.l2**2 / (2 * variance) + beyond_gaussian
        return divergence


def composed_epsilon(releases: Mapping[ReleaseCost, int], delta: float) -> float:
    """Return ε of some releases of each cost together.

    Example:
        >>> releases = {ReleaseCost(1.0, 4.0): 3, ReleaseCost(1.0, 16.0): 4}
        >>> round(composed_epsilon(releases, 1e-5), 6)
        4.377178
        >>> round(composed_epsilon({ReleaseCost(1e4, 1e8, skellam_size=1000): 1}, 1e-5), 2)
        4.75
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
    divergence = np.sum([n * cost.divergence() for cost, n in made.items()], axis=0)
    epsilons = divergence + np.log1p(-1 / _ORDERS) - np.log(delta * _ORDERS) / (_ORDERS - 1)
    return max(0.0, float(epsilons.min()))
