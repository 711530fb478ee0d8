"""Bases of differential privacy: rules (options), mechanisms (noise and its cost), and the run for accounting.

A rule, such as `CentralDP`, holds what the user sets. Its `mechanism` is made for one run and one noise
multiplier: it draws the noise and knows ε. Without a noise multiplier the rule looks for the smallest one
whose mechanism keeps the run within the budget.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar, Generic, TypeVar

import numpy as np
import numpy.typing as npt
from torch import Tensor
from typing_extensions import override

from fl_lightning.core.errors import ConfigurationError, check_range
from fl_lightning.core.seeds import Draw, Integers
from fl_lightning.core.traits import Trait, Traits
from fl_lightning.data.cohorts.cohort import Cohort
from fl_lightning.data.cohorts.population import ClientIds, Population
from fl_lightning.privacy.accounting.accountant import noise_for_budget
from fl_lightning.privacy.accounting.gaussian import ReleaseCost, composed_epsilon
from fl_lightning.privacy.noise.grid import Grid, wide
from fl_lightning.privacy.noise.noise_source import NoiseSource
from fl_lightning.privacy.private_mean import AdaptiveClip, Release
from fl_lightning.server.protected import NoiseShares

P = TypeVar("P", bound="Budgeted")


@dataclass
class Accounted(ABC, Generic[P]):
    """Base class of privacy mechanisms: a privacy rule applied to one run, with its noise and its cost ε.

    By default rounds are independent, and a client's releases add up without amplification.
    """

    privacy: P  # the rule, with its options
    run: AccountedRun
    noise_multiplier: float  # z, in clip norms
    source: NoiseSource

    def __post_init__(self) -> None:
        """Compute further attributes from the fields."""

    def check(self) -> None:
        """Raise ConfigurationError if this mechanism's noise is impossible in this run."""

    @abstractmethod
    def __str__(self) -> str:
        """Describe the unit of privacy and the sampling, for the log."""

    @property
    @abstractmethod
    def release_cost(self) -> ReleaseCost:
        """Sensitivity and noise of one release (such as a round's sum), in common units, e.g. clip norms."""

    def most_releases(self, rounds: int) -> int:
        """Return to how many releases (such as rounds' sums) any one client contributes at most."""
        return self.run.most_turns(rounds)

    @property
    def amplifies(self) -> bool:
        """True if random sampling that is kept secret lowers ε in this run (amplification)."""
        return False

    def epsilon(self, rounds: int, *, quick: bool = False) -> float:
        """Return ε after ``rounds`` rounds; with ``quick``, a slightly higher bound is computed faster."""
        return self.epsilon_if_known(rounds)

    def epsilon_if_known(self, rounds: int) -> float:
        """Return ε without amplification, for an adversary who knows which clients or examples were sampled."""
        releases = {self.release_cost: self.most_releases(rounds)}
        return composed_epsilon(releases, self.privacy.delta)

    def state_dict(self) -> dict[str, Any]:
        """Return for a checkpoint the state on which later rounds' noise depends."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the state from `state_dict`."""
        assert not state


class Mechanism(Accounted[P]):
    """Base class of client-level privacy mechanisms; by default they add no noise to a round's sum.

    Attributes:
        expected: expected size of the cohort, by which sums are divided.
        fewest_replies: smallest number of replies with enough noise to release the round.
        bits_stddev: standard deviation of the noise on the number of unclipped updates; None
            without a count.
    """

    fewest_replies: int = 0
    bits_stddev: float | None = None

    @override
    def __post_init__(self) -> None:
        self.expected = self.run.expected_cohort

    @property
    def shares(self) -> NoiseShares | None:
        """How clients encode updates as integers that include a share of the noise; None if they do not."""
        return None

    @property
    @abstractmethod
    def noise_per_round(self) -> float:
        """Standard deviation of the noise in a round's sum, for a cohort of expected size, in clip norms."""

    def client_release(self, round_index: int, clip_norm: float) -> Release | None:
        """Return the function with which clients make a clipped update private, or None if the server does."""
        return None

    def server_noise(self, grid: Grid, size: int, draw: Draw) -> Integers:
        """Return the noise that the server adds to a round's sum, as integers in grid steps, shape (size,)."""
        return np.zeros(size, np.int64)

    def released(self, total: Tensor, noise: Tensor) -> Tensor:
        """Return a round's sum of updates with noise, in grid steps, shape (k,), computed from integers only.

        Args:
            total: sum of the clipped updates in steps, int64, shape (k,); 0 in an aborted round.
            noise: noise of the round from `server_noise`; rounds come in order.
        """
        return wide(total + noise)

    def commit(self) -> None:
        """Make the round's released sum final; without this call, the next release replaces it."""


@dataclass(frozen=True, kw_only=True)
class Budgeted:
    """Base class of privacy options, common to client-level and example-level privacy.

    Attributes:
        kind: class of the mechanism.
        clip_norm: largest L2 norm of an update or a gradient after clipping.
        noise_multiplier: z, in clip norms; None if it is computed from the budget.
        epsilon: the budget, or None.
        delta: δ of ε.
        secure_noise: whether noise comes from the operating system's secure generator.
        log_unprotected: whether to log values that the noise does not cover.
    """

    kind: ClassVar[type[Accounted[Any]]]

    clip_norm: float
    noise_multiplier: float | None = None
    epsilon: float | None = None
    delta: float = 1e-5
    secure_noise: bool = True
    log_unprotected: bool = False

    def __post_init__(self) -> None:
        check_range(
            "federation.privacy: clip_norm",
            self.clip_norm,
            "above 0 or inf",
            ": it is the largest L2 norm of a client's update; inf does not clip and protects nobody",
        )
        noise, epsilon = self.noise_multiplier, self.epsilon
        if noise is None and epsilon is None:
            raise ConfigurationError(
                "federation.privacy needs noise_multiplier (noise in clip norms) or epsilon (the budget "
                "that noise is found for), or both: then training stops before the budget is exceeded"
            )
        check_range(
            "federation.privacy: noise_multiplier", noise, "at least 0 clip norms and finite"
        )
        check_range(
            "federation.privacy: epsilon",
            epsilon,
            "above 0 and finite",
            ": leave it out for no budget",
        )
        check_range(
            "federation.privacy: delta",
            self.delta,
            "in (0, 1)",
            ": it is the probability that ε does not hold; well below 1 / number of clients, e.g. 1.0e-5",
        )
        if noise != 0 and self.clip_norm == float("inf"):  # None: noise is to be found
            raise ConfigurationError(
                "federation.privacy: noise is a multiple of clip_norm, which is inf: set clip_norm to a "
                "number, e.g. the median of round/client_update_norm"
            )

    def mechanism(
        self,
        run: AccountedRun,
        source: NoiseSource | None = None,
        noise_multiplier: float | None = None,
    ) -> Any:
        """Return the mechanism that applies these privacy options to a run.

        Args:
            run: the run.
            source: source of the noise; if None, as ``secure_noise`` says.
            noise_multiplier: value of the resumed run; the option, or the least for the budget if None.

        Raises:
            ConfigurationError: if its ε is unknown, or the noise does not fit the run.
        """
        source = NoiseSource(None if self.secure_noise else run.seed) if source is None else source
        noise = self.noise_multiplier if noise_multiplier is None else noise_multiplier
        noise = self.least_noise(run, source) if noise is None else noise
        mechanism = self.kind(self, run, noise, source)
        mechanism.check()
        return mechanism

    def least_noise(self, run: AccountedRun, source: NoiseSource) -> float:
        """Return the smallest noise multiplier with which ε of all planned rounds is within the budget."""
        assert self.epsilon is not None

        def epsilon_of(noise_multiplier: float, *, quick: bool) -> float:
            mechanism = self.kind(self, run, noise_multiplier, source)
            return mechanism.epsilon(run.planned_rounds, quick=quick)

        return noise_for_budget(epsilon_of, self.epsilon)

    def check_cohort(self, cohort: Cohort) -> None:
        """Raise ConfigurationError if ε is unknown for this cohort sampler, e.g. if cohorts depend on the run."""
        check_fixed_in_advance(cohort)


_WAYS = {
    Trait.SINGLE_UPDATES: "use DistributedDP, whose clients add the noise",
    Trait.ONE_MASK: "set per_client of MaskCalibration to false",
}


class Privacy(
    Budgeted, ABC
):  # ABC: jsonargparse takes pure dataclasses for options, not for classes
    """Base class of client-level privacy options, given as ``federation.privacy``: frozen dataclasses.

    Attributes:
        clients_add_noise: whether clients add the noise, so that their updates must not change; else
            the server does.
        is_for_sums: whether clients send integers with a share of the noise, for a sum that hides them.
        adaptive_clip: adaptation of the clip norm; None for a fixed norm.
        min_shares: smallest number of clients whose noise suffices, if the user sets it.
    """

    kind: ClassVar[type[Mechanism[Any]]]
    clients_add_noise: ClassVar[bool] = False
    is_for_sums: ClassVar[bool] = False
    adaptive_clip: AdaptiveClip | None = None
    min_shares: int | None = None

    @property
    def traits(self) -> Traits:
        """Needs of this rule that the rest of a federation must meet, e.g. that noisy updates stay unchanged."""
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


def check_fixed_in_advance(cohort: Cohort) -> None:
    """Raise ConfigurationError if a sampler's cohorts are not fixed in advance but depend on the run."""
    if not cohort.is_fixed_in_advance:
        raise ConfigurationError(
            f"federation.privacy: with {type(cohort).__name__} nobody knows in advance how often a "
            "client is sampled: set federation.cohort to one of AllClients, PoissonCohort, "
            "RoundRobinCohort, UniformCohort"
        )


@dataclass(frozen=True)
class LocalSampling:
    """Poisson sampling in clients' local steps: each example enters a batch independently.

    Example:
        >>> local = LocalSampling(np.array([4, 100]), 10, np.array([2, 2]))
        >>> local.rates, local.expected
        (array([1. , 0.1]), array([ 4, 10]))
    """

    num_examples: npt.NDArray[np.int64]  # number of examples of every client, shape (num_clients,)
    batch_size: int  # expected number of examples in a local step, B ≥ 1, if a client has that many
    # number of local steps of every client per round, shape (num_clients,)
    num_steps: npt.NDArray[np.int64]

    @property
    def rates(self) -> npt.NDArray[np.float64]:
        """Probability that an example is in a local step's batch, min(1, B / n), shape (num_clients,)."""
        return np.minimum(1.0, self.batch_size / np.maximum(self.num_examples, 1))

    @property
    def expected(self) -> npt.NDArray[np.int64]:
        """Expected batch size of each client's local steps, min(B, n), shape (num_clients,)."""
        return np.minimum(self.batch_size, self.num_examples)


@dataclass(frozen=True)
class AccountedRun:
    """Facts about a run that determine its ε, such as cohort sampler and numbers of clients and rounds."""

    cohort: Cohort  # sampler of the cohorts
    num_clients: int  # number of all clients
    num_rounds: int | None  # planned number of rounds; None if there is no end
    seed: int  # seed of the cohorts
    num_coordinates: int = 1  # length k of an update, or an upper bound
    # smallest number of replies for which there is a sum; None if there always is
    fewest_survivors: int | None = None
    local: LocalSampling | None = None  # sampling of the local steps, if the mechanism needs it

    @property
    def planned_rounds(self) -> int:
        """Planned number of rounds of the run.

        Raises:
            ConfigurationError: if there is no end.
        """
        if self.num_rounds is None:
            raise ConfigurationError(
                "federation.privacy: noise can only be fitted to a known number of rounds: set "
                "trainer.max_epochs"
            )
        return self.num_rounds

    @property
    def expected_cohort(self) -> float:
        """Expected number of clients in a round, > 0; it may be fractional."""
        coin = self.cohort.coin
        if coin is not None:
            return coin * self.num_clients
        return float(self.cohort.expected_size(self.num_clients))

    def cohorts(self, num_rounds: int) -> Iterator[ClientIds]:
        """Yield the sampled clients (cohort) of each of the first ``num_rounds`` rounds.

        Raises:
            ConfigurationError: if cohorts depend on events of the run.
        """
        check_fixed_in_advance(self.cohort)
        population = Population(np.ones(self.num_clients, np.int64))
        for index in range(num_rounds):
            yield self.cohort.sample(index, population, self.seed)

    def most_turns(self, rounds: int) -> int:
        """Return how often the most frequent client is sampled in the first ``rounds`` rounds.

        ``rounds`` itself if cohorts depend on events of the run.

        Example:
            >>> from fl_lightning.data.cohorts.weighted_cohorts import RoundRobinCohort
            >>> run = AccountedRun(RoundRobinCohort(size=2), 6, 7, seed=0)
            >>> [run.most_turns(rounds) for rounds in range(8)], run.separation
            ([0, 1, 1, 1, 2, 2, 2, 3], 3)
        """
        if not self.cohort.is_fixed_in_advance:
            return rounds
        if len(self._most) <= rounds:
            counts, most = np.zeros(self.num_clients, np.int64), [0]
            for ids in self.cohorts(max(2 * rounds, self.num_rounds or 0)):
                counts[ids] += 1
                most.append(max(most[-1], int(counts[ids].max(initial=0))))
            self._most[:] = most
        return self._most[rounds]

    @cached_property
    def _most(self) -> list[int]:
        return [0]

    @cached_property
    def separation(self) -> int:
        """Fewest rounds from one sampling of a client to its next; all rounds if no client is sampled twice.

        Raises:
            ConfigurationError: if cohorts depend on events of the run.
        """
        last, found = np.full(self.num_clients, -1, np.int64), self.planned_rounds
        for index, ids in enumerate(self.cohorts(self.planned_rounds)):
            again = ids[last[ids] >= 0]
            found = min(found, int((index - last[again]).min(initial=found)))
            last[ids] = index
        return found
