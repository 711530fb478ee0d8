"""What Gaussian noise costs where nobody is sampled: a closed form.

    δ(ε) = Φ(1/2σ - εσ) - e^ε Φ(-1/2σ - εσ),   σ = noise stddev / (L2 sensitivity √compositions)

Source: Balle and Wang 2018 (1805.06530), Theorem 8; that compositions add up like that holds for
Gaussians exactly (Dong, Roth and Su 2019, Corollary 3.3).
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
from scipy.special import log_ndtr, ndtr
from scipy.stats import binom


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
    # an ε that is surely enough: the privacy loss is normal with mean 1/2σ² and stddev 1/σ
    enough = 0.5 / sigma**2 + math.sqrt(2 * math.log(1 / delta)) / sigma
    return _smallest(lambda epsilon: gaussian_delta(sigma, epsilon), delta, enough)


def turns_epsilon(sigma: float, rate: float, rounds: int, delta: float) -> float:
    """Return an upper bound on ε of Poisson-sampled rounds, tight for little noise.

        δ(ε) ≤ Σ_k Binomial(rounds, rate)(k) · δ of k releases without sampling

    That is δ towards somebody who is told in which rounds the client took part, and knows no less.

    Args:
        sigma: noise standard deviation over sensitivity, > 0.
        rate: a client's chance of taking part in a round, in (0, 1].
        rounds: ≥ 1.
        delta: in (0, 1).

    Example:
        >>> round(turns_epsilon(0.1, 1.0, 100, 1e-5), 3), round(gaussian_epsilon(0.01, 1e-5), 3)
        (5425.51, 5425.51)
    """
    turns = np.arange(1, rounds + 1)
    chances = binom.pmf(turns, rounds, rate)
    turns, chances = turns[chances > 0], chances[chances > 0]
    scales = sigma / np.sqrt(turns)

    def delta_of(epsilon: float) -> float:
        above = ndtr(0.5 / scales - epsilon * scales)
        below = np.exp(epsilon + log_ndtr(-0.5 / scales - epsilon * scales))
        return float(chances @ np.maximum(above - below, 0.0))

    return _smallest(delta_of, delta, gaussian_epsilon(float(scales[-1]), delta))


def _smallest(delta_of: Callable[[float], float], delta: float, enough: float) -> float:
    """Return the smallest ε whose δ, which falls with it, is at most ``delta``."""
    low, high = 0.0, enough
    if delta_of(low) <= delta:
        return low
    for _ in range(200):
        middle = (low + high) / 2
        if middle in (low, high):
            break
        if delta_of(middle) > delta:
            low = middle
        else:
            high = middle
    return high
