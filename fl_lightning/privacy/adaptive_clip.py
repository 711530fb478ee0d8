"""A clip norm that follows a quantile of the updates' norms.

    b̃ = ½ + (Σ_k (b_k - ½) + N(0, s²)) / m,   b_k = 1 if ‖Δ_k‖ ≤ C else 0
    C ← C · exp(-η (b̃ - γ))
    z_Δ = (z⁻² - (2 s)⁻²)^(-½)

m is the expected cohort. A bit moves the sum by ½ at most, so that the query's noise multiplier is
2 s; with noise z_Δ on the updates both together cost as much as one release with noise z.
Source: Andrew et al. 2021 (1905.03871), Algorithm 1 and Theorem 1. Differs: clients that were
sampled and sent nothing count as ½, since the number of replies is not released.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import final

from fl_lightning.core.errors import ConfigurationError


def quantile_noise(bits_stddev: float | None, expected: float) -> float:
    """Return the standard deviation of a count's noise; a twentieth of the cohort if None."""
    return expected / 20 if bits_stddev is None else bits_stddev


def update_noise_multiplier(noise_multiplier: float, bits_stddev: float) -> float:
    """Return the noise multiplier that is left for the updates, z_Δ ≥ z.

    Args:
        noise_multiplier: of both releases together, z ≥ 0.
        bits_stddev: s > z / 2.

    Raises:
        ConfigurationError: if the count alone would cost more than both may.

    Example:
        >>> round(update_noise_multiplier(1.0, bits_stddev=5.0), 12)
        1.005037815259
    """
    if noise_multiplier == 0:
        return 0.0
    left = noise_multiplier**-2 - (2 * bits_stddev) ** -2 if bits_stddev > 0 else -math.inf
    if left <= 0:
        raise ConfigurationError(
            f"federation.privacy: bits_stddev {bits_stddev:g} is too little noise on the count of "
            f"unclipped updates for a noise multiplier of {noise_multiplier:g}: it must be above "
            f"{noise_multiplier / 2:g}, or the cohort larger"
        )
    return 1 / math.sqrt(left)


@final
@dataclass(frozen=True, kw_only=True)
class AdaptiveClip:
    """How the clip norm follows the updates; ``clip_norm`` is where it starts.

    Args:
        quantile: share of updates that are to remain unclipped, γ in (0, 1).
        learning_rate: η > 0.
        bits_stddev: standard deviation of the noise on the number of unclipped updates, s ≥ 0; a
            twentieth of the expected cohort if None.

    Raises:
        ConfigurationError: for values out of range.

    Example:
        >>> round(AdaptiveClip().next_norm(0.1, unclipped=0.9), 8)
        0.09231163
        >>> round(AdaptiveClip().next_norm(0.1, unclipped=0.2), 8)
        0.10618365
    """

    quantile: float = 0.5
    learning_rate: float = 0.2
    bits_stddev: float | None = None

    def __post_init__(self) -> None:
        if not 0 < self.quantile < 1:
            raise ConfigurationError(
                f"federation.privacy: quantile must be in (0, 1), got {self.quantile}: it is the "
                "share of updates that remain unclipped"
            )
        if not 0 < self.learning_rate < math.inf:
            raise ConfigurationError(
                "federation.privacy: the clip norm's learning_rate must be above 0 and finite, got "
                f"{self.learning_rate}: leave adaptive_clip out for a fixed norm"
            )
        if self.bits_stddev is not None and not 0 <= self.bits_stddev < math.inf:
            raise ConfigurationError(
                f"federation.privacy: bits_stddev must be at least 0 and finite, got {self.bits_stddev}"
            )

    def next_norm(self, clip_norm: float, unclipped: float) -> float:
        """Return the next round's clip norm.

        Args:
            clip_norm: this round's.
            unclipped: the noisy share of updates within it, b̃.
        """
        return clip_norm * math.exp(-self.learning_rate * (unclipped - self.quantile))
