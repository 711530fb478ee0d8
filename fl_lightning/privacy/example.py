"""Example-level differential privacy: every client trains by DP-SGD on its own shard.

    local step:  g = (Σ_{i in batch} clip_S(∇ℓ_i) + N(0, (z S)² I)) / min(B, n)

Gradients of examples are rounded to a grid and summed as integers, with integer noise, see `Grid`.
Each example is sampled independently with probability q = min(1, B / n), so that a step is one
release of the Poisson-sampled Gaussian mechanism; the ε of a client's n examples covers all local
steps of all its rounds. A client's update is a function of its noisy steps, so it is protected from the
server as well. Clients do not add up, because their examples differ.
Source: Abadi et al. 2016 (1607.00133), Algorithm 1, with accounting by privacy-loss distributions.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, lru_cache
from hashlib import blake2b
from typing import final

import numpy as np
import numpy.typing as npt
from typing_extensions import override

from fl_lightning.core.errors import ConfigurationError
from fl_lightning.core.traits import Trait, Traits
from fl_lightning.privacy.accounting.accountant import (
    Accountant,
    Method,
    Sampling,
    noise_for_budget,
)
from fl_lightning.privacy.accounting.gaussian import ReleaseCost
from fl_lightning.privacy.mechanism import Accounted, AccountedRun, Budgeted
from fl_lightning.privacy.noise.grid import GRID_COST
from fl_lightning.privacy.noise.noise_source import NoiseSource

# (examples n, expected batch size, steps) of a client, which determine its ε.
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


class ExampleGaussian(Accounted["ExampleDP"]):
    """Computes ε of DP-SGD in clients' local steps, for all clients of a run."""

    @override
    def __post_init__(self) -> None:
        if self.run.local is None:
            raise ConfigurationError(
                "ExampleDP accounts for local steps, and the run has no information about them"
            )
        self.local = self.run.local

    @cached_property
    def _cohorts(self) -> list[npt.NDArray[np.int64]]:
        return []

    def turns(self, rounds: int) -> npt.NDArray[np.int64]:
        """Return how often each client is sampled in the first ``rounds`` rounds, shape (num_clients,)."""
        if len(self._cohorts) < rounds:
            ahead = max(rounds, self.run.num_rounds or 0)
            self._cohorts[:] = self.run.cohorts(ahead)
        ids = np.concatenate([np.empty(0, np.int64), *self._cohorts[:rounds]])
        return np.bincount(ids, minlength=self.run.num_clients)

    def work(self, rounds: int) -> list[Work]:
        """List (examples, expected batch size, local steps) of those clients that may have the largest ε.

        ε rises with the sampling rate and with the number of steps: clients with less of both than
        another client are left out.
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
        """Return (examples, expected batch size, local steps) of the client with the largest ε."""
        work = self.work(rounds) or [(1, 1, 0)]
        if len(work) == 1:
            return work[0]
        return max(work, key=lambda one: self._epsilon(one, quick=True))

    def epsilon(self, rounds: int, *, quick: bool = False) -> float:
        """Return the largest ε of any client's example after ``rounds`` rounds."""
        return max((self._epsilon(one, quick=quick) for one in self.work(rounds)), default=0.0)

    def _epsilon(self, work: Work, *, quick: bool) -> float:
        privacy = self.privacy
        return _epsilon(work, self.noise_multiplier, privacy.delta, privacy.accountant, quick)

    @property
    def amplifies(self) -> bool:
        """True if some client's batches are random samples of its examples, which lowers ε."""
        return bool((self.local.rates < 1).any())

    @property
    @override
    def release_cost(self) -> ReleaseCost:
        return ReleaseCost(GRID_COST, self.noise_multiplier**2)

    @override
    def most_releases(self, rounds: int) -> int:
        has_any = self.local.num_examples > 0
        return int((self.turns(rounds) * self.local.num_steps * has_any).max(initial=0))

    @property
    def noise_of_gradients(self) -> float:
        """Largest standard deviation, over clients, of the noise on a local gradient, in clip norms."""
        expected = self.local.expected
        return self.noise_multiplier / max(1, int(expected[expected > 0].min(initial=1 << 62)))

    def __str__(self) -> str:
        local = self.local
        n, steps = local.num_examples, local.num_steps
        digest = blake2b(np.stack([n, steps]).tobytes(), digest_size=4).hexdigest()
        return (
            "unit: example, one of a client's added or removed, also towards the server; Poisson "
            f"batches of {local.batch_size} from {_span(n)} examples, {_span(steps)} local steps "
            f"({digest}); {self.privacy.accountant.upper()}"
        )


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


@final
@dataclass(frozen=True, kw_only=True)
class ExampleDP(Budgeted):
    """Example-level differential privacy: clients train by DP-SGD, which protects each of their examples.

    Neighbours are two shards of one client that differ in one example, added or removed. Assumed
    public: client dataset sizes, and which clients are sampled in which round. So there is no
    amplification by sampling clients: a client's ε grows with each of its rounds. The reported ε is the
    largest of all clients.

    Args:
        clip_norm: largest L2 norm S of one example's gradient, over all trainable numbers, > 0.
        noise_multiplier: standard deviation z of the noise on a step's sum, in clip norms, ≥ 0.
        epsilon: the budget. Without ``noise_multiplier`` the noise is computed that spends it over all
            rounds; with it, training stops before a round would exceed the budget.
        delta: probability that ε does not hold; below 1 / examples of a client.
        accountant: ``pld``, or ``rdp``, which gives a larger ε.
        secure_noise: draw noise and batches from the operating system's secure generator, see
            `CentralDP`.
        log_unprotected: log values without noise: training loss and metrics, norms of updates, the
            share of clipped gradients, skipped clients. If false, none of them is logged.

    Raises:
        ConfigurationError: for values out of range.

    Example:
        >>> from fl_lightning.data.cohorts.cohort import AllClients
        >>> from fl_lightning.privacy.mechanism import LocalSampling
        >>> local = LocalSampling(np.array([100, 200]), 10, np.array([20, 20]))
        >>> run = AccountedRun(AllClients(), num_clients=2, num_rounds=5, seed=0, local=local)
        >>> example = ExampleDP(clip_norm=1.0, noise_multiplier=2.0).mechanism(run)
        >>> round(example.epsilon(rounds=5), 3)
        2.337
    """

    kind = ExampleGaussian

    accountant: Method = "pld"

    @property
    def traits(self) -> Traits:
        """Needs of this rule that the rest of a federation must meet, since ε covers only noisy local steps."""
        return _TRAITS

    @property
    def is_off(self) -> bool:
        """True if the options switch DP-SGD off: infinite clip norm, and no noise."""
        return self.clip_norm == float("inf") and self.noise_multiplier == 0

    @override
    def least_noise(self, run: AccountedRun, source: NoiseSource) -> float:
        """Return the smallest noise multiplier for which every client's ε is within the budget.

        It is found for one client, the hardest: of all clients each step of the search would take long.
        """
        assert self.epsilon is not None
        rounds, noise = run.planned_rounds, 1.0
        while True:
            hardest = self.kind(self, run, noise, source).hardest(rounds)

            def epsilon_of(noise_multiplier: float, *, quick: bool, work: Work = hardest) -> float:
                return _epsilon(work, noise_multiplier, self.delta, self.accountant, quick)

            noise = noise_for_budget(epsilon_of, self.epsilon)
            found = self.kind(self, run, noise, source)
            if found.hardest(rounds) == hardest or found.epsilon(rounds) <= self.epsilon:
                return noise
