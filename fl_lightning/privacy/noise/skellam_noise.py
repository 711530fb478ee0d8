"""Whole-number noise, for sums of whole numbers that a server sees only as a sum.

    Skellam:  Poisson(μ/2) - Poisson(μ/2), variance μ; a sum of such is one of variance Σμ

It is drawn by inverting its distribution function with as many uniform bits as that takes, so that they may
come from a cryptographically secure generator. Source: Agarwal, Kairouz and Liu 2021 (2110.04995).
Differs: a table instead of rejection, whose chances are exact to 2⁻¹²⁷; tails end where they weigh less.
"""

from __future__ import annotations

import math
from functools import lru_cache

import numpy as np

from fl_lightning.core.whole_numbers import Draw, Integers, Words

# beyond, a table would have many millions of entries
MOST_VARIANCE = 1e10
# A chance has 63 bits of a first word and 64 of a second one; a table is computed with many more.
_FIRST, _BITS = 63, 127
_GUARD = 256


def skellam_noise(variance: float, size: int, draw: Draw) -> Integers:
    """Return Skellam noise, shape (size,).

    Args:
        variance: μ, in [0, 1e10].
        size: how many numbers.
        draw: gives random words; numbers are a pure function of them.

    Raises:
        ValueError: for a variance that is out of range.

    Example:
        >>> generator = np.random.default_rng(0)
        >>> draw = lambda count: generator.integers(0, 2**64, count, dtype=np.uint64)
        >>> noise = skellam_noise(9.0, 100_000, draw)
        >>> noise.dtype, round(float(noise.var()), 1)
        (dtype('int64'), 9.0)
    """
    if not 0 <= variance <= MOST_VARIANCE:
        raise ValueError(
            f"the noise's variance must be in [0, {MOST_VARIANCE:g}] steps², got {variance}: take "
            "coarser steps"
        )
    words = draw(size)
    if variance == 0:
        return np.zeros(size, np.int64)
    first, second = _tail_table(variance)
    uniform = words >> np.uint64(1)
    rising = first[::-1]
    not_above = np.searchsorted(rising, uniform, side="right")
    magnitude = (len(first) - 1 - not_above).astype(np.int64)
    for at in np.flatnonzero(np.searchsorted(rising, uniform, side="left") != not_above):
        magnitude[at] = _decided(first, second, int(magnitude[at]), uniform[at], draw)
    noise: Integers = magnitude * (1 - 2 * (words & np.uint64(1)).astype(np.int64))
    return noise


def _decided(first: Words, second: Words, magnitude: int, uniform: np.uint64, draw: Draw) -> int:
    """Return the magnitude where the first word equals a chance's first bits: by one word more."""
    more = draw(1)[0]
    beyond = magnitude + 1
    while beyond < len(first) and first[beyond] == uniform and more < second[beyond]:
        beyond += 1
    return beyond - 1


def largest_noise(variance: float) -> int:
    """Return the largest magnitude that `skellam_noise` can give: there the table ends.

    Example:
        >>> largest_noise(0.0), largest_noise(9.0)
        (0, 52)
    """
    return 0 if variance == 0 else len(_tail_table(variance)[0]) - 1


@lru_cache(maxsize=8)
def _tail_table(variance: float) -> tuple[Words, Words]:
    """Return P(|N| ≥ i) for i = 0, 1, …, 0 drawn with either sign: first 63 bits, and the next 64."""
    masses = _bessel(variance)
    tails, tail = [], 0
    for mass in reversed(masses):
        tail += mass
        tails.append(tail)
    total = tails[-1]
    scaled = [(tail << _BITS) // total for tail in reversed(tails)]
    scaled = scaled[: next((i for i, tail in enumerate(scaled) if tail == 0), len(scaled))]
    shift = _BITS - _FIRST
    first = np.array([tail >> shift for tail in scaled], np.uint64)
    second = np.array([tail & (1 << shift) - 1 for tail in scaled], np.uint64)
    return first, second


def _bessel(variance: float) -> list[int]:
    """Return I_0(μ), 2 I_1(μ), 2 I_2(μ), … times a common factor, by Miller's recurrence downwards.

    I_{i-1} = I_{i+1} + (2i/μ) I_i, from so far out that nothing is left of how it began.
    """
    numerator, denominator = variance.as_integer_ratio()
    size = int(14 * math.sqrt(variance)) + 120
    above, mass, masses = 0, 1 << _GUARD, []
    for i in range(size, 0, -1):
        masses.append(2 * mass)
        above, mass = mass, above + 2 * i * denominator * mass // numerator
    masses.append(mass)
    return masses[::-1]
