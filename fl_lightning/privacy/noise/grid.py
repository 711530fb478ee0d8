"""The grid of releases: clipped vectors as integer steps, their sums, and noise on them.

    step γ = 2^⌊log2(S / R)⌋,   R = max(2²⁶, 2¹⁴ √k)
    v = round at random (clip_S(x) / γ),  ‖v‖₂ ≤ B        Σ v + round(N(0, (σ/γ)²))

Sums of integers are exact, and so is the noise: a release is a multiple of γ that the data of either
neighbour could have produced. Because the step is a power of two, this holds in every floating-point
format: a conversion rounds to a coarser grid, which is post-processing.
Rounding makes a vector longer, by a factor B γ / S ≤ 1 + 2⁻²⁶ for any length k, which every ε includes.
The coins of the rounding may be public: the bound holds for each of their outcomes. Source: Kairouz, Liu
and Steinke 2021 (2102.06387), Section 4.1. Differs: no rotation, since the grid is fine in 64 bits.

A clipped update becomes integers of bounded norm, for sums modulo a power of two, by

    v = round at random (Δ / step), drawn again until ‖v‖₂ ≤ B
    B² = min((R + √k)², R² + k/4 + √(2 log(1/β)) (R + √k/2)),   R = S / step,  β = e^(-½)

Each coordinate is rounded up or down without bias; the probability of exceeding B is less than β.
Source: Kairouz, Liu and Steinke 2021 (2102.06387), Algorithm 1 and Equation 4.
Differs: no rotation beforehand, since sums here have 63 bits.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from fl_lightning.core.errors import ConfigurationError
from fl_lightning.core.seeds import Draw, Integers
from fl_lightning.kernels import (
    LARGEST_STDDEV,
    LEAST_STDDEV,
    rounded_gaussian,
)

_LEAST_RADIUS, _RADIUS_PER_ROOT = 2.0**26, 2.0**14
# Upper bound of the factor by which rounding raises the norm of a vector.
GRID_COST = 1 + 2.0**-26


@dataclass(frozen=True)
class Grid:
    """A grid to which clipped vectors and noise are rounded, so that their sums are exact integers."""

    clip_norm: float  # S
    step: float  # step width γ, a power of two

    @property
    def radius(self) -> float:
        """The clip norm in steps of the grid."""
        return self.clip_norm / self.step

    @classmethod
    def of(cls, clip_norm: float, size: int) -> Grid:
        """Return the grid for vectors of a length and clip norm; its step is a power of two.

        Args:
            clip_norm: S > 0, finite.
            size: length k ≥ 0.

        Example:
            >>> Grid.of(1.0, size=100).step == 2.0**-26
            True
        """
        radius = max(_LEAST_RADIUS, _RADIUS_PER_ROOT * math.sqrt(size))
        step = 2.0 ** math.floor(math.log2(clip_norm / radius))
        bound = norm_bound(clip_norm, step, size) * CHECKED_TO**2
        assert bound * step <= clip_norm * GRID_COST, "the grid costs more than is accounted for"
        return cls(clip_norm, step)

    def to_steps(self, vector: Tensor, draw: Draw) -> Integers:
        """Clip a vector and round it at random to grid steps, integers of shape (k,), of norm ≤ S · `GRID_COST`.

        Args:
            vector: finite vector, shape (k,).
            draw: source of the coins.

        Example:
            >>> from fl_lightning.privacy.noise.noise_source import NoiseSource
            >>> grid = Grid(clip_norm=1.0, step=0.25)
            >>> grid.to_steps(torch.tensor([0.5, -0.25]), NoiseSource(0).stream())
            array([ 2, -1])
        """
        exact = vector.detach().cpu().double()
        norm = float(exact.norm())
        if norm > self.clip_norm:
            exact = exact * (self.clip_norm / norm)
        return to_integers(exact, self.clip_norm, self.step, draw)

    def value(self, steps: Tensor) -> Tensor:
        """Convert integer grid steps into values, float64."""
        return wide(steps) * self.step


def wide(numbers: Tensor) -> Tensor:
    """Convert a tensor to float64; on the CPU if its device (Apple's mps) has no float64."""
    return (numbers.cpu() if numbers.device.type == "mps" else numbers).double()


def noise_of(stddev: float, size: int, draw: Draw) -> Integers:
    """Draw Gaussian noise rounded to grid steps, int64 of shape (size,).

    Args:
        stddev: standard deviation in steps; raised to 2⁸ if it is less, which protects more.
        size: number of draws.
        draw: source of random words.

    Raises:
        ConfigurationError: if the standard deviation is larger than 2⁵² steps.
    """
    if stddev > LARGEST_STDDEV:
        raise ConfigurationError(
            f"federation.privacy: the noise has {stddev:.3g} steps of the grid that clipped updates are "
            f"rounded to, and {LARGEST_STDDEV:.3g} is the most: lower noise_multiplier, or raise epsilon"
        )
    return rounded_gaussian(max(stddev, LEAST_STDDEV), size, draw)


def noisy(vector: Tensor, clip_norm: float, stddev: float, draw: Draw) -> Tensor:
    """Clip a vector, round it to a grid, and add Gaussian noise; dtype and device are kept.

    Args:
        vector: shape (k,).
        clip_norm: S.
        stddev: standard deviation of the noise, in the units of the vector.
        draw: source of the coins, and then of the noise.
    """
    grid = Grid.of(clip_norm, len(vector))
    steps = grid.to_steps(vector, draw) + noise_of(stddev / grid.step, len(vector), draw)
    return grid.value(torch.from_numpy(steps)).to(vector)


# Factor beyond the bound that the check of a norm in double precision may let pass.
CHECKED_TO = 1 + 1e-12
# The probability that this many roundings are all too long is below e^-500 for a clipped vector.
_MOST_TRIES = 1000


def norm_bound(clip_norm: float, step: float, size: int) -> float:
    """Return the largest L2 norm B that a clipped vector may have after rounding, in grid steps.

    Args:
        clip_norm: S ≥ 0.
        step: step width of the grid, > 0.
        size: length k of the vector.

    Example:
        >>> norm_bound(1.0, step=0.5, size=0), round(norm_bound(100.0, step=1.0, size=4), 2)
        (2.0, 100.51)
    """
    radius, root = clip_norm / step, math.sqrt(size)
    if size == 0:
        return radius
    likely = radius**2 + size / 4 + (radius + root / 2)  # √(2 log(1/β)) = 1
    return min(radius + root, math.sqrt(likely))


def to_integers(delta: Tensor, clip_norm: float, step: float, draw: Draw) -> Integers:
    """Round a vector of norm ≤ S at random to integer steps, redrawn until the norm is ≤ `norm_bound`.

    Args:
        delta: clipped vector, shape (k,).
        clip_norm: S.
        step: step width of the grid, > 0.
        draw: source of random words, k for each try.

    Example:
        >>> generator = np.random.default_rng(0)
        >>> draw = lambda count: generator.integers(0, 2**64, count, dtype=np.uint64)
        >>> to_integers(torch.tensor([1.0, -2.0]), clip_norm=3.0, step=0.5, draw=draw)
        array([ 2, -4])
    """
    scaled = delta.detach().cpu().double().numpy() / step
    bound = norm_bound(clip_norm, step, len(scaled))
    for _ in range(_MOST_TRIES):
        uniform = (draw(len(scaled)) >> np.uint64(11)).astype(np.float64) * 2.0**-53
        rounded = np.floor(scaled + uniform)
        if float(np.linalg.norm(rounded)) <= bound * CHECKED_TO:
            whole: Integers = rounded.astype(np.int64)
            return whole
    raise ValueError(f"no rounding of {_MOST_TRIES} was short enough: is the vector clipped?")
