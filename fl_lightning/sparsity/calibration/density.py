"""What fraction of the maskable entries trains, in the end and after each round of calibration.

    keep_r = density^(r / R),   r = 1 … R

Source: Iurada et al. 2025, ICLR (TaLoS), Algorithm 1, whose "final sparsity k" is this density.
"""

from __future__ import annotations

import math

from fl_lightning.core.errors import ConfigurationError


def resolve_density(density: float | None, sparsity: float | None) -> float:
    """Return the density, in (0, 1], from either it or the sparsity: density = 1 - sparsity.

    Raises:
        ConfigurationError: if neither is given, one is out of range, or the two contradict.

    Example:
        >>> resolve_density(None, 0.75)
        0.25
    """
    if density is None and sparsity is None:
        raise ConfigurationError(
            "give density, the fraction of entries that train, or sparsity = 1 - density"
        )
    if density is not None and not 0 < density <= 1:
        raise ConfigurationError(
            f"density must be in (0, 1], got {density}: it is the fraction of entries that train"
        )
    if sparsity is not None and not 0 <= sparsity < 1:
        raise ConfigurationError(
            f"sparsity must be in [0, 1), got {sparsity}: it is the fraction of entries that "
            "do not train"
        )
    if density is None:
        assert sparsity is not None
        return 1 - sparsity
    if sparsity is not None and not math.isclose(density + sparsity, 1, abs_tol=1e-9):
        raise ConfigurationError(
            f"density {density} and sparsity {sparsity} contradict each other: they add up to 1. "
            "Give one."
        )
    return density


def density_schedule(density: float, rounds: int) -> list[float]:
    """Return the densities after rounds 1 to R, the last one being ``density`` itself.

    Example:
        >>> [round(d, 6) for d in density_schedule(0.1, 4)]
        [0.562341, 0.316228, 0.177828, 0.1]
    """
    return [density ** (r / rounds) for r in range(1, rounds)] + [density]
