"""The grid of what is released: clipped vectors as whole steps, their sums, and noise on them.

    step γ = 2^⌊log2(S / R)⌋,   R = max(2²⁶, 2¹⁴ √k)
    v = round at random (clip_S(x) / γ),  ‖v‖₂ ≤ B        Σ v + round(N(0, (σ/γ)²))

Sums of whole numbers are exact, and so is the noise: what is released is a multiple of γ that any of
two neighbours' data could have led to. A power of two as the step keeps that so in every floating-point
format: a conversion rounds to a coarser grid, which is no more than post-processing.
Rounding makes a vector longer, B γ / S ≤ 1 + 2⁻²⁶ whatever its length k, and that is in every ε. Coins of the
rounding may be known to everybody: the bound holds for each of their outcomes. Source: Kairouz, Liu and
Steinke 2021 (2102.06387), Section 4.1. Differs: no rotation, since the grid is fine in 64 bits.

A clipped update as whole numbers of bounded norm, for sums modulo a power of two.

    v = round at random (Δ / step), drawn again until ‖v‖₂ ≤ B
    B² = min((R + √k)², R² + k/4 + √(2 log(1/β)) (R + √k/2)),   R = S / step,  β = e^(-½)

Each coordinate is rounded up or down so that its expectation is right; B is exceeded with a chance
of less than β. Source: Kairouz, Liu and Steinke 2021 (2102.06387), Algorithm 1 and Equation 4.
Differs: no rotation beforehand, since sums here have 63 bits.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from fl_lightning.core.errors import ConfigurationError
from fl_lightning.core.whole_numbers import Draw, Integers
from fl_lightning.kernels import (
    LARGEST_STDDEV,
    LEAST_STDDEV,
    rounded_gaussian,
)

_LEAST_RADIUS, _RADIUS_PER_ROOT = 2.0**26, 2.0**14
# By how much rounding raises the norm of a vector at most.
GRID_COST = 1 + 2.0**-26


@dataclass(frozen=True)
class Grid:
    """Whole steps for vectors of one length and norm.

    Attributes:
        clip_norm: S.
        step: γ, a power of two.
    """

    clip_norm: float
    step: float

    @property
    def radius(self) -> float:
        """The clip norm in steps."""
        return self.clip_norm / self.step

    @classmethod
    def of(cls, clip_norm: float, size: int) -> Grid:
        """Return the grid for vectors of so many numbers.

        Args:
            clip_norm: S > 0, finite.
            size: k ≥ 0.

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
        """Return a vector as whole steps that are no longer than S · `GRID_COST`, shape (k,).

        Args:
            vector: finite, shape (k,); whatever it has beyond the clip norm is clipped off.
            draw: gives the coins.

        Example:
            >>> from fl_lightning.privacy.noise.noise_source import SeededNoise
            >>> grid = Grid(clip_norm=1.0, step=0.25)
            >>> grid.to_steps(torch.tensor([0.5, -0.25]), SeededNoise(0).stream())
            array([ 2, -1])
        """
        exact = vector.detach().cpu().double()
        norm = float(exact.norm())
        if norm > self.clip_norm:
            exact = exact * (self.clip_norm / norm)
        return to_integers(exact, self.clip_norm, self.step, draw)

    def noise(self, stddev: float, size: int, draw: Draw) -> Integers:
        """Return noise in whole steps, shape (size,); see `noise_of`.

        Args:
            stddev: in the units of vectors, > 0.
            size: how many numbers.
            draw: gives random words, which nobody else may know.
        """
        return noise_of(stddev / self.step, size, draw)

    def value(self, steps: Tensor) -> Tensor:
        """Return what steps stand for, float64, see `wide`."""
        return wide(steps) * self.step


def wide(numbers: Tensor) -> Tensor:
    """Return numbers in float64, on the CPU where their device has none."""
    return (numbers.cpu() if numbers.device.type == "mps" else numbers).double()


def noise_of(stddev: float, size: int, draw: Draw) -> Integers:
    """Return rounded Gaussian noise, shape (size,).

    Args:
        stddev: in steps; below 2⁸ it is raised to that, which protects more.
        size: how many numbers.
        draw: gives random words.

    Raises:
        ConfigurationError: if it is larger than 2⁵² steps.
    """
    if stddev > LARGEST_STDDEV:
        raise ConfigurationError(
            f"federation.privacy: the noise has {stddev:.3g} steps of the grid that clipped updates are "
            f"rounded to, and {LARGEST_STDDEV:.3g} is the most: lower noise_multiplier, or raise epsilon"
        )
    return rounded_gaussian(max(stddev, LEAST_STDDEV), size, draw)


def noisy(vector: Tensor, clip_norm: float, stddev: float, draw: Draw) -> Tensor:
    """Return one clipped vector with noise, on the grid, in the dtype and on the device of the vector.

    Args:
        vector: shape (k,).
        clip_norm: S.
        stddev: of the noise, in the units of the vector.
        draw: gives the rounding's coins, then the noise.
    """
    grid = Grid.of(clip_norm, len(vector))
    steps = grid.to_steps(vector, draw) + grid.noise(stddev, len(vector), draw)
    return grid.value(torch.from_numpy(steps)).to(vector)


# What the check of a norm in double precision may let through beyond the bound.
CHECKED_TO = 1 + 1e-12
# The chance that so many are all too long is below e^-500 for a clipped vector.
_MOST_TRIES = 1000


def norm_bound(clip_norm: float, step: float, size: int) -> float:
    """Return B, the largest L2 norm of a rounded vector, in steps.

    Args:
        clip_norm: S ≥ 0.
        step: of the grid, > 0.
        size: of the vector, k.

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
    """Return a vector of norm ≤ S as whole steps, of norm ≤ `norm_bound` · 1.000000000002.

    Args:
        delta: clipped, shape (k,).
        clip_norm: S.
        step: of the grid, > 0.
        draw: gives random words, k for each try.

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


def from_integers(numbers: Integers, step: float, like: Tensor) -> Tensor:
    """Return whole steps as a vector of the dtype and device of ``like``, shape (k,)."""
    return torch.from_numpy(numbers * step).to(like)
