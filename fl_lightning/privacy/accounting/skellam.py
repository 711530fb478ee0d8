"""What Skellam noise on sums of whole numbers costs.

    ε_α ≤ α Δ₂² / 2μ + min(((2α - 1) Δ₂² + 6 Δ₁) / 4μ², 3 Δ₁ / 2μ)
    ε(δ) = min over α of  n ε_α + log(1 - 1/α) - log(δ α) / (α - 1)

Source: Agarwal, Kairouz and Liu 2021 (2110.04995), Theorem 3.5; the conversion is Canonne, Kamath
and Steinke 2020 (2004.00010), Proposition 12.
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

_ORDERS = np.concatenate([np.arange(2, 130), np.geomspace(130, 100_000, 200).astype(int)])


def skellam_rdp(
    orders: npt.NDArray[np.int64], variance: float, l2: float, l1: float
) -> npt.NDArray[np.float64]:
    """Return the Rényi divergence of one release at each order.

    Args:
        orders: whole numbers ≥ 2.
        variance: of the noise in the sum, in steps², > 0.
        l2: by how much one client moves the sum, in steps.
        l1: likewise, in L1.
    """
    gaussian = orders * l2**2 / (2 * variance)
    first = ((2 * orders - 1) * l2**2 + 6 * l1) / (4 * variance**2)
    divergence: npt.NDArray[np.float64] = gaussian + np.minimum(first, 3 * l1 / (2 * variance))
    return divergence


def skellam_epsilon(variance: float, l2: float, size: int, releases: int, delta: float) -> float:
    """Return ε of so many releases of vectors of whole numbers.

    Args:
        variance: of the noise in the sum, in steps², ≥ 0.
        l2: by how much one client moves the sum, in steps.
        size: numbers in a vector, k: the L1 sensitivity is at most min(√k Δ₂, Δ₂²).
        releases: ≥ 0.
        delta: in (0, 1).

    Example:
        >>> fine = skellam_epsilon(1e8, l2=1e4, size=1000, releases=1, delta=1e-5)
        >>> round(fine, 2)  # of a Gaussian by RDP it is 4.73
        4.75
    """
    if releases == 0:
        return 0.0
    if variance <= 0:
        return math.inf
    l1 = min(math.sqrt(size) * l2, l2**2)
    rdp = releases * skellam_rdp(_ORDERS, variance, l2, l1)
    epsilons = rdp + np.log1p(-1 / _ORDERS) - np.log(delta * _ORDERS) / (_ORDERS - 1)
    return max(0.0, float(epsilons.min()))
