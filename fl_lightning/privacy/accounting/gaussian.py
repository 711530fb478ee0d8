"""ε of Gaussian and Skellam noise without sampling.

Gaussian noise has a closed form:

    δ(ε) = Φ(1/2σ - εσ) - e^ε Φ(-1/2σ - εσ),   σ = noise stddev / (L2 sensitivity √compositions)

Source: Balle and Wang 2018 (1805.06530), Theorem 8; this composition is exact for Gaussians (Dong,
Roth and Su 2019, Corollary 3.3).

Releases with different costs: n_i Gaussian releases with sensitivity over noise μ_i equal one with
√(Σ n_i μ_i²), exactly. If some have integer Skellam noise, Rényi divergences are added up:

    ε_α ≤ α Δ₂² / 2μ + min(((2α - 1) Δ₂² + 6 Δ₁) / 4μ², 3 Δ₁ / 2μ)
    ε(δ) = min over α of  Σ n ε_α + log(1 - 1/α) - log(δ α) / (α - 1)

Source: Agarwal, Kairouz and Liu 2021 (2110.04995), Theorem 3.5; the conversion is Canonne, Kamath
and Steinke 2020 (2004.00010), Proposition 12.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from scipy.special import log_ndtr, ndtr
from scipy.stats import binom


def gaussian_delta(sigma: float, epsilon: float) -> float:
    """Return δ in [0, 1] of one release with Gaussian noise, at a given ε.

    Args:
        sigma: standard deviation of the noise over the sensitivity, > 0.
        epsilon: ε ≥ 0.

    Example:
        >>> round(gaussian_delta(1.0, 4.377178095681), 10)
        1e-05
    """
    above = float(ndtr(0.5 / sigma - epsilon * sigma))
    below = math.exp(epsilon + float(log_ndtr(-0.5 / sigma - epsilon * sigma)))
    return max(0.0, above - below)


def gaussian_epsilon(sigma: float, delta: float) -> float:
    """Return the smallest ε of one release with Gaussian noise, at a given δ; ∞ without noise.

    Args:
        sigma: standard deviation of the noise over the sensitivity, ≥ 0.
        delta: in (0, 1).

    Example:
        >>> round(gaussian_epsilon(1.0, 1e-5), 6), round(gaussian_epsilon(0.5, 1e-5), 6)
        (4.377178, 9.997256)
    """
    if sigma <= 0:
        return math.inf
    # an upper bound of ε: the privacy loss is normal with mean 1/2σ² and standard deviation 1/σ
    enough = 0.5 / sigma**2 + math.sqrt(2 * math.log(1 / delta)) / sigma
    return _smallest(lambda epsilon: gaussian_delta(sigma, epsilon), delta, enough)


def turns_epsilon(sigma: float, rate: float, rounds: int, delta: float) -> float:
    """Return an upper bound on ε of Poisson-sampled rounds, which is tight for little noise.

        δ(ε) ≤ Σ_k Binomial(rounds, rate)(k) · δ of k releases without sampling

    This is δ against an adversary who knows the rounds in which the client is sampled.

    Args:
        sigma: standard deviation of the noise over the sensitivity, > 0.
        rate: probability that a client is sampled in a round, in (0, 1].
        rounds: number of rounds, ≥ 1.
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
    """Return the smallest ε in [0, enough] with ``delta_of(ε)`` at most ``delta``, by bisection."""
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


_ORDERS = np.concatenate([np.arange(2, 130), np.geomspace(130, 100_000, 200).astype(int)])


@dataclass(frozen=True)
class ReleaseCost:
    """Noise and sensitivity of one release, e.g. of a client's update: they determine its privacy cost."""

    l2: float  # L2 sensitivity Δ₂ of the release
    variance: float  # variance of the noise μ ≥ 0, in the same units squared
    # length k of an integer vector with Skellam noise, for which Δ₁ is at most min(√k Δ₂, Δ₂²); 0
    # for Gaussian noise
    skellam_size: int = 0

    def divergence(self, orders: npt.NDArray[np.int64] = _ORDERS) -> npt.NDArray[np.float64]:
        """Return upper bounds of the release's Rényi divergence, one per order α."""
        variance, l1 = self.variance, min(math.sqrt(self.skellam_size) * self.l2, self.l2**2)
        first = ((2 * orders - 1) * self.l2**2 + 6 * l1) / (4 * variance**2)
        beyond_gaussian = np.minimum(first, 3 * l1 / (2 * variance)) if self.skellam_size else 0.0
        divergence: npt.NDArray[np.float64] = orders * self.l2**2 / (2 * variance) + beyond_gaussian
        return divergence


def composed_epsilon(releases: Mapping[ReleaseCost, int], delta: float) -> float:
    """Return ε of several releases together, given how many there are of each cost.

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
