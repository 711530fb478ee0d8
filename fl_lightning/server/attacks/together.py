"""Attacks of clients that know all honest updates of the round, and send one vector together.

    ALIE      μ - z σ,   z = Φ⁻¹((n - m - s) / (n - m)),   s = ⌊n / 2⌋ + 1 - m
    IPM       -ε μ
    min-max   μ + γ p,   the largest γ with max_i |μ + γ p - x_i| ≤ max_ij |x_i - x_j|

with mean μ and standard deviation σ of every coordinate over the honest updates, n updates and m
attackers. Sources: Baruch et al. 2019, A Little Is Enough; Xie et al. 2020, Fall of
Empires; Shejwalkar and Houmansadr 2021, Manipulating the Byzantine.
Differs: the papers' ALIE estimates μ and σ from the attackers' own honest training, ours knows them;
min-max's γ is solved for (a quadratic per honest update) instead of bisected.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import repeat
from statistics import NormalDist
from typing import Literal, final

import numpy as np

from fl_lightning.core.errors import ConfigurationError
from fl_lightning.server.attacks.forged import Generators
from fl_lightning.server.robust.matrix import Floats, Rows
from fl_lightning.server.robust.passes import mean_and_spread, squared_distances
from fl_lightning.server.robust.views import ChosenRows, RowsAndOne


@final
@dataclass(frozen=True)
class ALIE:
    """A little is enough: within the spread of honest updates, all at the same end of it.

    Args:
        z: how many standard deviations; the largest that a majority would still hide if None.
    """

    z: float | None = None

    def __post_init__(self) -> None:
        if not np.isfinite(0.0 if self.z is None else self.z):
            raise ConfigurationError(f"ALIE: z must be a finite number, got {self.z}")

    def forge(
        self, rows: Rows, attackers: Sequence[int], generators: Generators
    ) -> Iterator[Floats]:
        """Yield the same vector for everyone."""
        mean, spread = mean_and_spread(honest_of(rows, attackers))
        z = hidden_deviations(len(rows), len(attackers)) if self.z is None else self.z
        return repeat(mean - mean.dtype.type(z) * spread, len(attackers))


@final
@dataclass(frozen=True)
class InnerProductManipulation:
    """Sends the honest mean backwards.

    Args:
        epsilon: ε, how long; small ones hide from distances, large ones turn the mean around.
    """

    epsilon: float = 0.5

    def __post_init__(self) -> None:
        if not np.isfinite(self.epsilon):
            raise ConfigurationError(
                f"InnerProductManipulation: epsilon must be a finite number, got {self.epsilon}"
            )

    def forge(
        self, rows: Rows, attackers: Sequence[int], generators: Generators
    ) -> Iterator[Floats]:
        """Yield the same vector for everyone."""
        mean, _ = mean_and_spread(honest_of(rows, attackers))
        return repeat(mean.dtype.type(-self.epsilon) * mean, len(attackers))


@final
@dataclass(frozen=True)
class MinMax:
    """As far from the honest mean as the honest updates are from each other.

    Args:
        direction: p: ``std`` for -σ, ``unit`` for -μ / |μ|, ``sign`` for -sign(μ).
    """

    direction: Literal["std", "unit", "sign"] = "std"

    def forge(
        self, rows: Rows, attackers: Sequence[int], generators: Generators
    ) -> Iterator[Floats]:
        """Yield the same vector for everyone."""
        honest = honest_of(rows, attackers)
        mean, spread = mean_and_spread(honest)
        if self.direction == "std":
            away = -spread
        elif self.direction == "unit":
            away = -mean / max(np.linalg.norm(mean), np.finfo(mean.dtype).tiny)
        else:
            away = -np.sign(mean)
        distances = squared_distances(RowsAndOne(honest, mean))
        limit, to_mean = distances[:-1, :-1].max(), distances[:-1, -1]
        gamma = largest_step(away, along(honest, mean, away), to_mean, limit)
        return repeat(mean + mean.dtype.type(gamma) * away, len(attackers))


def honest_of(rows: Rows, attackers: Sequence[int]) -> Rows:
    """Return the honest rows; without any, what the attackers would have sent honestly."""
    honest = sorted(set(range(len(rows))) - set(attackers))
    return ChosenRows(rows, honest) if honest else rows


def hidden_deviations(num_updates: int, num_attackers: int) -> float:
    """Return ALIE's z, ≥ 0.

    Example:
        >>> round(hidden_deviations(50, 12), 4)  # Φ⁻¹(24 / 38)
        0.336
    """
    num_honest = num_updates - num_attackers
    supporters = num_updates // 2 + 1 - num_attackers
    if not 0 < supporters < num_honest:
        return 0.0
    return max(0.0, NormalDist().inv_cdf((num_honest - supporters) / num_honest))


def along(rows: Rows, mean: Floats, direction: Floats) -> Floats:
    """Return the inner products <p, μ - x_i>, float64, shape (n,)."""
    products = np.zeros(len(rows))
    for columns, block in rows.blocks():
        products += (mean[columns] - block) @ direction[columns]
    return products


def largest_step(direction: Floats, products: Floats, to_mean: Floats, limit: float) -> float:
    """Return the largest γ with γ² |p|² + 2 γ <p, μ - x_i> + |μ - x_i|² ≤ limit for all i.

    Example:
        >>> largest_step(np.array([1.0]), np.array([1.0, -1.0]), np.array([1.0, 1.0]), limit=4.0)
        1.0
    """
    square = float(np.einsum("i,i->", direction, direction, dtype=np.float64))
    if not square:
        return 0.0
    roots = np.sqrt(np.maximum(products**2 + square * (limit - to_mean), 0))
    return float(((roots - products) / square).min())
