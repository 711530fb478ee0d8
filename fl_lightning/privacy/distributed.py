"""Distributed differential privacy: clients add shares of the noise, the server sees only the sum.

    client: v = round(clip_S(Δ_k) / step) + Skellam(μ / t)         integers, modulo 2^b
    server: step · (Σ v mod 2^b) / m

With at least t shares the sum has noise of variance at least μ; a round with fewer replies is not
released. With the aggregator SecureMean the server sees only the sum; without it, sums of the same
integers are computed in the clear. Source: Agarwal, Kairouz and Liu 2021 (2110.04995), Algorithm 1.

Skellam noise, Poisson(μ/2) - Poisson(μ/2), is an integer of variance μ; a sum of Skellam noise is
Skellam noise of variance Σμ, exactly. It is drawn by inverting its distribution function on uniform
bits, so that these may come from a cryptographically secure generator. Differs: a table instead of
rejection, with probabilities exact to 2⁻¹²⁷; it ends where the tails have less.

Local differential privacy: every client adds noise before it sends, and trusts nobody.

    client: clip_S(Δ_k) + N(0, (z S)² I)        server: their sum over qN

Clients send multiples of a step, see `Grid`. Updates from a client's data and from any other data
differ by 2 S at most. The server sees which clients are sampled, so there is no amplification by
sampling: a client's ε grows with each round in which it is sampled.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import final

import numpy as np
import torch
from torch import Tensor
from typing_extensions import override

from fl_lightning.core.errors import ConfigurationError, check_range
from fl_lightning.core.seeds import Draw, Integers, Words
from fl_lightning.data.cohorts.cohort import Cohort
from fl_lightning.privacy.accounting.gaussian import ReleaseCost
from fl_lightning.privacy.mechanism import Mechanism, Privacy
from fl_lightning.privacy.noise.grid import (
    CHECKED_TO,
    GRID_COST,
    noisy,
    norm_bound,
    to_integers,
)
from fl_lightning.privacy.private_mean import Release
from fl_lightning.server.protected import NoiseShares

# Smallest standard deviation of a share's noise, in steps, and smallest radius of the ball, in √k.
_FINENESS, _RADIUS = 64.0, 16.0


class DistributedSkellam(Mechanism["DistributedDP"]):
    """Mechanism of `DistributedDP`: every client adds a share of Skellam noise to its integer update."""

    @override
    def __post_init__(self) -> None:
        super().__post_init__()
        shares = self.privacy.min_shares or self.run.fewest_survivors
        self.fewest_replies, self.size = shares or round(self.expected), self.run.num_coordinates

    @property
    @override
    def shares(self) -> NoiseShares:
        return self

    @property
    def radius(self) -> float:
        """Clip norm in integer steps: so many that rounding adds little to noise and sensitivity."""
        radius = _RADIUS * math.sqrt(self.size)
        if self.noise_multiplier > 0:
            fine = _FINENESS * math.sqrt(self.fewest_replies) / self.noise_multiplier
            radius = max(radius, fine)
        return radius

    @property
    def share_variance(self) -> float:
        """Variance of the noise that each client adds to its update, in steps²."""
        return (self.noise_multiplier * self.radius) ** 2 / self.fewest_replies

    @property
    @override
    def noise_per_round(self) -> float:
        return self.noise_multiplier * math.sqrt(self.expected / self.fewest_replies)

    def __str__(self) -> str:
        bits = self.num_bits(math.ceil(self.expected))
        return (
            "unit: client, its data replaced by any other, towards a server that sees sums of "
            f"{self.fewest_replies} clients or more ({bits} bits a number); Skellam, RDP"
        )

    @property
    def release_cost(self) -> ReleaseCost:
        """Sensitivity and noise of the sum that a client's update enters, in integer steps."""
        variance = self.share_variance * self.fewest_replies
        return ReleaseCost(2 * self.radius * self.rounding, variance, self.size)

    def client_release(self, round_index: int, clip_norm: float) -> Release | None:
        """Return the function with which a client rounds its update and adds noise; None without noise."""
        if self.noise_multiplier == 0:
            return None

        def release(delta: Tensor, client: int) -> Tensor:
            whole = self.client_integers(delta, clip_norm, round_index, client)
            return self.decoded(whole, clip_norm, delta)

        return release

    def num_bits(self, num_clients: int) -> int:
        """Return how many bits b hold any sum over ``num_clients``: it is in -2^(b-1) … 2^(b-1) - 1.

        Every coordinate and every share of the noise is bounded, so that there is no exception.
        """
        one = math.ceil(self.radius) + 1 + largest_noise(self.share_variance)
        return (2 * num_clients * one).bit_length()

    def client_integers(
        self, delta: Tensor, clip_norm: float, round_index: int, client: int
    ) -> Integers:
        """Return a client's clipped update, rounded to integers, plus the client's share of the noise."""
        draw = self.source.stream(round_index, client)
        noise = skellam_noise(self.share_variance, len(delta), draw)
        return to_integers(delta, clip_norm, self.step(clip_norm), draw) + noise

    def decoded(self, numbers: Integers, clip_norm: float, like: Tensor) -> Tensor:
        """Convert a sum of integer updates into the units of updates, with the dtype of ``like``."""
        return torch.from_numpy(numbers * self.step(clip_norm)).to(like)

    @property
    def rounding(self) -> float:
        """Factor ≥ 1 by which rounding updates to integers raises the sensitivity."""
        return norm_bound(self.radius, 1.0, self.size) * CHECKED_TO**2 / self.radius

    def step(self, clip_norm: float) -> float:
        """Return the width of one integer step, in the units of updates."""
        return clip_norm / self.radius


@final
@dataclass(frozen=True, kw_only=True)
class DistributedDP(Privacy):
    """Distributed differential privacy: clients add the noise, which suffices if the server sees only sums.

    Neighbours differ in the data of one client, replaced by any other. The server knows which clients
    are sampled, so there is no amplification by sampling: a client's ε grows with each of its rounds.

    Args:
        clip_norm: see `CentralDP`.
        noise_multiplier: standard deviation z of the noise in the sum, in clip norms, ≥ 0.
        epsilon: the budget of the client that is sampled most often.
        delta: see `CentralDP`.
        min_shares: number of replies whose noise suffices, t ≥ 1; a round with fewer stops the run. If
            None, the fewest replies of a secure sum, or without one the size of the cohort; required
            if that varies. Clients that collude with the server contribute no noise.
        secure_noise: see `CentralDP`.
        log_unprotected: log values that clients send outside the sum: metrics and norms.

    Raises:
        ConfigurationError: for values out of range.
    """

    kind = DistributedSkellam
    clients_add_noise = is_for_sums = True

    min_shares: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        check_range("federation.privacy: min_shares", self.min_shares, "at least 1")

    def check_cohort(self, cohort: Cohort) -> None:
        """Raise ConfigurationError if cohorts depend on the run, or vary in size and ``min_shares`` is not set."""
        super().check_cohort(cohort)
        if not cohort.has_fixed_size and self.min_shares is None:
            raise ConfigurationError(
                f"federation.privacy: the size of a {type(cohort).__name__} varies, and with it the noise "
                "that clients add: set min_shares to the smallest number of replies to release"
            )


# with more, a table would have many millions of entries
MOST_VARIANCE = 1e10
# A probability has 63 bits of a first word and 64 of a second one; a table is computed with many more.
_FIRST, _BITS = 63, 127
_GUARD = 256


def skellam_noise(variance: float, size: int, draw: Draw) -> Integers:
    """Draw Skellam noise (difference of two Poisson variables), int64 of shape (size,).

    Args:
        variance: μ, in [0, 1e10].
        size: number of draws.
        draw: source of random words; the noise is a pure function of them.

    Raises:
        ValueError: if the variance is out of range.

    Example:
        >>> generator = np.random.default_rng(0)
        >>> draw = lambda count: generator.integers(0, 2**64, count, dtype=np.uint64)
        >>> noise = skellam_noise(9.0, 100_000, draw)
        >>> noise.dtype, round(float(noise.var()), 1)
        (dtype('int64'), 9.0)
    """
    if not 0 <= variance <= MOST_VARIANCE:
        raise ValueError(
            f"the noise's variance must be in [0, {MOST_VARIANCE:g}] steps², got {variance}: use "
            "coarser steps"
        )
    words = draw(size)
    if variance == 0:
        return np.zeros(size, np.int64)
    first, second = _tail_table(variance)
    uniform = words >> np.uint64(1)
    rising = first[::-1]
    not_above = np.searchsorted(rising, uniform, side="right")
    magnitude = (len(first) - 1 - not_above).astype(np.int64)
    for at in np.flatnonzero(np.searchsorted(rising, uniform, side="left") != not_above):
        magnitude[at] = _decided(first, second, int(magnitude[at]), uniform[at], draw)
    noise: Integers = magnitude * (1 - 2 * (words & np.uint64(1)).astype(np.int64))
    return noise


def _decided(first: Words, second: Words, magnitude: int, uniform: np.uint64, draw: Draw) -> int:
    """Return a noise sample's magnitude, decided by a second random word where the first is ambiguous."""
    more = draw(1)[0]
    beyond = magnitude + 1
    while beyond < len(first) and first[beyond] == uniform and more < second[beyond]:
        beyond += 1
    return beyond - 1


def largest_noise(variance: float) -> int:
    """Return the largest absolute value that `skellam_noise` can draw: the end of its table.

    Example:
        >>> largest_noise(0.0), largest_noise(9.0)
        (0, 52)
    """
    return 0 if variance == 0 else len(_tail_table(variance)[0]) - 1


@lru_cache(maxsize=8)
def _tail_table(variance: float) -> tuple[Words, Words]:
    """Return the table for Skellam draws: tail probabilities of magnitudes, their first 63 bits and next 64."""
    masses = _bessel(variance)
    tails, tail = [], 0
    for mass in reversed(masses):
        tail += mass
        tails.append(tail)
    total = tails[-1]
    scaled = [(tail << _BITS) // total for tail in reversed(tails)]
    scaled = scaled[: next((i for i, tail in enumerate(scaled) if tail == 0), len(scaled))]
    shift = _BITS - _FIRST
    first = np.array([tail >> shift for tail in scaled], np.uint64)
    second = np.array([tail & (1 << shift) - 1 for tail in scaled], np.uint64)
    return first, second


def _bessel(variance: float) -> list[int]:
    """Return Bessel values I_0(μ), 2 I_1(μ), 2 I_2(μ), … times a common factor, by Miller's recurrence.

    I_{i-1} = I_{i+1} + (2i/μ) I_i, from so large an i that the initial values do not matter.
    """
    numerator, denominator = variance.as_integer_ratio()
    size = int(14 * math.sqrt(variance)) + 120
    above, mass, masses = 0, 1 << _GUARD, []
    for i in range(size, 0, -1):
        masses.append(2 * mass)
        above, mass = mass, above + 2 * i * denominator * mass // numerator
    masses.append(mass)
    return masses[::-1]


class LocalGaussian(Mechanism["LocalDP"]):
    """Mechanism of `LocalDP`: every client adds Gaussian noise to its own update."""

    @property
    @override
    def noise_per_round(self) -> float:
        return self.noise_multiplier * math.sqrt(self.expected)

    def __str__(self) -> str:
        return (
            "unit: all updates of a client, its data replaced by any other, also towards the server"
        )

    @property
    def release_cost(self) -> ReleaseCost:
        """L2 sensitivity and noise of a client's single update, in clip norms."""
        return ReleaseCost(2 * GRID_COST, self.noise_multiplier**2)

    def client_release(self, round_index: int, clip_norm: float) -> Release | None:
        """Return the function with which a client adds noise to its update; None without noise."""
        if self.noise_multiplier == 0:
            return None

        def release(delta: Tensor, client: int) -> Tensor:
            draw = self.source.stream(round_index, client)
            return noisy(delta, clip_norm, self.noise_multiplier * clip_norm, draw)

        return release


@final
@dataclass(frozen=True, kw_only=True)
class LocalDP(Privacy):
    """Local differential privacy: protects each client's data from everybody, including the server.

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
        >>> from fl_lightning.privacy.mechanism import AccountedRun
        >>> privacy = LocalDP(clip_norm=1.0, noise_multiplier=10.0)
        >>> run = AccountedRun(AllClients(), num_clients=100, num_rounds=25, seed=0)
        >>> round(privacy.mechanism(run).epsilon(rounds=25), 6)
        4.377178
    """

    kind = LocalGaussian
    clients_add_noise = True
