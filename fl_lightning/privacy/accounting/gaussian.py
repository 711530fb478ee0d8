"""What Gaussian noise costs where nobody is sampled: a closed form.

    δ(ε) = Φ(1/2σ - εσ) - e^ε Φ(-1/2σ - εσ),   σ = noise stddev / (L2 sensitivity √compositions)

Source: Balle and Wang 2018 (1805.06530), Theorem 8; that compositions add up like that holds for
Gaussians exactly (Dong, Roth and Su 2019, Corollary 3.3).
"""

from __future__ import annotations

import math

from scipy.special import log_ndtr, ndtr


def gaussian_delta(sigma: float, epsilon: float) -> float:
    """Return δ of one release, in [0, 1].

    Args:
        sigma: noise standard deviation over sensitivity, > 0.
        epsilon: ≥ 0.

    Example:
        >>> round(gaussian_delta(1.0, 4.377178095681), 10)
        1e-05
    """
    above = float(ndtr(0.5 / sigma - epsilon * sigma))
    below = math.exp(epsilon + float(log_ndtr(-0.5 / sigma - epsilon * sigma)))
    return max(0.0, above - below)


def gaussian_epsilon(sigma: float, delta: float) -> float:
    """Return the smallest ε for which `gaussian_delta` is at most ``delta``; ∞ without noise.

    Args:
        sigma: noise standard deviation over sensitivity, ≥ 0.
        delta: in (0, 1).

    Example:
        >>> round(gaussian_epsilon(1.0, 1e-5), 6), round(gaussian_epsilon(0.5, 1e-5), 6)
        (4.377178, 9.997256)
    """
    if sigma <= 0:
        return math.inf
    if gaussian_delta(sigma, 0.0) <= delta:
        return 0.0
    # an ε that is surely enough: the privacy loss is normal with mean 1/2σ² and stddev 1/σ
    low, high = 0.0, 0.5 / sigma**2 + math.sqrt(2 * math.log(1 / delta)) / sigma
    for _ in range(200):
        middle = (low + high) / 2
        if middle in (low, high):
            break
        if gaussian_delta(sigma, middle) > delta:
            low = middle
        else:
            high = middle
    return high
