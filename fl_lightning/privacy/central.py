"""Central differential privacy: a trusted server adds noise to the sum of updates.

    x ← server_optimizer(x, (Σ_k clip_S(Δ_k) + N(0, (z S)² I)) / qN)

Updates are rounded to a grid and summed as integers, and the noise is integer as well, see `Grid`.
Source: McMahan et al. 2018 (1710.06963), Algorithm 1, with accounting by privacy-loss distributions.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import final

from typing_extensions import override

from fl_lightning.core.errors import ConfigurationError
from fl_lightning.core.seeds import Draw, Integers
from fl_lightning.data.cohorts.cohort import Cohort
from fl_lightning.privacy.accounting.accountant import (
    Accountant,
    Method,
    check_sampler,
    sampling_of,
)
from fl_lightning.privacy.accounting.gaussian import ReleaseCost
from fl_lightning.privacy.mechanism import Mechanism, Privacy
from fl_lightning.privacy.noise.grid import GRID_COST, Grid, noise_of
from fl_lightning.privacy.private_mean import (
    AdaptiveClip,
    update_noise_multiplier,
)


class CentralGaussian(Mechanism["CentralDP"]):
    """Mechanism of `CentralDP`: the server adds independent Gaussian noise to every round's sum."""

    @override
    def __post_init__(self) -> None:
        super().__post_init__()
        sampling = self.sampling = sampling_of(self.run.cohort, self.run.num_clients)
        ratio = self.noise_multiplier / (sampling.sensitivity * GRID_COST)
        self.accountant = Accountant(sampling, ratio, self.privacy.accountant)
        if (adaptive := self.privacy.adaptive_clip) is not None:
            stddev = adaptive.bits_stddev
            self.bits_stddev = sampling.expected / 20 if stddev is None else stddev

    @override
    def check(self) -> None:
        _ = self.noise_per_round  # too little noise on the count is refused

    @property
    @override
    def noise_per_round(self) -> float:
        if self.bits_stddev is None:
            return self.noise_multiplier
        return update_noise_multiplier(self.noise_multiplier, self.bits_stddev)

    def __str__(self) -> str:
        method = self.accountant.method_used.upper()
        return f"unit: client, {self.sampling.relation}; {self.sampling}; {method}"

    @override
    def epsilon(self, rounds: int, *, quick: bool = False) -> float:
        return self.accountant.epsilon(rounds, self.privacy.delta, quick=quick)

    @property
    @override
    def release_cost(self) -> ReleaseCost:
        return ReleaseCost(self.sampling.sensitivity * GRID_COST, self.noise_multiplier**2)

    @property
    def amplifies(self) -> bool:
        """True if a cohort is a random sample of the clients (not all of them), which lowers ε."""
        return self.sampling.kind != "all"

    @override
    def server_noise(self, grid: Grid, size: int, draw: Draw) -> Integers:
        return noise_of(self.noise_per_round * grid.radius, size, draw)


@final
@dataclass(frozen=True, kw_only=True)
class CentralDP(Privacy):
    """Central differential privacy: protects each client from anyone who sees the models; trusts the server.

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
        >>> from fl_lightning.privacy.mechanism import AccountedRun
        >>> privacy = CentralDP(clip_norm=0.5, noise_multiplier=1.0)
        >>> run = AccountedRun(PoissonCohort(fraction=0.1), num_clients=1000, num_rounds=100, seed=0)
        >>> round(privacy.mechanism(run).epsilon(rounds=100), 4)
        7.0466
    """

    kind = CentralGaussian

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
        """Raise ConfigurationError if the privacy cost ε cannot be computed for this cohort sampler."""
        check_sampler(cohort)
