"""Local differential privacy: every client adds noise before it sends, and trusts nobody.

    client: clip_S(Δ_k) + N(0, (z S)² I)        server: their sum over qN

Clients send multiples of a step, see `Grid`. Updates from a client's data and from any other data
differ by 2 S at most. The server sees which clients are sampled, so there is no amplification by
sampling: a client's ε grows with each round in which it is sampled.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import final

from torch import Tensor

from fl_lightning.privacy.accounting.accountant import gaussian_noise_for_budget
from fl_lightning.privacy.accounting.gaussian import ReleaseCost, composed_epsilon
from fl_lightning.privacy.mechanism import Mechanism, Privacy
from fl_lightning.privacy.noise.grid import GRID_COST, noisy
from fl_lightning.privacy.noise.noise_source import NoiseSource
from fl_lightning.privacy.private_mean import Release
from fl_lightning.privacy.run import AccountedRun, Participation


@final
@dataclass(frozen=True, kw_only=True)
class LocalDP(Privacy):
    """Protects each client's data from everybody, including the server.

    The noise of m clients adds up to √m times the noise that `CentralDP` needs for the same ε: use it
    with many clients, and small models or masks.

    Args:
        clip_norm: largest L2 norm S of an update, > 0.
        noise_multiplier: standard deviation z of each client's noise, in clip norms, ≥ 0.
        epsilon: the budget of the client that is sampled most often, see `CentralDP`.
        delta: see `CentralDP`.
        secure_noise: see `CentralDP`.
        log_unprotected: log values that clients send without noise: metrics and norms.

    Raises:
        ConfigurationError: for values out of range.

    Example:
        >>> from fl_lightning.data.cohorts.cohort import AllClients
        >>> from fl_lightning.privacy.noise.noise_source import SeededNoise
        >>> privacy = LocalDP(clip_norm=1.0, noise_multiplier=10.0)
        >>> run = AccountedRun(AllClients(), num_clients=100, num_rounds=25, seed=0)
        >>> round(privacy.mechanism(run, SeededNoise(0)).epsilon(rounds=25), 6)
        4.377178
    """

    clients_add_noise = True

    def mechanism(
        self, run: AccountedRun, source: NoiseSource, noise_multiplier: float | None = None
    ) -> Mechanism:
        """Return the clients' mechanism."""
        turns = run.participation()
        share = 0.5 / (GRID_COST * math.sqrt(turns.most[-1]))
        noise = self.noise(
            noise_multiplier, lambda budget: gaussian_noise_for_budget(share, budget, self.delta)
        )
        expected, size = run.expected_cohort, run.num_coordinates
        return LocalGaussian(source, turns, self.delta, noise, expected, size)


@dataclass
class LocalGaussian(Mechanism):
    """Independent Gaussian noise on every update; see `Mechanism`."""

    source: NoiseSource
    turns: Participation
    delta: float
    noise_multiplier: float
    expected: float
    num_coordinates: int = 1

    @property
    def noise_per_round(self) -> float:
        """Standard deviation of the noise in a sum over an expected cohort, in clip norms."""
        return self.noise_multiplier * math.sqrt(self.expected)

    def __str__(self) -> str:
        return (
            "unit: all updates of a client, its data replaced by any other, also towards the "
            f"server; {self.turns.most[-1]} turns in {len(self.turns.most) - 1} rounds"
        )

    @property
    def release_cost(self) -> ReleaseCost:
        """Sensitivity and noise of one update of a client, in clip norms."""
        return ReleaseCost(2 * GRID_COST, self.noise_multiplier**2)

    def epsilon(self, rounds: int, *, quick: bool = False) -> float:
        """Return the largest ε of a client after ``rounds`` rounds."""
        return composed_epsilon({self.release_cost: int(self.turns.most[rounds])}, self.delta)

    def client_release(self, round_index: int, clip_norm: float) -> Release | None:
        """Return the function that adds a client's noise."""
        if self.noise_multiplier == 0:
            return None

        def release(delta: Tensor, client: int) -> Tensor:
            draw, stddev = (
                self.source.stream(round_index, client),
                self.noise_multiplier * clip_norm,
            )
            return noisy(delta, clip_norm, stddev, draw)

        return release
