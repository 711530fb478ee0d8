"""DP-FTRL: noise that is correlated over rounds, for cohorts that nobody samples.

    aggregate_t = (Σ_k clip_S(Δ_k) + z S (C⁻¹ Z)_t) / m

Much of a round's noise is taken back in the next rounds, so that the model, which adds rounds up,
has less of it. It needs no random sampling, only that a client waits at least as many rounds
between two turns as C has bands; `RoundRobinCohort` sees to that. The whole run is one release of
a Gaussian mechanism of sensitivity S √P for clients that take part P times.
Source: Choquette-Choo et al. 2023 (2306.08153); Kairouz et al. 2021 (2103.00039) for DP-FTRL.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any, final

from torch import Tensor

from fl_lightning.core.errors import ConfigurationError
from fl_lightning.core.whole_numbers import Draw, Integers
from fl_lightning.data.cohorts.cohort import CohortSampler
from fl_lightning.privacy.accounting.gaussian import gaussian_epsilon
from fl_lightning.privacy.accounting.noise_for_budget import noise_for_budget
from fl_lightning.privacy.banded_matrix import (
    CorrelatedSums,
    Matrix,
    banded_factor,
    noise_of_rounds,
)
from fl_lightning.privacy.mechanism import ClientPrivacy, Mechanism, check_options
from fl_lightning.privacy.noise.grid import GRID_COST, Grid, noise_of
from fl_lightning.privacy.noise.noise_source import NoiseSource
from fl_lightning.privacy.private_mean import Release
from fl_lightning.privacy.run import AccountedRun, Participation, check_fixed_in_advance

# Each band costs a vector of the model's size.
_MOST_BANDS = 32


@final
@dataclass(frozen=True, kw_only=True)
class BandedMatrixDP(ClientPrivacy):
    """Protects each client as `CentralDP` does, without amplification by sampling.

    Compared are data sets with and without one client, whose rounds are known to everybody. It must
    know the number of rounds, ``trainer.max_epochs``. The last rounds' sums without noise are in the
    checkpoint, because later rounds use them again: keep checkpoints as secret as updates.

    Args:
        clip_norm: as of `CentralDP`.
        noise_multiplier: z, as of `CentralDP`.
        epsilon: as of `CentralDP`.
        delta: as of `CentralDP`.
        bands: of the matrix; rounds that a client must wait. If None, as many as the cohorts allow,
            at most 32.
        secure_noise: as of `CentralDP`.
        log_unprotected: as of `CentralDP`.

    Raises:
        ConfigurationError: for values out of range.

    Example:
        >>> from fl_lightning.data.cohorts.weighted_cohorts import RoundRobinCohort
        >>> from fl_lightning.privacy.noise.noise_source import SeededNoise
        >>> privacy = BandedMatrixDP(clip_norm=1.0, noise_multiplier=4.0)
        >>> run = AccountedRun(RoundRobinCohort(size=10), num_clients=100, num_rounds=20, seed=0)
        >>> print(privacy.mechanism(run, SeededNoise(0)))
        unit: client, one client added or removed; turns of 2 in 20 rounds at least 10 apart, 10 bands
    """

    clip_norm: float
    noise_multiplier: float | None = None
    epsilon: float | None = None
    delta: float = 1e-5
    bands: int | None = None
    secure_noise: bool = True
    log_unprotected: bool = True

    def __post_init__(self) -> None:
        check_options(self.clip_norm, self.noise_multiplier, self.epsilon, self.delta)
        if self.bands is not None and self.bands < 1:
            raise ConfigurationError(
                f"federation.privacy: bands must be at least 1, got {self.bands}"
            )

    def check_cohort(self, cohort: CohortSampler) -> None:
        """Refuse cohorts that depend on what happens in the run."""
        check_fixed_in_advance(cohort)

    def mechanism(
        self, run: AccountedRun, source: NoiseSource, noise_multiplier: float | None = None
    ) -> Mechanism:
        """Return the matrix mechanism of a run.

        Raises:
            ConfigurationError: if clients' turns are closer than ``bands`` rounds.
        """
        turns = run.participation()
        bands = self.bands or min(turns.separation, _MOST_BANDS)
        if bands > turns.separation:
            raise ConfigurationError(
                f"federation.privacy: {bands} bands need {bands} rounds from one turn of a client "
                f"to its next, and here some wait only {turns.separation}: lower bands, or set "
                "federation.cohort to RoundRobinCohort with a smaller size"
            )
        noise = self.noise_multiplier if noise_multiplier is None else noise_multiplier
        if noise is None:
            assert self.epsilon is not None
            share = 1 / (GRID_COST * math.sqrt(turns.most[-1]))

            def epsilon_of(noise_multiplier: float, *, quick: bool) -> float:
                return gaussian_epsilon(noise_multiplier * share, self.delta)

            noise = noise_for_budget(epsilon_of, self.epsilon)
        columns = banded_factor(run.planned_rounds, bands)
        grid = Grid.of(self.clip_norm, run.num_coordinates) if noise else None
        return BandedGaussian(columns, turns, self.delta, noise, run.expected_cohort, grid)


@dataclass
class BandedGaussian:
    """Noise correlated over rounds; `Mechanism` says what its parts are."""

    columns: Matrix
    turns: Participation
    delta: float
    noise_multiplier: float
    expected: float
    grid: Grid | None = None
    noise_per_round: float = field(init=False)
    bits_stddev: None = None
    fewest_replies: int = 0
    shares: None = None
    rounding: float = GRID_COST

    def __post_init__(self) -> None:
        # of the longest updates that there may be: a mask makes them shorter, and the radius no larger
        radius = 1.0 if self.grid is None else self.grid.radius
        stddev = self.noise_multiplier * radius
        self._sums = CorrelatedSums(self.columns, stddev, self.expected * radius)
        self.noise_per_round = self.noise_multiplier * noise_of_rounds(self.columns)

    def __str__(self) -> str:
        rounds, bands = self.columns.shape
        return (
            f"unit: client, one client added or removed; turns of {self.turns.most[-1]} in {rounds} "
            f"rounds at least {self.turns.separation} apart, {bands} bands"
        )

    def epsilon(self, rounds: int, *, quick: bool = False) -> float:
        """Return ε after so many of the run's rounds."""
        turns = int(self.turns.most[rounds])
        ratio = self.noise_multiplier / GRID_COST
        return gaussian_epsilon(ratio / math.sqrt(turns), self.delta) if turns else 0.0

    def client_release(self, round_index: int, clip_norm: float) -> Release | None:
        """Return None: clients add nothing."""
        return None

    def step(self, clip_norm: float) -> float:
        """Return the width of the grid."""
        return 0.0 if self.grid is None else self.grid.step

    def server_noise(self, grid: Grid, size: int, draw: Draw) -> Integers:
        """Return a row of Z, in whole numbers of the finer grid that C G is on."""
        return noise_of(self.noise_multiplier * grid.radius * self._sums.scale, size, draw)

    def released(self, total: Tensor, noise: Tensor) -> Tensor:
        """Return the round's sum with the next row of the correlated noise."""
        return self._sums.next(total, noise)

    def state_dict(self) -> dict[str, Any]:
        """Return the last rows of sums and of what was released."""
        return self._sums.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from there."""
        self._sums.load_state_dict(state)
