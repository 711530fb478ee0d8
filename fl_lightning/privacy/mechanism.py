"""What a kind of differential privacy consists of: a description, and its mechanism in a run."""

from __future__ import annotations

from typing import Any, ClassVar, Protocol, runtime_checkable

from torch import Tensor

from fl_lightning.core.errors import ConfigurationError
from fl_lightning.core.traits import Trait, Traits
from fl_lightning.core.whole_numbers import Draw, Integers
from fl_lightning.data.cohorts.cohort import CohortSampler
from fl_lightning.privacy.noise.grid import Grid
from fl_lightning.privacy.noise.noise_source import NoiseSource
from fl_lightning.privacy.private_mean import AdaptiveClip, Release
from fl_lightning.privacy.run import AccountedRun
from fl_lightning.server.protected import NoiseShares
from fl_lightning.updates.clip import check_clip_norm


class Accounted(Protocol):
    """What a run releases, and what that costs.

    Attributes:
        noise_multiplier: z, in clip norms.
    """

    noise_multiplier: float

    @property
    def rounding(self) -> float:
        """By how much rounding to a grid raises what one unit does to the sum; it is in ε."""

    def step(self, clip_norm: float) -> float:
        """Return the width of the grid that released numbers are on."""

    def __str__(self) -> str:
        """Return what is compared, and how it is drawn, for people."""

    def epsilon(self, rounds: int, *, quick: bool = False) -> float:
        """Return ε after so many rounds; ``quick`` allows a slightly higher one."""

    def state_dict(self) -> dict[str, Any]:
        """Return what later rounds depend on."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from there."""


@runtime_checkable
class Amplified(Protocol):
    """A mechanism whose ε may be lower because random draws are secret."""

    @property
    def amplifies(self) -> bool:
        """True if it is, here."""

    def epsilon_if_known(self, rounds: int) -> float:
        """Return ε towards somebody who knows the draws."""


class Mechanism(Accounted, Protocol):
    """The noise on the sums of one run and what it costs.

    Attributes:
        expected: the cohort's size that sums are divided by.
        fewest_replies: with fewer a round has too little noise to be released.
    """

    expected: float
    fewest_replies: int

    @property
    def shares(self) -> NoiseShares | None:
        """What clients send into a secure sum, each with its share of the noise; None for no shares."""

    @property
    def bits_stddev(self) -> float | None:
        """Of the noise on the count of unclipped updates; None where nobody counts."""

    @property
    def noise_per_round(self) -> float:
        """Standard deviation of the noise in a sum of updates, in clip norms."""

    def client_release(self, round_index: int, clip_norm: float) -> Release | None:
        """Return what clients do to clipped updates; None if nothing."""

    def server_noise(self, grid: Grid, size: int, draw: Draw) -> Integers:
        """Return the noise of one round, for the server to add, in whole numbers, shape (size,)."""

    def released(self, total: Tensor, noise: Tensor) -> Tensor:
        """Return the sum with noise, in steps, shape (k,); it follows from whole numbers alone.

        Args:
            total: clipped updates' sum in steps, int64, shape (k,); 0 in a round that was broken off.
            noise: of the round, see `server_noise`; each is asked for once, in order.
        """


class Budgeted(Protocol):
    """What every kind of privacy says of itself; frozen."""

    @property
    def clip_norm(self) -> float:
        """L2 norm that updates, or gradients, are clipped to."""

    @property
    def noise_multiplier(self) -> float | None:
        """z, in clip norms; None where it is found for the budget."""

    @property
    def epsilon(self) -> float | None:
        """The budget; None for none."""

    @property
    def delta(self) -> float:
        """δ of ε."""

    @property
    def secure_noise(self) -> bool:
        """Whether noise comes from the operating system's secure generator."""

    @property
    def log_unprotected(self) -> bool:
        """Whether to log what the noise does not cover."""

    def check_cohort(self, cohort: CohortSampler) -> None:
        """Refuse cohorts that it cannot account for."""


@runtime_checkable
class Privacy(Budgeted, Protocol):
    """Privacy of clients as a user asks for it: ``federation.privacy``; frozen.

    A class of your own derives from `ClientPrivacy`, which has what most kinds say of themselves.
    """

    @property
    def adaptive_clip(self) -> AdaptiveClip | None:
        """How the clip norm moves; None if it does not."""

    @property
    def min_shares(self) -> int | None:
        """The fewest clients whose noise is enough together, where the user says so."""

    @property
    def clients_add_noise(self) -> bool:
        """Whether clients add the noise, so that nothing may change what they send; else the server."""

    @property
    def is_for_sums(self) -> bool:
        """Whether clients send whole numbers with a share of the noise, for a sum that hides them."""

    @property
    def traits(self) -> Traits:
        """Traits of this part."""

    def mechanism(
        self, run: AccountedRun, source: NoiseSource, noise_multiplier: float | None = None
    ) -> Mechanism:
        """Return the mechanism of a run.

        Args:
            run: the run.
            source: of noise that clients draw.
            noise_multiplier: what the run that is resumed had; found anew if None.

        Raises:
            ConfigurationError: if it cannot be accounted for.
        """


_WAYS = {
    Trait.SINGLE_UPDATES: "use DistributedDP, whose clients add the noise",
    Trait.ONE_MASK: "set per_client of MaskCalibration to false",
}


class ClientPrivacy:
    """What a kind of privacy of clients says of itself; it gives what is different.

    Attributes:
        clients_add_noise: see `Privacy`.
        is_for_sums: see `Privacy`.
    """

    clients_add_noise: ClassVar[bool] = False
    is_for_sums: ClassVar[bool] = False

    @property
    def traits(self) -> Traits:
        """A mean of clipped updates, which nothing changes once they are noisy."""
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
        """The clip norm is fixed."""
        return None

    @property
    def noise_multiplier(self) -> float | None:
        """Noise is found for the budget."""
        return None

    @property
    def min_shares(self) -> int | None:
        """Noise is not shared."""
        return None


def check_options(
    clip_norm: float, noise_multiplier: float | None, epsilon: float | None, delta: float
) -> None:
    """Refuse values that no mechanism can have.

    Raises:
        ConfigurationError: naming the first of them.
    """
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
            f"federation.privacy: delta must be in (0, 1), got {delta}: it is the chance that ε "
            "does not hold; well below 1 / number of clients, e.g. 1.0e-5"
        )
    if noise_multiplier != 0 and clip_norm == float("inf"):  # None: noise is to be found
        raise ConfigurationError(
            "federation.privacy: noise is a multiple of clip_norm, which is inf: set clip_norm to a "
            "number, e.g. the median of round/client_update_norm"
        )
