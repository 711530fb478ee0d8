"""Attacks of clients that know nothing of the others.

    sign flip -s x_i;     Gaussian σ N(0, I);     scaling γ x_i

Sources: sign flip and Gaussian: Blanchard et al. 2017 (there σ = 200); scaling: Bagdasaryan
et al. 2020, How to Backdoor Federated Learning, model replacement, where γ is the
number of updates over the server's learning rate.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import final

import numpy as np

from fl_lightning.core.errors import ConfigurationError
from fl_lightning.server.attacks.forged import Generators
from fl_lightning.server.robust.matrix import Floats, Rows
from fl_lightning.server.robust.passes import combined


@final
@dataclass(frozen=True)
class Scaling:
    """Sends its update times a factor: with poisoned examples, model replacement.

    Args:
        factor: γ; 1 changes nothing.
    """

    factor: float = 10.0

    def __post_init__(self) -> None:
        if not np.isfinite(self.factor):
            raise ConfigurationError(f"Scaling: factor must be a finite number, got {self.factor}")

    def forge(
        self, rows: Rows, attackers: Sequence[int], generators: Generators
    ) -> Iterator[Floats]:
        """Yield the scaled updates."""
        for place in attackers:
            yield combined(rows, self.factor * (np.arange(len(rows)) == place))


@final
@dataclass(frozen=True)
class SignFlip:
    """Sends its update with the opposite sign.

    Args:
        scale: s, ≥ 0, times as long.

    Raises:
        ConfigurationError: if it is negative.
    """

    scale: float = 1.0

    def __post_init__(self) -> None:
        if not 0 <= self.scale < np.inf:
            raise ConfigurationError(
                f"SignFlip: scale must be at least 0 and finite, got {self.scale}"
            )

    def forge(
        self, rows: Rows, attackers: Sequence[int], generators: Generators
    ) -> Iterator[Floats]:
        """Yield the reversed updates."""
        return Scaling(-self.scale).forge(rows, attackers, generators)


@final
@dataclass(frozen=True)
class GaussianNoise:
    """Sends noise.

    Args:
        std: σ, ≥ 0, of every coordinate.

    Raises:
        ConfigurationError: if it is negative.
    """

    std: float = 1.0

    def __post_init__(self) -> None:
        if not 0 <= self.std < np.inf:
            raise ConfigurationError(
                f"GaussianNoise: std must be at least 0 and finite, got {self.std}"
            )

    def forge(
        self, rows: Rows, attackers: Sequence[int], generators: Generators
    ) -> Iterator[Floats]:
        """Yield noise, of each attacker its own."""
        for place in attackers:
            generator = generators(rows.client_ids[place])
            noise = generator.standard_normal(rows.num_columns, np.float32)
            yield (self.std * noise).astype(rows.dtype)
