"""Central differential privacy: a trusted server adds noise to the sum of updates.

    x ← server_optimizer(x, (Σ_k clip_S(Δ_k) + N(0, (z S)² I)) / qN)

Updates are rounded to a grid and summed as integers, and the noise is integer as well, see `Grid`.
Source: McMahan et al. 2018 (1710.06963), Algorithm 1, with accounting by privacy-loss distributions.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from functools import partial
from typing import final

from typing_extensions import override

from fl_lightning.core.errors import ConfigurationError
from fl_lightning.core.seeds import Draw, Integers
from fl_lightning.data.cohorts.cohort import Cohort
from fl_lightning.privacy.accounting.accountant import (
    Accountant,
    Method,
    Sampling,
    check_sampler,
    noise_for_budget,
    sampling_of,
)
from fl_lightning.privacy.accounting.gaussian import gaussian_epsilon
from fl_lightning.privacy.mechanism import AccountedRun, Mechanism, Privacy
from fl_lightning.privacy.noise.grid import GRID_COST, Grid
from fl_lightning.privacy.noise.noise_source import NoiseSource
from fl_lightning.privacy.private_mean import (
    AdaptiveClip,
    update_noise_multiplier,
)


@final
@dataclass(frozen=True, kw_only=True)
class CentralDP(Privacy):
    """Central differential privacy: protects each client from observers of the models.

    The server sees updates in clear. Neighbouring data sets differ in one client: added or removed with
    Poisson sampling (`PoissonCohort`) or full participation, replaced by another one with a fixed
    cohort size (`UniformCohort`).

    Args:
        clip_norm: largest L2 norm S of a client's update, over all coordinates that are sent, > 0.
        noise_multiplier: standard deviation z of the noise on the sum, in clip norms, ≥ 0.
        epsilon: the budget. Without ``noise_multiplier`` the noise is computed that spends it over all
            rounds; with it, training stops before a round would exceed the budget.
        delta: probability that ε does not hold; below 1 / number of clients.
        adaptive_clip: let the clip norm follow a quantile of the updates' norms; fixed if None.
        accountant: ``pld``, or ``rdp``, which gives a larger ε.
        secure_noise: draw noise from the operating system's secure generator: nobody can subtract it,
            and no two runs are equal. Cohorts whose sampling amplifies are drawn from a secret that
            nobody keeps, not from the seed. A round that is trained again after a crash or from an
            older checkpoint gets new noise, and is a release that this run does not account for.
            If false, noise is a function of the seed, which must then be kept secret.
        log_unprotected: log values without noise: clients' metrics and norms, skipped clients, the
            share of clipped updates. They are for the operator of the server only. If false, none of
            them is logged or kept in checkpoints.

    Raises:
        ConfigurationError: for values out of range.

    Example:
        >>> from fl_lightning.data.cohorts.cohort import PoissonCohort
        >>> from fl_lightning.privacy.noise.noise_source import SeededNoise
        >>> privacy = CentralDP(clip_norm=0.5, noise_multiplier=1.0)
        >>> run = AccountedRun(PoissonCohort(fraction=0.1), num_clients=1000, num_rounds=100, seed=0)
        >>> round(privacy.mechanism(run, SeededNoise(0)).epsilon(rounds=100), 4)
        7.0466
    """

    adaptive_clip: AdaptiveClip | None = None
    accountant: Method = "pld"
    log_unprotected: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if isinstance(self.adaptive_clip, Mapping):  # as YAML gives options without their class
            known = {field.name for field in fields(AdaptiveClip)}
            if unknown := self.adaptive_clip.keys() - known:
                raise ConfigurationError(
                    f"CentralDP: adaptive_clip takes {', '.join(sorted(known))}, got "
                    f"{', '.join(sorted(map(str, unknown)))}"
                )
            object.__setattr__(self, "adaptive_clip", AdaptiveClip(**self.adaptive_clip))

    def check_cohort(self, cohort: Cohort) -> None:
        """Raise ConfigurationError if ε of this cohort sampler is unknown."""
        check_sampler(cohort)

    def mechanism(
        self, run: AccountedRun, source: NoiseSource, noise_multiplier: float | None = None
    ) -> Mechanism:
        """Return the Gaussian mechanism of a run."""
        sampling = sampling_of(run.cohort, run.num_clients)

        def epsilon_of(noise_multiplier: float, *, quick: bool) -> float:
            accountant = self._accountant(sampling, noise_multiplier)
            return accountant.epsilon(run.planned_rounds, self.delta, quick=quick)

        noise = self.noise(noise_multiplier, partial(noise_for_budget, epsilon_of))
        bits_stddev = None
        if self.adaptive_clip is not None:
            bits_stddev = self.adaptive_clip.bits_stddev
            bits_stddev = sampling.expected / 20 if bits_stddev is None else bits_stddev
        accountant = self._accountant(sampling, noise)
        return CentralGaussian(accountant, self.delta, noise, run.num_coordinates, bits_stddev, run)

    def _accountant(self, sampling: Sampling, noise_multiplier: float) -> Accountant:
        sensitivity = sampling.sensitivity * GRID_COST
        return Accountant(sampling, noise_multiplier / sensitivity, self.accountant)


@dataclass
class CentralGaussian(Mechanism):
    """Independent Gaussian noise on the sum of every round; see `Mechanism`."""

    accountant: Accountant
    delta: float
    noise_multiplier: float
    num_coordinates: int = 1
    bits_stddev: float | None = None
    run: AccountedRun | None = None
    expected: float = field(init=False)

    def __post_init__(self) -> None:
        self.expected = self.accountant.sampling.expected
        _ = self.noise_per_round  # too little noise on the count is refused

    @property
    @override
    def noise_per_round(self) -> float:
        if self.bits_stddev is None:
            return self.noise_multiplier
        return update_noise_multiplier(self.noise_multiplier, self.bits_stddev)

    def __str__(self) -> str:
        sampling = self.accountant.sampling
        method = self.accountant.method_used.upper()
        return f"unit: client, {sampling.relation}; {sampling}; {method}"

    @override
    def epsilon(self, rounds: int, *, quick: bool = False) -> float:
        return self.accountant.epsilon(rounds, self.delta, quick=quick)

    @property
    def amplifies(self) -> bool:
        """True if cohorts are samples."""
        return self.accountant.sampling.kind != "all"

    def epsilon_if_known(self, rounds: int) -> float:
        """ε of the client that is sampled most often, if the adversary knows the cohorts."""
        turns = rounds if self.run is None else self.run.most_turns(rounds)
        ratio = self.accountant.noise_ratio
        return gaussian_epsilon(ratio / math.sqrt(turns), self.delta) if turns else 0.0

    @override
    def server_noise(self, grid: Grid, size: int, draw: Draw) -> Integers:
        return grid.noise(self.noise_per_round * grid.clip_norm, size, draw)
