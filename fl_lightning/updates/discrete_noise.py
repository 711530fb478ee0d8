"""Whole-number noise, for sums of whole numbers that a server sees only as a sum.

    Skellam:            Poisson(μ/2) - Poisson(μ/2), variance μ; a sum of such is one of variance Σμ
    discrete Gaussian:  P(i) ∝ exp(-i²/2σ²)

Both are drawn by inverting their distribution function with 63 uniform bits per number and a sign,
so that they may come from a cryptographically secure generator. Sources: Agarwal, Kairouz and Liu
2021 (2110.04995); Canonne, Kamath and Steinke 2020 (2004.00010). Differs: tables instead of
rejection; a probability is off by 2⁻⁵³ of itself and tails end where they weigh less than 2⁻⁶³.
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Literal

import numpy as np
import numpy.typing as npt
from scipy.special import ive

Integers = npt.NDArray[np.int64]
Words = npt.NDArray[np.uint64]
Distribution = Literal["skellam", "discrete gaussian"]

# beyond, a table would have many millions of entries
MOST_VARIANCE = 1e10


def discrete_noise(distribution: Distribution, variance: float, words: Words) -> Integers:
    """Return noise, one whole number for each random word.

    Args:
        distribution: ``skellam``, or ``discrete gaussian`` whose σ² is then the variance's bound.
        variance: μ or σ², in [0, 1e10].
        words: uniform on 64 bits, shape (k,).

    Raises:
        ValueError: for a variance that is out of range.

    Example:
        >>> words = np.random.default_rng(0).integers(0, 2**64, 100_000, dtype=np.uint64)
        >>> noise = discrete_noise("skellam", 9.0, words)
        >>> noise.dtype, round(float(noise.var()), 1)
        (dtype('int64'), 9.0)
    """
    if not 0 <= variance <= MOST_VARIANCE:
        raise ValueError(
            f"the noise's variance must be in [0, {MOST_VARIANCE:g}] steps², got {variance}: take "
            "coarser steps"
        )
    if variance == 0:
        return np.zeros(words.shape, np.int64)
    table = _tail_table(distribution, variance)
    uniform = words >> np.uint64(1)
    # the table falls from 2⁶³, which stands for P(|N| ≥ 0) = 1
    magnitude = len(table) - np.searchsorted(table[::-1], uniform, side="right") - 1
    sign = 1 - 2 * (words & np.uint64(1)).astype(np.int64)
    noise: Integers = magnitude.astype(np.int64) * sign
    return noise


def largest_noise(distribution: Distribution, variance: float) -> int:
    """Return the largest magnitude that `discrete_noise` can give: there the table ends.

    Example:
        >>> largest_noise("skellam", 0.0), largest_noise("skellam", 9.0)
        (0, 33)
    """
    return 0 if variance == 0 else len(_tail_table(distribution, variance)) - 1


@lru_cache(maxsize=8)
def _tail_table(distribution: Distribution, variance: float) -> Words:
    """Return P(|N| ≥ i) in units of 2⁻⁶³ for i = 0, 1, …, where 0 is drawn with either sign."""
    sigma = math.sqrt(variance)
    size = int(12 * sigma) + 60
    at = np.arange(size, dtype=np.float64)
    if distribution == "skellam":
        mass = np.asarray(ive(at, variance))  # e^-μ I_i(μ)
    else:
        mass = np.exp(-(at**2) / (2 * variance))
    mass[1:] *= 2
    tails = np.cumsum(mass[::-1])[::-1]
    scaled = np.floor(tails / tails[0] * 2.0**63)
    table: Words = scaled[: np.count_nonzero(scaled)].astype(np.uint64)
    return table
