"""Privacy accounting: ε after a number of rounds, and the smallest noise for a budget.

A round releases a sum over its cohort plus Gaussian noise. dp-accounting composes rounds by the
privacy-loss distribution (PLD; Koskela et al. 2020, Doroshenko et al. 2022), which is tight, or by
Rényi divergences (RDP; Mironov et al. 2019; for fixed sizes Wang et al. 2019, Theorem 27), which is
looser. With full participation the PLD has a closed form. For cohorts of fixed size only the RDP is
known. Noise below a fifth of the sensitivity would need PLDs of gigabytes: it gets an upper bound in
closed form. The ε of the central limit theorem (GDP) is no upper bound, and not offered.

ε falls as noise rises, so the noise multiplier of a budget is found by bisection: first on the quick
grid, whose ε is a little too high, then on the fine one just below.

The sensitivity of a round to one client depends on the sampling, with clip norm S:

    Poisson, all clients    with and without one client       the sum moves by ≤ S
    fixed size              one client replaced by another    the sum moves by ≤ 2 S

There is no such theorem for samplers that depend on losses, speeds or availability.
"""

from __future__ import annotations

import logging
import math
from bisect import bisect_right
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Literal, Protocol

from fl_lightning.core.errors import ConfigurationError
from fl_lightning.data.cohorts.cohort import Cohort
from fl_lightning.privacy.accounting.gaussian import gaussian_epsilon, turns_epsilon

if TYPE_CHECKING:
    from dp_accounting.pld.privacy_loss_distribution import PrivacyLossDistribution


Method = Literal["pld", "rdp"]
# Privacy losses are rounded up to multiples of these: ε of the fine grid is tight to about 1e-5.
_FINE, _QUICK = 1e-4, 1e-3
# With less noise, losses vary so much that a grid ten times as coarse is as tight, relative to ε.
_WIDE = 0.5
# With less noise, the closed form replaces the PLD of Poisson samples.
_LEAST = 0.2


@dataclass(frozen=True)
class Accountant:
    """Computes ε of client-level privacy for rounds of equal sampling and Gaussian noise.

    Args:
        sampling: sampling of the cohorts.
        noise_ratio: standard deviation of the noise over the L2 sensitivity of the sum, ≥ 0: with
            noise z·S it is z / `Sampling.sensitivity`.
        method: ``pld`` or ``rdp``.

    Raises:
        ConfigurationError: if dp-accounting is needed and not installed.

    Example:
        >>> everybody = Accountant(Sampling("all", num_clients=100, expected=100), noise_ratio=5.0)
        >>> round(everybody.epsilon(rounds=100, delta=1e-5), 6)
        9.997256
    """

    sampling: Sampling
    noise_ratio: float
    method: Method = "pld"

    @property
    def method_used(self) -> Method:
        """Accounting method in use: ``method``, but always ``rdp`` for cohorts of fixed size."""
        return "rdp" if self.sampling.kind == "fixed" else self.method

    def epsilon(self, rounds: int, delta: float, *, quick: bool = False) -> float:
        """Return an upper bound of ε after ``rounds`` rounds.

        Args:
            rounds: number of rounds, ≥ 0.
            delta: in (0, 1).
            quick: use a coarser grid if there is one: ten times faster, and up to about 0.01 higher
                over 10,000 rounds.
        """
        if rounds == 0:
            return 0.0
        if self.noise_ratio <= 0:
            return math.inf
        if self.sampling.kind == "poisson" and self.noise_ratio < _LEAST:
            return turns_epsilon(self.noise_ratio, self.sampling.rate, rounds, delta)
        if self.method_used == "rdp":
            return _rdp_epsilon(self.sampling, self.noise_ratio, rounds, delta)
        if self.sampling.kind == "all":
            return gaussian_epsilon(self.noise_ratio / math.sqrt(rounds), delta)
        grid = (_QUICK if quick else _FINE) * (10 if self.noise_ratio < _WIDE else 1)
        distribution = _round_loss(self.noise_ratio, self.sampling.rate, grid)
        return float(distribution.self_compose(rounds).get_epsilon_for_delta(delta))


def _library() -> Any:
    try:
        import dp_accounting
        import dp_accounting.pld
        import dp_accounting.rdp
    except ImportError as error:
        raise ConfigurationError(
            "federation.privacy accounts with dp-accounting, which is not installed: "
            'pip install "fl-lightning[private]"'
        ) from error
    return dp_accounting


@lru_cache(maxsize=64)
def _round_loss(noise_ratio: float, rate: float, grid: float) -> PrivacyLossDistribution:
    """Return the privacy-loss distribution (PLD) of one Poisson-sampled round."""
    distributions = _library().pld.privacy_loss_distribution
    return distributions.from_gaussian_mechanism(
        noise_ratio, value_discretization_interval=grid, sampling_prob=rate
    )


@lru_cache(maxsize=4096)
def _rdp_epsilon(sampling: Sampling, noise_ratio: float, rounds: int, delta: float) -> float:
    library = _library()
    event = library.GaussianDpEvent(noise_ratio)
    relation = library.NeighboringRelation.ADD_OR_REMOVE_ONE
    if sampling.kind == "fixed":
        relation = library.NeighboringRelation.REPLACE_ONE
        event = library.SampledWithoutReplacementDpEvent(
            sampling.num_clients, round(sampling.expected), event
        )
    elif sampling.kind == "poisson":
        event = library.PoissonSampledDpEvent(sampling.rate, event)
    accountant = library.rdp.RdpAccountant(neighboring_relation=relation)
    with _silenced("absl"):  # it warns of orders that it skips: ε stays an upper bound
        return float(accountant.compose(event, rounds).get_epsilon(delta))


@contextmanager
def _silenced(name: str) -> Iterator[None]:
    logger = logging.getLogger(name)
    was_disabled, logger.disabled = logger.disabled, True
    try:
        yield
    finally:
        logger.disabled = was_disabled


def most_rounds(epsilon: Callable[[int], float], budget: float, limit: int) -> int:
    """Return how many rounds, at most ``limit``, keep ε within the budget.

    Args:
        epsilon: maps a number of rounds to ε, increasing.
        budget: largest ε allowed, ≥ 0.
        limit: largest number of rounds, ≥ 0.

    Example:
        >>> most_rounds(lambda rounds: 0.5 * rounds, budget=2.2, limit=100)
        4
    """
    high = 1  # doubled first, because ε of many rounds takes long
    while high < limit and epsilon(high) <= budget:
        high *= 2
    rounds = range(min(high, limit) + 1)
    return max(0, bisect_right(rounds, budget, key=epsilon) - 1)


_MOST = 1e6
# relative tolerance of the noise multiplier
_TOLERANCE = 2e-5


class EpsilonOf(Protocol):
    """Type of functions that map a noise multiplier to a run's ε."""

    def __call__(self, noise_multiplier: float, *, quick: bool) -> float:
        """Return ε; ``quick`` allows a slightly higher one."""


def noise_for_budget(epsilon_of: EpsilonOf, budget: float) -> float:
    """Return the smallest noise multiplier with which ε is within the budget, to a relative error of 2e-5.

    Args:
        epsilon_of: maps a noise multiplier to ε, decreasing.
        budget: ε > 0.

    Raises:
        ConfigurationError: if a million clip norms of noise are not enough.

    Example:
        >>> from fl_lightning.privacy.accounting.gaussian import gaussian_epsilon
        >>> z = noise_for_budget(lambda z, quick: gaussian_epsilon(z / 10, 1e-5), budget=1.0)
        >>> round(z, 2)  # 100 rounds with everybody
        37.31
    """
    low, high = 1e-2, 1.0
    while epsilon_of(high, quick=True) > budget:
        low, high = high, 2 * high
        if high > _MOST:
            raise ConfigurationError(
                f"federation.privacy: no noise keeps this run within epsilon={budget}: raise "
                "epsilon or delta, or train fewer rounds"
            )
    low, high = _halved(epsilon_of, low, high, budget, quick=True)
    below = high
    while below > 1e-3:
        below *= 0.999
        if epsilon_of(below, quick=False) > budget:
            break
        high = below
    return _halved(epsilon_of, below, high, budget, quick=False)[1]


def _halved(
    epsilon_of: EpsilonOf, low: float, high: float, budget: float, *, quick: bool
) -> tuple[float, float]:
    while high - low > _TOLERANCE * high:
        middle = (low + high) / 2
        if epsilon_of(middle, quick=quick) > budget:
            low = middle
        else:
            high = middle
    return low, high


@dataclass(frozen=True)
class Sampling:
    """How a round's cohort is sampled, for the privacy accountant: Poisson, fixed size or all, and its rate.

    Example:
        >>> from fl_lightning.data.cohorts.cohort import PoissonCohort
        >>> sampling = sampling_of(PoissonCohort(fraction=0.1), num_clients=50)
        >>> sampling.expected, sampling.rate, sampling.sensitivity, sampling.relation
        (5.0, 0.1, 1.0, 'one client added or removed')
    """

    # each client independently (``poisson``), a ``fixed`` number without replacement, or ``all``
    kind: Literal["poisson", "fixed", "all"]
    num_clients: int  # number of all clients, N
    expected: float  # expected number of clients of a round, qN, in (0, N]

    @property
    def rate(self) -> float:
        """Sampling rate q in (0, 1]: probability that a client is in a round's cohort."""
        return self.expected / self.num_clients

    @property
    def sensitivity(self) -> float:
        """L2 sensitivity of a round's sum to one client, in clip norms: 2 if clients are replaced, else 1."""
        return 2.0 if self.kind == "fixed" else 1.0

    @property
    def relation(self) -> str:
        """Neighbouring data sets that ε compares, in words: one client replaced, or added or removed."""
        return "one client replaced" if self.kind == "fixed" else "one client added or removed"

    def __str__(self) -> str:
        if self.kind == "all":
            return f"all {self.num_clients} clients, no amplification"
        if self.kind == "poisson":
            return f"Poisson sampling of {self.num_clients} clients at rate {self.rate:g}"
        return f"{self.expected:g} of {self.num_clients} clients without replacement"


def check_sampler(cohort: Cohort) -> None:
    """Raise ConfigurationError if ε is unknown for this cohort sampler; the message lists alternatives."""
    if cohort.coin is None and not cohort.is_uniform:
        raise ConfigurationError(
            f"federation.privacy: {type(cohort).__name__} cannot be accounted for, because the "
            "probability that a client is sampled is not known: set federation.cohort to "
            "PoissonCohort, UniformCohort or AllClients, or use BandedMatrixDP for cohorts that take turns"
        )
    if cohort.redrawn_below > 0:
        raise ConfigurationError(
            f"federation.privacy: with min_size={cohort.redrawn_below} clients of a "
            f"{type(cohort).__name__} do not join independently, which amplification by sampling "
            "needs: set min_size to 0"
        )


def sampling_of(cohort: Cohort, num_clients: int) -> Sampling:
    """Return how a cohort sampler draws clients (Poisson, fixed size or all), for the accountant.

    Raises:
        ConfigurationError: if ε of the sampler is unknown.
    """
    check_sampler(cohort)
    coin = cohort.coin
    if coin is not None and coin < 1:
        return Sampling("poisson", num_clients, coin * num_clients)
    size = cohort.expected_size(num_clients) if coin is None else num_clients
    return Sampling("all" if size == num_clients else "fixed", num_clients, float(size))
