"""How cohorts are drawn, in the terms of privacy theorems.

What one client can change of a round depends on who is compared with whom:

    Poisson, everybody      with and without one client       the sum moves by ≤ S
    fixed size              one client replaced by another    the sum moves by ≤ 2 S

S is the clip norm. A sampler that looks at losses, speeds or availability depends on the data, or
on what nobody knows the chances of, and has no such theorem.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from fl_lightning.core.errors import ConfigurationError
from fl_lightning.data.cohorts.cohort import CohortSampler, as_cohort


@dataclass(frozen=True)
class Sampling:
    """A draw of clients.

    Attributes:
        kind: each by its own coin (``poisson``), a ``fixed`` number without replacement, or ``all``.
        num_clients: how many there are, N.
        expected: clients of a round, qN, in (0, N].

    Example:
        >>> from fl_lightning.data.cohorts.cohort import PoissonCohort
        >>> sampling = sampling_of(PoissonCohort(fraction=0.1), num_clients=50)
        >>> sampling.expected, sampling.rate, sampling.sensitivity, sampling.relation
        (5.0, 0.1, 1.0, 'one client added or removed')
    """

    kind: Literal["poisson", "fixed", "all"]
    num_clients: int
    expected: float

    @property
    def rate(self) -> float:
        """A client's chance of taking part in a round, q in (0, 1]."""
        return self.expected / self.num_clients

    @property
    def sensitivity(self) -> float:
        """How far one client moves a sum of clipped updates, in clip norms."""
        return 2.0 if self.kind == "fixed" else 1.0

    @property
    def relation(self) -> str:
        """Which data sets ε compares."""
        return "one client replaced" if self.kind == "fixed" else "one client added or removed"

    def __str__(self) -> str:
        if self.kind == "all":
            return f"all {self.num_clients} clients, no amplification"
        if self.kind == "poisson":
            return f"Poisson sampling of {self.num_clients} clients at rate {self.rate:g}"
        return f"{self.expected:g} of {self.num_clients} clients without replacement"


def check_sampler(cohort: CohortSampler) -> None:
    """Refuse samplers that no accountant knows.

    Raises:
        ConfigurationError: saying which are known.
    """
    asked = as_cohort(cohort)
    if asked.coin is None and not asked.is_uniform:
        raise ConfigurationError(
            f"federation.privacy: {type(cohort).__name__} cannot be accounted for, because a "
            "client's chance of taking part is not known: set federation.cohort to PoissonCohort, "
            "UniformCohort or AllClients, or use BandedMatrixDP for cohorts that take turns"
        )
    if asked.redrawn_below > 0:
        raise ConfigurationError(
            f"federation.privacy: with min_size={asked.redrawn_below} clients of a "
            f"{type(cohort).__name__} do not join independently, which amplification by sampling "
            "needs: set min_size to 0"
        )


def sampling_of(cohort: CohortSampler, num_clients: int) -> Sampling:
    """Return how a sampler draws.

    Raises:
        ConfigurationError: for samplers that no accountant knows.
    """
    check_sampler(cohort)
    coin = as_cohort(cohort).coin
    if coin is not None and coin < 1:
        return Sampling("poisson", num_clients, coin * num_clients)
    size = cohort.expected_size(num_clients) if coin is None else num_clients
    return Sampling("all" if size == num_clients else "fixed", num_clients, float(size))
