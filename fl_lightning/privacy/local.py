"""Local differential privacy: every client adds noise before it sends, and trusts nobody.

    client: clip_S(Δ_k) + N(0, (z S)² I)        server: their sum over qN

What a client sends is a multiple of a step, see `Grid`.
An update of a client's data and one of any other data differ by 2 S at most. The server sees who
takes part, so that sampling amplifies nothing: a client pays for each of its turns.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, final

import numpy as np
from torch import Tensor

from fl_lightning.core.whole_numbers import Draw, Integers
from fl_lightning.data.cohorts.cohort import CohortSampler
from fl_lightning.privacy.accounting.accountant import noise_for_budget
from fl_lightning.privacy.accounting.gaussian import ReleaseCost, composed_epsilon, gaussian_epsilon
from fl_lightning.privacy.mechanism import ClientPrivacy, Mechanism, check_options
from fl_lightning.privacy.noise.grid import GRID_COST, Grid, noisy, wide
from fl_lightning.privacy.noise.noise_source import NoiseSource
from fl_lightning.privacy.private_mean import Release
from fl_lightning.privacy.run import AccountedRun, Participation, check_fixed_in_advance


@final
@dataclass(frozen=True, kw_only=True)
class LocalDP(ClientPrivacy):
    """Protects each client's data from everybody, the server included.

    The noise of m clients adds up in their mean to √m times what one client would need under
    `CentralDP`: it takes many clients, and small models or masks.

    Args:
        clip_norm: largest L2 norm S of an update, > 0.
        noise_multiplier: standard deviation z of each client's noise, in clip norms, ≥ 0.
        epsilon: the budget of the client with the most turns, as of `CentralDP`.
        delta: as of `CentralDP`.
        secure_noise: as of `CentralDP`.
        log_unprotected: log what clients send without noise: metrics and norms.

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

    clip_norm: float
    noise_multiplier: float | None = None
    epsilon: float | None = None
    delta: float = 1e-5
    secure_noise: bool = True
    log_unprotected: bool = False

    def __post_init__(self) -> None:
        check_options(self.clip_norm, self.noise_multiplier, self.epsilon, self.delta)

    def check_cohort(self, cohort: CohortSampler) -> None:
        """Refuse cohorts that depend on what happens in the run."""
        check_fixed_in_advance(cohort)

    def mechanism(
        self, run: AccountedRun, source: NoiseSource, noise_multiplier: float | None = None
    ) -> Mechanism:
        """Return the clients' mechanism."""
        turns = run.participation()
        noise = self.noise_multiplier if noise_multiplier is None else noise_multiplier
        if noise is None:
            assert self.epsilon is not None
            share = 0.5 / (GRID_COST * math.sqrt(turns.most[-1]))

            def epsilon_of(noise_multiplier: float, *, quick: bool) -> float:
                return gaussian_epsilon(noise_multiplier * share, self.delta)

            noise = noise_for_budget(epsilon_of, self.epsilon)
        expected, size = run.expected_cohort, run.num_coordinates
        return LocalGaussian(source, turns, self.delta, noise, expected, size)


@dataclass
class LocalGaussian:
    """Independent noise on every update; `Mechanism` says what its parts are."""

    source: NoiseSource
    turns: Participation
    delta: float
    noise_multiplier: float
    expected: float
    num_coordinates: int = 1
    bits_stddev: None = None
    fewest_replies: int = 0
    shares: None = None
    rounding: float = GRID_COST

    @property
    def noise_per_round(self) -> float:
        """Of the sum over an expected cohort."""
        return self.noise_multiplier * math.sqrt(self.expected)

    def __str__(self) -> str:
        return (
            "unit: all updates of a client, its data replaced by any other, also towards the "
            f"server; {self.turns.most[-1]} turns in {len(self.turns.most) - 1} rounds"
        )

    @property
    def release_cost(self) -> ReleaseCost:
        """What one turn costs a client, in clip norms."""
        return ReleaseCost(2 * GRID_COST, self.noise_multiplier**2)

    def epsilon(self, rounds: int, *, quick: bool = False) -> float:
        """Return the largest ε of a client after so many of the run's rounds."""
        return composed_epsilon({self.release_cost: int(self.turns.most[rounds])}, self.delta)

    def client_release(self, round_index: int, clip_norm: float) -> Release | None:
        """Return the clients' noise."""
        if self.noise_multiplier == 0:
            return None

        def release(delta: Tensor, client: int) -> Tensor:
            draw, stddev = (
                self.source.stream(round_index, client),
                self.noise_multiplier * clip_norm,
            )
            return noisy(delta, clip_norm, stddev, draw)

        return release

    def step(self, clip_norm: float) -> float:
        """Return the width of the grid."""
        return Grid.of(clip_norm, self.num_coordinates).step

    def server_noise(self, grid: Grid, size: int, draw: Draw) -> Integers:
        """Return nothing: clients have added it."""
        return np.zeros(size, np.int64)

    def released(self, total: Tensor, noise: Tensor) -> Tensor:
        """Return the sum, which has the clients' noise."""
        return wide(total)

    def state_dict(self) -> dict[str, Any]:
        """Return nothing."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Nothing depends on earlier rounds."""
