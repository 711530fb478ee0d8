"""Distributed differential privacy: clients add shares of the noise, the server sees only the sum.

    client: v = round(clip_S(Δ_k) / step) + Skellam(μ / t)         whole numbers, modulo 2^b
    server: step · (Σ v mod 2^b) / m

With t shares or more the sum has noise of variance μ at least, so that a round with fewer replies
is not released. Skellam noise adds up to Skellam noise exactly. With the aggregator SecureMean the
server sees only the sum; without it sums are taken in the clear, of the same numbers.
Source: Agarwal, Kairouz and Liu 2021 (2110.04995), Algorithm 1.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, final

import numpy as np
from torch import Tensor

from fl_lightning.core.errors import ConfigurationError
from fl_lightning.core.whole_numbers import Draw, Integers
from fl_lightning.data.cohorts.cohort import CohortSampler, as_cohort
from fl_lightning.privacy.accounting.composition import ReleaseCost, composed_epsilon
from fl_lightning.privacy.accounting.noise_for_budget import noise_for_budget
from fl_lightning.privacy.mechanism import ClientPrivacy, Mechanism, check_options
from fl_lightning.privacy.noise.grid import Grid, wide
from fl_lightning.privacy.noise.integer_vector import (
    CHECKED_TO,
    from_integers,
    norm_bound,
    to_integers,
)
from fl_lightning.privacy.noise.noise_source import NoiseSource
from fl_lightning.privacy.noise.skellam_noise import largest_noise, skellam_noise
from fl_lightning.privacy.private_mean import Release
from fl_lightning.privacy.run import AccountedRun, Participation, check_fixed_in_advance

# A share's noise has this standard deviation in steps at least, and the ball this radius in √k.
_FINENESS, _RADIUS = 64.0, 16.0


@dataclass(frozen=True)
class IntegerCode:
    """How a clipped update becomes noisy whole numbers.

    Attributes:
        radius: the clip norm in steps, R.
        share_variance: of each client's noise, in steps².
    """

    radius: float
    share_variance: float

    def encode(self, delta: Tensor, clip_norm: float, draw: Draw) -> Integers:
        """Return what a client puts into the sum, shape (k,).

        Args:
            delta: of norm ≤ ``clip_norm``, shape (k,).
            clip_norm: S.
            draw: gives random words.
        """
        noise = skellam_noise(self.share_variance, len(delta), draw)
        return to_integers(delta, clip_norm, clip_norm / self.radius, draw) + noise

    def decode(self, numbers: Integers, clip_norm: float, like: Tensor) -> Tensor:
        """Return the sum that the whole numbers stand for, with the dtype of ``like``."""
        return from_integers(numbers, clip_norm / self.radius, like)

    def num_bits(self, num_clients: int) -> int:
        """Return b for which no sum over so many clients leaves -2^(b-1) … 2^(b-1) - 1.

        Every coordinate and every share of the noise is bounded, so that it holds without exception.
        """
        one = math.ceil(self.radius) + 1 + largest_noise(self.share_variance)
        return (2 * num_clients * one).bit_length()


@final
@dataclass(frozen=True, kw_only=True)
class DistributedDP(ClientPrivacy):
    """Protects each client from everybody, as long as the server sees only the sum of updates.

    Compared are a client's data and any other. The server knows who takes part, so that sampling
    amplifies nothing: a client pays for each of its turns.

    Args:
        clip_norm: as of `CentralDP`.
        noise_multiplier: standard deviation z of the noise in the sum, in clip norms, ≥ 0.
        epsilon: the budget of the client with the most turns.
        delta: as of `CentralDP`.
        min_shares: so many replies have enough noise together, t ≥ 1: a round with fewer stops the
            run. If None, as many as a secure sum has at least, or without one the cohort's size; to
            be given where that varies. Clients who tell the server their noise are none of them.
        secure_noise: as of `CentralDP`.
        log_unprotected: log what clients send outside the sum: metrics and norms.

    Raises:
        ConfigurationError: for values out of range.
    """

    clients_add_noise = is_for_sums = True

    clip_norm: float
    noise_multiplier: float | None = None
    epsilon: float | None = None
    delta: float = 1e-5
    min_shares: int | None = None
    secure_noise: bool = True
    log_unprotected: bool = False

    def __post_init__(self) -> None:
        check_options(self.clip_norm, self.noise_multiplier, self.epsilon, self.delta)
        if self.min_shares is not None and self.min_shares < 1:
            raise ConfigurationError(
                f"federation.privacy: min_shares must be at least 1, got {self.min_shares}"
            )

    def check_cohort(self, cohort: CohortSampler) -> None:
        """Refuse cohorts that depend on what happens in the run."""
        check_fixed_in_advance(cohort)
        if not as_cohort(cohort).has_fixed_size and self.min_shares is None:
            raise ConfigurationError(
                f"federation.privacy: the size of a {type(cohort).__name__} varies, and with it the noise "
                "that clients add: set min_shares to the fewest replies that shall be released"
            )

    def mechanism(
        self, run: AccountedRun, source: NoiseSource, noise_multiplier: float | None = None
    ) -> Mechanism:
        """Return the clients' mechanism."""
        turns = run.participation()
        shares = self.min_shares or run.fewest_survivors or round(run.expected_cohort)
        noise = self.noise_multiplier if noise_multiplier is None else noise_multiplier

        def made(noise_multiplier: float) -> DistributedSkellam:
            return DistributedSkellam(
                source,
                turns,
                self.delta,
                noise_multiplier,
                run.expected_cohort,
                fewest_replies=shares,
                size=run.num_coordinates,
            )

        def epsilon_of(noise_multiplier: float, *, quick: bool) -> float:
            return made(noise_multiplier).epsilon(run.planned_rounds)

        if noise is None:
            assert self.epsilon is not None
            noise = noise_for_budget(epsilon_of, self.epsilon)
        return made(noise)


@dataclass
class DistributedSkellam:
    """Shares of Skellam noise; `Mechanism` says what its parts are."""

    source: NoiseSource
    turns: Participation
    delta: float
    noise_multiplier: float
    expected: float
    fewest_replies: int
    size: int
    bits_stddev: None = None

    @property
    def shares(self) -> DistributedSkellam:
        """Itself."""
        return self

    @property
    def code(self) -> IntegerCode:
        """The grid: fine against the noise of a share, and against rounding k numbers."""
        shares, noise = self.fewest_replies, self.noise_multiplier
        radius = _RADIUS * math.sqrt(self.size)
        if noise > 0:
            radius = max(radius, _FINENESS * math.sqrt(shares) / noise)
        return IntegerCode(radius, (noise * radius) ** 2 / shares)

    @property
    def noise_per_round(self) -> float:
        """Of the sum over an expected cohort."""
        return self.noise_multiplier * math.sqrt(self.expected / self.fewest_replies)

    def __str__(self) -> str:
        bits = self.code.num_bits(math.ceil(self.expected))
        return (
            "unit: client, its data replaced by any other, towards a server that sees sums of "
            f"{self.fewest_replies} clients or more ({bits} bits a number); "
            f"{self.turns.most[-1]} turns in {len(self.turns.most) - 1} rounds; Skellam, RDP"
        )

    def epsilon(self, rounds: int, *, quick: bool = False) -> float:
        """Return the largest ε of a client after so many of the run's rounds."""
        return composed_epsilon({self.release_cost: int(self.turns.most[rounds])}, self.delta)

    @property
    def release_cost(self) -> ReleaseCost:
        """What one turn costs a client, in steps."""
        code, shares = self.code, self.fewest_replies
        return ReleaseCost(2 * code.radius * self.rounding, code.share_variance * shares, self.size)

    def client_release(self, round_index: int, clip_norm: float) -> Release | None:
        """Return what clients put into the sum, as the numbers that it stands for."""
        if self.noise_multiplier == 0:
            return None

        def release(delta: Tensor, client: int) -> Tensor:
            whole = self.client_integers(delta, clip_norm, round_index, client)
            return self.decoded(whole, clip_norm, delta)

        return release

    def num_bits(self, num_clients: int) -> int:
        """Return b for which no sum of so many clients wraps round modulo 2^b."""
        return self.code.num_bits(num_clients)

    def client_integers(
        self, delta: Tensor, clip_norm: float, round_index: int, client: int
    ) -> Integers:
        """Return what a client sends of its clipped update."""
        return self.code.encode(delta, clip_norm, self.source.stream(round_index, client))

    def decoded(self, numbers: Integers, clip_norm: float, like: Tensor) -> Tensor:
        """Return the sum that whole numbers stand for."""
        return self.code.decode(numbers, clip_norm, like)

    @property
    def rounding(self) -> float:
        """By how much rounding raises what a client does to the sum."""
        return norm_bound(self.code.radius, 1.0, self.size) * CHECKED_TO**2 / self.code.radius

    def step(self, clip_norm: float) -> float:
        """Return the width of the grid."""
        return clip_norm / self.code.radius

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
