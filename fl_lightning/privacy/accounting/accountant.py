"""What rounds cost in privacy: ε after any number of them.

A round releases a sum over its cohort plus Gaussian noise. Its cost is composed by dp-accounting
from the privacy-loss distribution (PLD; Koskela et al. 2020, Doroshenko et al. 2022), which is
tight, or from Rényi divergences (RDP; Mironov et al. 2019; for fixed sizes Wang et al. 2019, Theorem
27), which is looser. Where everybody takes part the PLD has a closed form. Of fixed-size
samples only the RDP is known. Noise below a fifth of the sensitivity needs PLDs of gigabytes: it gets an
upper bound in closed form. The central limit theorem's ε (GDP) is no upper bound, and not offered.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Literal

from fl_lightning.core.errors import ConfigurationError
from fl_lightning.privacy.accounting.gaussian import gaussian_epsilon, turns_epsilon
from fl_lightning.privacy.accounting.sampling import Sampling

if TYPE_CHECKING:
    from dp_accounting.pld.privacy_loss_distribution import PrivacyLossDistribution

Method = Literal["pld", "rdp"]
# Losses are rounded up to multiples of these: the ε of the fine one is tight to about 1e-5.
_FINE, _QUICK = 1e-4, 1e-3
# Below, losses spread so far that ten times the grid is as tight, relative to ε.
_WIDE = 0.5
# Below, the closed form replaces the PLD of Poisson samples.
_LEAST = 0.2


@dataclass(frozen=True)
class Accountant:
    """ε of rounds that all release alike.

    Args:
        sampling: how cohorts are drawn.
        noise_ratio: standard deviation of the noise over the L2 sensitivity of the sum, ≥ 0: with
            noise z·S it is z / `Sampling.sensitivity`.
        method: ``pld`` or ``rdp``.

    Raises:
        ConfigurationError: where dp-accounting is needed and not installed.

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
        """The method asked for, or RDP where there is no other."""
        return "rdp" if self.sampling.kind == "fixed" else self.method

    def epsilon(self, rounds: int, delta: float, *, quick: bool = False) -> float:
        """Return ε after so many rounds; an upper bound.

        Args:
            rounds: ≥ 0.
            delta: in (0, 1).
            quick: take a coarser grid where there is one: ten times faster, and up to about 0.01
                higher over 10,000 rounds.
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
    """Return the privacy-loss distribution of one Poisson-sampled round."""
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
    with _silenced("absl"):  # it tells of orders that it leaves out: ε stays an upper bound
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
    """Return the largest number of rounds, at most ``limit``, whose ε is within the budget.

    Args:
        epsilon: of a number of rounds, increasing.
        budget: ≥ 0.
        limit: ≥ 0.

    Example:
        >>> most_rounds(lambda rounds: 0.5 * rounds, budget=2.2, limit=100)
        4
    """
    low, step = 0, 1
    while low < limit and epsilon(min(limit, low + step)) <= budget:
        low = min(limit, low + step)
        step *= 2
    high = min(limit, low + step)
    if low == limit:
        return low
    while high - low > 1:  # ε(low) fits, ε(high) does not
        middle = (low + high) // 2
        if epsilon(middle) <= budget:
            low = middle
        else:
            high = middle
    return low
