"""Differential privacy of examples: every client trains by DP-SGD on its own shard.

    local step:  g = (Σ_{i in batch} clip_S(∇ℓ_i) + N(0, (z S)² I)) / min(B, n)

Gradients of examples are rounded to a grid, summed in whole numbers and given whole noise, see `Grid`.
Each example is in the batch by a coin of its own, of chance q = min(1, B / n), so that a step is one
release of the Poisson-sampled Gaussian mechanism; a client's n examples pay for all local steps of
all rounds in which it took part. What a client sends follows from its noisy steps, so that it is
protected from the server as well, and clients do not add up: their examples are different ones.
Source: Abadi et al. 2016 (1607.00133), Algorithm 1, with accounting by privacy-loss distributions.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from hashlib import blake2b
from typing import Any, final

import numpy as np
import numpy.typing as npt

from fl_lightning.core.errors import ConfigurationError
from fl_lightning.core.traits import Trait, Traits
from fl_lightning.data.cohorts.cohort import CohortSampler
from fl_lightning.privacy.accounting.accountant import (
    Accountant,
    Method,
    Sampling,
    noise_for_budget,
)
from fl_lightning.privacy.accounting.gaussian import gaussian_epsilon
from fl_lightning.privacy.mechanism import check_options
from fl_lightning.privacy.noise.grid import GRID_COST, Grid
from fl_lightning.privacy.run import AccountedRun, LocalSampling, check_fixed_in_advance

# Of a client, (examples n, expected batch, steps): what its ε depends on.
Work = tuple[int, int, int]

_TRAITS = Traits(
    needs={
        Trait.PRIVATE_EXAMPLES: "pays for noisy steps alone",
        Trait.RETURNED_LOSS: "makes every gradient private ahead of its step",
        Trait.SIMULATION: "is simulated only",
        Trait.ONE_MASK: "does not count what a client's own mask tells of its data",
    },
    instead={
        Trait.RETURNED_LOSS: "use the privacy of clients, such as CentralDP",
        Trait.SIMULATION: "use LocalDP, whose noise clients add at their site, or CentralDP, whose server is "
        "trusted",
        Trait.ONE_MASK: "set per_client of MaskCalibration to false",
    },
)


@final
@dataclass(frozen=True, kw_only=True)
class ExampleDP:
    """Protects each single example from everybody, the server included, by DP-SGD in the clients.

    Compared are two shards of one client that differ in one example, added or removed; how many
    examples a client has is taken for known. The server knows who takes part, so that the sampling
    of clients amplifies nothing: a client pays for each of its turns. ε is that of the client that
    pays most.

    Args:
        clip_norm: largest L2 norm S of one example's gradient, over all numbers that train, > 0.
        noise_multiplier: standard deviation z of the noise on a step's sum, in clip norms, ≥ 0.
        epsilon: the budget. Without ``noise_multiplier`` the noise is found that spends it in the
            run's rounds; with it, no round runs that would exceed it.
        delta: chance that ε does not hold; below 1 / examples of a client.
        accountant: ``pld``, or ``rdp``, which gives a larger ε.
        secure_noise: draw noise and batches from the operating system's secure generator, as of
            `CentralDP`.
        log_unprotected: log what no noise covers: training loss and metrics, the norms of updates,
            how many gradients were clipped, who was skipped. If false, none of it is logged.

    Raises:
        ConfigurationError: for values out of range.

    Example:
        >>> from fl_lightning.data.cohorts.cohort import AllClients
        >>> local = LocalSampling(np.array([100, 200]), 10, np.array([20, 20]))
        >>> run = AccountedRun(AllClients(), num_clients=2, num_rounds=5, seed=0, local=local)
        >>> example = ExampleDP(clip_norm=1.0, noise_multiplier=2.0).mechanism(run)
        >>> round(example.epsilon(rounds=5), 3)
        2.337
    """

    clip_norm: float
    noise_multiplier: float | None = None
    epsilon: float | None = None
    delta: float = 1e-5
    accountant: Method = "pld"
    secure_noise: bool = True
    log_unprotected: bool = False

    def __post_init__(self) -> None:
        check_options(self.clip_norm, self.noise_multiplier, self.epsilon, self.delta)

    @property
    def traits(self) -> Traits:
        """Local steps that are clipped sums and noise, of which every one is counted."""
        return _TRAITS

    @property
    def is_off(self) -> bool:
        """Whether there is neither clipping nor noise."""
        return self.clip_norm == float("inf") and self.noise_multiplier == 0

    def check_cohort(self, cohort: CohortSampler) -> None:
        """Refuse cohorts that depend on what happens in the run."""
        check_fixed_in_advance(cohort)

    def mechanism(
        self, run: AccountedRun, noise_multiplier: float | None = None
    ) -> ExampleGaussian:
        """Return what the clients of a run release.

        Args:
            run: with how clients draw their batches.
            noise_multiplier: what the run that is resumed had; found anew if None.
        """
        noise = self.noise_multiplier if noise_multiplier is None else noise_multiplier
        if noise is None:
            assert self.epsilon is not None
            noise = self._noise(run, self.epsilon)
        return ExampleGaussian(run, self.delta, noise, self.accountant)

    def _noise(self, run: AccountedRun, budget: float) -> float:
        """Return the least noise that keeps the client that pays most within the budget."""
        rounds, noise = run.planned_rounds, 1.0
        while True:
            made = ExampleGaussian(run, self.delta, noise, self.accountant)
            hardest = made.hardest(rounds)

            def epsilon_of(noise_multiplier: float, *, quick: bool, work: Work = hardest) -> float:
                return _epsilon(work, noise_multiplier, self.delta, self.accountant, quick)

            noise = noise_for_budget(epsilon_of, budget)
            made = ExampleGaussian(run, self.delta, noise, self.accountant)
            if made.hardest(rounds) == hardest or made.epsilon(rounds) <= budget:
                return noise


@dataclass
class ExampleGaussian:
    """What the examples of a run's clients pay; `Accounted` says what its parts are."""

    run: AccountedRun
    delta: float
    noise_multiplier: float
    method: Method = "pld"
    rounding: float = GRID_COST
    local: LocalSampling = field(init=False)

    def __post_init__(self) -> None:
        if self.run.local is None:
            raise ConfigurationError(
                "ExampleDP accounts for local steps, and the run tells of none"
            )
        self.local = self.run.local

    def step(self, clip_norm: float) -> float:
        """Return the width of the grid."""
        return Grid.of(clip_norm, self.run.num_coordinates).step

    @cached_property
    def _cohorts(self) -> list[npt.NDArray[np.int64]]:
        return []

    def turns(self, rounds: int) -> npt.NDArray[np.int64]:
        """Return how often each client takes part in the first rounds, shape (num_clients,)."""
        if len(self._cohorts) < rounds:
            ahead = max(rounds, self.run.num_rounds or 0)
            self._cohorts[:] = self.run.cohorts(ahead)
        ids = np.concatenate([np.empty(0, np.int64), *self._cohorts[:rounds]])
        return np.bincount(ids, minlength=self.run.num_clients)

    def work(self, rounds: int) -> list[Work]:
        """Return those clients' work of which one pays most, after so many rounds.

        ε rises with the sampling rate and with the steps: whoever has less of both than another
        client is left out.
        """
        local = self.local
        has_any = local.num_examples > 0
        steps, rates = self.turns(rounds) * local.num_steps * has_any, local.rates
        hardest, most = [], 0
        for client in np.lexsort((-steps, -rates)).tolist():
            if steps[client] > most:
                most = int(steps[client])
                n, expected = int(local.num_examples[client]), int(local.expected[client])
                hardest.append((n, expected, most))
        return hardest

    def hardest(self, rounds: int) -> Work:
        """Return the work of the client that pays most."""
        work = self.work(rounds) or [(1, 1, 0)]
        if len(work) == 1:
            return work[0]
        return max(work, key=lambda one: self._epsilon(one, quick=True))

    def epsilon(self, rounds: int, *, quick: bool = False) -> float:
        """Return the largest ε of an example after so many of the run's rounds."""
        return max((self._epsilon(one, quick=quick) for one in self.work(rounds)), default=0.0)

    def _epsilon(self, work: Work, *, quick: bool) -> float:
        return _epsilon(work, self.noise_multiplier, self.delta, self.method, quick)

    @property
    def amplifies(self) -> bool:
        """True if batches are samples."""
        return bool((self.local.rates < 1).any())

    def epsilon_if_known(self, rounds: int) -> float:
        """Return ε of an example that is in every batch of its client, which is the most there may be."""
        has_any = self.local.num_examples > 0
        steps = int((self.turns(rounds) * self.local.num_steps * has_any).max(initial=0))
        ratio = self.noise_multiplier / GRID_COST
        return gaussian_epsilon(ratio / math.sqrt(steps), self.delta) if steps else 0.0

    @property
    def noise_of_gradients(self) -> float:
        """Largest standard deviation of a client's gradient's noise, in clip norms."""
        expected = self.local.expected
        return self.noise_multiplier / max(1, int(expected[expected > 0].min(initial=1 << 62)))

    def __str__(self) -> str:
        local = self.local
        n, steps = local.num_examples, local.num_steps
        digest = blake2b(np.stack([n, steps]).tobytes(), digest_size=4).hexdigest()
        return (
            "unit: example, one of a client's added or removed, also towards the server; Poisson "
            f"batches of {local.batch_size} from {_span(n)} examples, {_span(steps)} local steps "
            f"({digest}); {self.method.upper()}"
        )

    def state_dict(self) -> dict[str, Any]:
        """Return nothing."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Nothing depends on earlier rounds."""


def _span(numbers: npt.NDArray[np.int64]) -> str:
    low, high = int(numbers.min()), int(numbers.max())
    return f"{low}" if low == high else f"{low} to {high}"


@lru_cache(maxsize=4096)
def _epsilon(
    work: Work, noise_multiplier: float, delta: float, method: Method, quick: bool
) -> float:
    num_examples, expected, steps = work
    kind = "all" if expected == num_examples else "poisson"
    accountant = Accountant(
        Sampling(kind, num_examples, float(expected)),  # type: ignore[arg-type]
        noise_multiplier / GRID_COST,
        method,
    )
    return accountant.epsilon(steps, delta, quick=quick)
