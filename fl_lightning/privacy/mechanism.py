"""Protocols and bases of differential privacy: its options, and its mechanism in a run."""

from __future__ import annotations

from typing import Any, ClassVar, Protocol, runtime_checkable

import numpy as np
from torch import Tensor

from fl_lightning.core.errors import ConfigurationError
from fl_lightning.core.traits import Trait, Traits
from fl_lightning.core.whole_numbers import Draw, Integers
from fl_lightning.data.cohorts.cohort import Cohort
from fl_lightning.privacy.noise.grid import GRID_COST, Grid, wide
from fl_lightning.privacy.noise.noise_source import NoiseSource
from fl_lightning.privacy.private_mean import AdaptiveClip, Release
from fl_lightning.privacy.run import AccountedRun, check_fixed_in_advance
from fl_lightning.server.protected import NoiseShares
from fl_lightning.updates.clip import check_clip_norm


class Accounted(Protocol):
    """The releases of a run and their ε.

    Attributes:
        noise_multiplier: z, in clip norms.
    """

    noise_multiplier: float

    @property
    def rounding(self) -> float:
        """Factor ≥ 1 by which rounding to a grid raises the sensitivity; ε includes it."""

    def step(self, clip_norm: float) -> float:
        """Return the step width of the grid of released numbers."""

    def __str__(self) -> str:
        """Describe the unit of privacy and the sampling, for the log."""

    def epsilon(self, rounds: int, *, quick: bool = False) -> float:
        """Return ε after ``rounds`` rounds; ``quick`` allows a slightly higher one."""

    def state_dict(self) -> dict[str, Any]:
        """Return the state that later rounds depend on."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the state from `state_dict`."""


@runtime_checkable
class Amplified(Protocol):
    """A mechanism whose ε may be lower because random draws are secret (amplification)."""

    @property
    def amplifies(self) -> bool:
        """True if secret draws lower ε in this run."""

    def epsilon_if_known(self, rounds: int) -> float:
        """Return ε against an adversary who knows the draws."""


class Mechanism(Accounted, Protocol):
    """The noise on the sums of one run, with its ε.

    Attributes:
        expected: expected size of the cohort, by which sums are divided.
        fewest_replies: smallest number of replies with enough noise to release the round.
    """

    expected: float
    fewest_replies: int

    @property
    def shares(self) -> NoiseShares | None:
        """Encoder of clients' updates as integers with shares of the noise, or None for no shares."""

    @property
    def bits_stddev(self) -> float | None:
        """Standard deviation of the noise on the number of unclipped updates; None without a count."""

    @property
    def noise_per_round(self) -> float:
        """Standard deviation of the noise in a sum of updates, in clip norms."""

    def client_release(self, round_index: int, clip_norm: float) -> Release | None:
        """Return the function that clients apply to clipped updates, or None."""

    def server_noise(self, grid: Grid, size: int, draw: Draw) -> Integers:
        """Return the noise that the server adds in one round, integers of shape (size,)."""

    def released(self, total: Tensor, noise: Tensor) -> Tensor:
        """Return the sum with noise, in steps, shape (k,); it depends on integers alone.

        Args:
            total: sum of the clipped updates in steps, int64, shape (k,); 0 in an aborted round.
            noise: noise of the round from `server_noise`, requested once per round, in order.
        """


class MechanismDefaults:
    """Base of mechanisms with a grid for clip norms, no shares of noise, and no state.

    Attributes:
        fewest_replies: see `Mechanism`.
        num_coordinates: length k of an update.
    """

    fewest_replies: int = 0
    num_coordinates: int = 1

    @property
    def shares(self) -> NoiseShares | None:
        """None: the noise is not shared."""
        return None

    @property
    def bits_stddev(self) -> float | None:
        """None: unclipped updates are not counted."""
        return None

    @property
    def rounding(self) -> float:
        """Factor by which rounding raises the sensitivity."""
        return GRID_COST

    def step(self, clip_norm: float) -> float:
        """Return the step width of the grid."""
        return Grid.of(clip_norm, self.num_coordinates).step

    def client_release(self, round_index: int, clip_norm: float) -> Release | None:
        """Return None: clients add no noise."""
        return None

    def server_noise(self, grid: Grid, size: int, draw: Draw) -> Integers:
        """Return zeros: the server adds no noise."""
        return np.zeros(size, np.int64)

    def released(self, total: Tensor, noise: Tensor) -> Tensor:
        """Return the sum with the noise."""
        return wide(total + noise)

    def state_dict(self) -> dict[str, Any]:
        """Return nothing: rounds are independent."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore nothing: rounds are independent."""


class Budgeted(Protocol):
    """Options of every kind of privacy; frozen."""

    @property
    def clip_norm(self) -> float:
        """Largest L2 norm of an update or a gradient after clipping."""

    @property
    def noise_multiplier(self) -> float | None:
        """z, in clip norms; None if it is computed from the budget."""

    @property
    def epsilon(self) -> float | None:
        """The budget, or None."""

    @property
    def delta(self) -> float:
        """δ of ε."""

    @property
    def secure_noise(self) -> bool:
        """True if noise comes from the operating system's secure generator."""

    @property
    def log_unprotected(self) -> bool:
        """True to log values that the noise does not cover."""

    def check_cohort(self, cohort: Cohort) -> None:
        """Raise ConfigurationError if ε of this cohort sampler is unknown."""


@runtime_checkable
class Privacy(Budgeted, Protocol):
    """Options of client-level privacy, ``federation.privacy``; frozen.

    A class of your own derives from `ClientPrivacy`, which has defaults of most members.
    """

    @property
    def adaptive_clip(self) -> AdaptiveClip | None:
        """Adaptation of the clip norm; None for a fixed norm."""

    @property
    def min_shares(self) -> int | None:
        """Smallest number of clients whose noise suffices, if the user sets it."""

    @property
    def clients_add_noise(self) -> bool:
        """True if clients add the noise, so that their updates must not change; else the server."""

    @property
    def is_for_sums(self) -> bool:
        """True if clients send integers with a share of the noise, for a sum that hides them."""

    @property
    def traits(self) -> Traits:
        """Traits of this part."""

    def mechanism(
        self, run: AccountedRun, source: NoiseSource, noise_multiplier: float | None = None
    ) -> Mechanism:
        """Return the mechanism of a run.

        Args:
            run: the run.
            source: source of the clients' noise.
            noise_multiplier: value of the resumed run; computed if None.

        Raises:
            ConfigurationError: if its ε is unknown.
        """


_WAYS = {
    Trait.SINGLE_UPDATES: "use DistributedDP, whose clients add the noise",
    Trait.ONE_MASK: "set per_client of MaskCalibration to false",
}


class ClientPrivacy:
    """Base of client-level privacy, with defaults for a fixed clip norm and cohorts known in advance.

    Attributes:
        clients_add_noise: see `Privacy`.
        is_for_sums: see `Privacy`.
    """

    clients_add_noise: ClassVar[bool] = False
    is_for_sums: ClassVar[bool] = False

    @property
    def traits(self) -> Traits:
        """Traits; noisy updates must not change on their way."""
        needs = {Trait.PRIVATE_CLIENTS: "proves its ε for the mean of clipped updates"}
        if self.clients_add_noise:
            needs[Trait.UNCHANGED_UPDATES] = (
                "has clients send noisy numbers, accounted as they send them"
            )
        if not self.is_for_sums:
            needs[Trait.SINGLE_UPDATES] = "is not made for sums of whole numbers"
        needs[Trait.ONE_MASK] = (
            "averages updates over all clients, and a client's own mask tells of its data"
        )
        return Traits(needs, {}, _WAYS)

    @property
    def adaptive_clip(self) -> AdaptiveClip | None:
        """None: the clip norm is fixed."""
        return None

    @property
    def noise_multiplier(self) -> float | None:
        """None: the noise is computed from the budget."""
        return None

    @property
    def min_shares(self) -> int | None:
        """None: the noise is not shared."""
        return None

    def check_cohort(self, cohort: Cohort) -> None:
        """Raise ConfigurationError if cohorts depend on events of the run."""
        check_fixed_in_advance(cohort)


def check_options(
    clip_norm: float, noise_multiplier: float | None, epsilon: float | None, delta: float
) -> None:
    """Raise ConfigurationError if an option that all mechanisms have is out of range."""
    check_clip_norm(clip_norm)
    if noise_multiplier is None and epsilon is None:
        raise ConfigurationError(
            "federation.privacy needs noise_multiplier (noise in clip norms) or epsilon (the budget "
            "that noise is found for), or both: then training stops before the budget is exceeded"
        )
    if noise_multiplier is not None and not 0 <= noise_multiplier < float("inf"):
        raise ConfigurationError(
            "federation.privacy: noise_multiplier must be a number of clip norms, at least 0, got "
            f"{noise_multiplier}"
        )
    if epsilon is not None and not 0 < epsilon < float("inf"):
        raise ConfigurationError(
            f"federation.privacy: epsilon must be above 0 and finite, got {epsilon}: leave it out "
            "for no budget"
        )
    if not 0 < delta < 1:
        raise ConfigurationError(
            f"federation.privacy: delta must be in (0, 1), got {delta}: it is the probability that ε "
            "does not hold; well below 1 / number of clients, e.g. 1.0e-5"
        )
    if noise_multiplier != 0 and clip_norm == float("inf"):  # None: noise is to be found
        raise ConfigurationError(
            "federation.privacy: noise is a multiple of clip_norm, which is inf: set clip_norm to a "
            "number, e.g. the median of round/client_update_norm"
        )
