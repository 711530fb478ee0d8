"""A clipped update as whole numbers of bounded norm, for sums modulo a power of two.

    v = round at random (Δ / step), drawn again until ‖v‖₂ ≤ B
    B² = min((R + √k)², R² + k/4 + √(2 log(1/β)) (R + √k/2)),   R = S / step,  β = e^(-½)

Each coordinate is rounded up or down so that its expectation is right; B is exceeded with a chance
of less than β. Source: Kairouz, Liu and Steinke 2021 (2102.06387), Algorithm 1 and Equation 4.
Differs: no rotation beforehand, since sums here have 63 bits.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

from fl_lightning.core.whole_numbers import Draw, Integers

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
