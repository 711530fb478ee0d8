"""Attacks on a round by malicious clients, to test defences.

`Forged` wraps an aggregator. It keeps all updates until the round ends, because the strongest attacks
know the honest ones, replaces those of the attackers, and passes all of them on.

Attacks without knowledge of other clients:

    sign flip -s x_i;     Gaussian σ N(0, I);     scaling γ x_i

Sources: sign flip and Gaussian: Blanchard et al. 2017 (there σ = 200); scaling: Bagdasaryan
et al. 2020, How to Backdoor Federated Learning, model replacement, where γ is the
number of updates over the server's learning rate.

Attacks by clients that know all honest updates of the round, and all send the same vector:

    ALIE      μ - z σ,   z = Φ⁻¹((n - m - s) / (n - m)),   s = ⌊n / 2⌋ + 1 - m
    IPM       -ε μ
    min-max   μ + γ p,   the largest γ with max_i |μ + γ p - x_i| ≤ max_ij |x_i - x_j|

with mean μ and standard deviation σ of every coordinate over the honest updates, n updates and m
attackers. Sources: Baruch et al. 2019, A Little Is Enough; Xie et al. 2020, Fall of
Empires; Shejwalkar and Houmansadr 2021, Manipulating the Byzantine.
Differs: the paper's ALIE estimates μ and σ from the attackers' own honest training, here they are
known; min-max's γ is the root of a quadratic per honest update instead of found by bisection.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import repeat
from statistics import NormalDist
from typing import ClassVar, Literal, Protocol, final

import numpy as np
import torch
from torch import Tensor
from typing_extensions import override

from fl_lightning.core.errors import Ranged
from fl_lightning.core.seeds import numpy_generator
from fl_lightning.server.aggregator import Aggregator, KeptUpdates
from fl_lightning.server.robust.matrix import Floats, Rows, chosen_rows, rows_and_one
from fl_lightning.server.robust.passes import combined, mean_and_std, squared_distances

# Returns the random generator of an attacker, given its client id
Generators = Callable[[int], np.random.Generator]


class Forgery(Protocol):
    """An attack: computes the updates that attackers send instead of honest ones."""

    def forge(
        self, rows: Rows, attackers: Sequence[int], generators: Generators
    ) -> Iterator[Floats]:
        """Yield the vector, shape (k,), that each attacker sends as its update.

        Args:
            rows: all updates of the round, from honest training.
            attackers: row numbers of the attackers, at least one, increasing.
            generators: returns the random generator of an attacker.
        """


@final
class Forged(KeptUpdates):
    """An aggregator that replaces attackers' updates by those of an attack, to test another aggregator.

    Args:
        aggregator: aggregator of the honest and the forged updates.
        forgery: the attack.
        attackers: client ids of the attackers.
        seed: root seed of the attackers' random draws.

    Example:
        >>> from fl_lightning.core.update import ClientUpdate
        >>> from fl_lightning.server.means.mean import Mean
        >>> from fl_lightning.server.attacks import SignFlip
        >>> aggregator = Forged(Mean(), SignFlip(), attackers=[1], seed=0)
        >>> aggregator.open(torch.empty(1))
        >>> for client in range(3):
        ...     aggregator.add(ClientUpdate(client, torch.ones(1), torch.empty(0), 1, 1))
        >>> aggregator.close()
        tensor([0.3333])
    """

    def __init__(
        self, aggregator: Aggregator, forgery: Forgery, attackers: Collection[int], seed: int
    ) -> None:
        self.aggregator, self.forgery = aggregator, forgery
        self.attackers = frozenset(attackers)
        self.exact = aggregator.exact
        self.needs_effective_steps = aggregator.needs_effective_steps
        self._seed, self._round_index = seed, 0

    @property
    @override
    def reader(self) -> str:
        return type(self.forgery).__name__

    @property
    @override
    def memory(self) -> dict[str, Tensor]:
        return self.aggregator.memory

    @memory.setter
    def memory(self, values: dict[str, Tensor]) -> None:
        self.aggregator.memory = values

    @override
    def start_round(self, round_index: int) -> None:
        self._round_index = round_index
        self.aggregator.start_round(round_index)

    @override
    def open(self, like: Tensor) -> None:
        self._like = like
        # the wrapped aggregator keeps the updates a second time, with the attackers' replaced
        self._rows = self.aggregator.new_rows(like)

    def close(self) -> Tensor:
        """Replace the attackers' updates, and return the aggregate of all updates, shape (k,)."""
        rows = self._rows
        places = [place for place, client in enumerate(rows.client_ids) if client in self.attackers]
        generators = partial(numpy_generator, self._seed, "attack", self._round_index)
        forged = self.forgery.forge(rows, places, generators) if places else iter(())
        self.aggregator.open(self._like)
        for update in rows.updates():
            sent = update
            if update.client_id in self.attackers:
                vector = torch.from_numpy(np.ascontiguousarray(next(forged)))
                sent = replace(update, delta=vector.to(self._like))
            self.aggregator.add(sent)
        del self._rows
        aggregate, self.buffers = self.aggregator.close(), self.aggregator.buffers
        return aggregate


@final
@dataclass(frozen=True)
class Scaling(Ranged):
    """Attack: each attacker multiplies its update by a factor (model replacement, with poisoned examples).

    Args:
        factor: γ; 1 changes nothing.
    """

    factor: float = 10.0

    ranges: ClassVar[dict[str, str]] = {"factor": "a finite number"}

    def forge(
        self, rows: Rows, attackers: Sequence[int], generators: Generators
    ) -> Iterator[Floats]:
        """Yield the update of each attacker, times the factor."""
        for place in attackers:
            yield combined(rows, self.factor * (np.arange(len(rows)) == place))


@final
@dataclass(frozen=True)
class SignFlip(Ranged):
    """Attack: each attacker reverses the sign of its update.

    Args:
        scale: factor s ≥ 0 of its length.

    Raises:
        ConfigurationError: if it is negative.
    """

    scale: float = 1.0

    ranges: ClassVar[dict[str, str]] = {"scale": "at least 0 and finite"}

    def forge(
        self, rows: Rows, attackers: Sequence[int], generators: Generators
    ) -> Iterator[Floats]:
        """Yield the update of each attacker, with the opposite sign."""
        return Scaling(-self.scale).forge(rows, attackers, generators)


@final
@dataclass(frozen=True)
class GaussianNoise(Ranged):
    """Attack: each attacker sends Gaussian noise as its update.

    Args:
        std: standard deviation σ ≥ 0 of every coordinate.

    Raises:
        ConfigurationError: if it is negative.
    """

    std: float = 1.0

    ranges: ClassVar[dict[str, str]] = {"std": "at least 0 and finite"}

    def forge(
        self, rows: Rows, attackers: Sequence[int], generators: Generators
    ) -> Iterator[Floats]:
        """Yield an independent noise vector for each attacker."""
        for place in attackers:
            generator = generators(rows.client_ids[place])
            noise = generator.standard_normal(rows.num_columns, np.float32)
            yield (self.std * noise).astype(rows.dtype)


class _Collusion(Ranged, ABC):
    """Base of attacks in which all attackers send the same vector."""

    @abstractmethod
    def vector(self, honest: Rows, num_updates: int, num_attackers: int) -> Floats:
        """Return the vector that all attackers send as their update, shape (k,)."""

    def forge(
        self, rows: Rows, attackers: Sequence[int], generators: Generators
    ) -> Iterator[Floats]:
        """Yield the same vector once per attacker."""
        honest = sorted(set(range(len(rows))) - set(attackers))
        # without honest updates, those that the attackers would have sent honestly
        known = chosen_rows(rows, honest) if honest else rows
        return repeat(self.vector(known, len(rows), len(attackers)), len(attackers))


@final
@dataclass(frozen=True)
class ALIE(_Collusion):
    """ALIE attack ("a little is enough"): attackers send the honest mean minus z standard deviations.

    Args:
        z: number of standard deviations; None for the largest that a majority of updates hides.
    """

    z: float | None = None

    ranges: ClassVar[dict[str, str]] = {"z": "a finite number"}

    @override
    def vector(self, honest: Rows, num_updates: int, num_attackers: int) -> Floats:
        mean, std = mean_and_std(honest)
        z = hidden_deviations(num_updates, num_attackers) if self.z is None else self.z
        moved: Floats = mean - mean.dtype.type(z) * std
        return moved


@final
@dataclass(frozen=True)
class InnerProductManipulation(_Collusion):
    """Attack by inner product manipulation: attackers send the honest mean, reversed and scaled.

    Args:
        epsilon: length ε; a small one hides among the honest updates, a large one reverses the mean.
    """

    epsilon: float = 0.5

    ranges: ClassVar[dict[str, str]] = {"epsilon": "a finite number"}

    @override
    def vector(self, honest: Rows, num_updates: int, num_attackers: int) -> Floats:
        mean, _ = mean_and_std(honest)
        scaled: Floats = mean.dtype.type(-self.epsilon) * mean
        return scaled


@final
@dataclass(frozen=True)
class MinMax(_Collusion):
    """Min-max attack: the sent vector is at most as far from honest updates as they are from each other.

    Args:
        direction: direction p: ``std`` for -σ, ``unit`` for -μ / |μ|, ``sign`` for -sign(μ).
    """

    direction: Literal["std", "unit", "sign"] = "std"

    @override
    def vector(self, honest: Rows, num_updates: int, num_attackers: int) -> Floats:
        mean, std = mean_and_std(honest)
        if self.direction == "std":
            away = -std
        elif self.direction == "unit":
            away = -mean / max(np.linalg.norm(mean), np.finfo(mean.dtype).tiny)
        else:
            away = -np.sign(mean)
        distances = squared_distances(rows_and_one(honest, mean))
        limit, to_mean = distances[:-1, :-1].max(), distances[:-1, -1]
        gamma = largest_step(away, along(honest, mean, away), to_mean, limit)
        moved: Floats = mean + mean.dtype.type(gamma) * away
        return moved


def hidden_deviations(num_updates: int, num_attackers: int) -> float:
    """Return z ≥ 0, the number of standard deviations by which ALIE's attackers deviate from the honest mean.

    Example:
        >>> round(hidden_deviations(50, 12), 4)  # Φ⁻¹(24 / 38)
        0.336
    """
    num_honest = num_updates - num_attackers
    supporters = num_updates // 2 + 1 - num_attackers
    if not 0 < supporters < num_honest:
        return 0.0
    return max(0.0, NormalDist().inv_cdf((num_honest - supporters) / num_honest))


def along(rows: Rows, mean: Floats, direction: Floats) -> Floats:
    """Return the inner products <p, μ - x_i> of a direction p with mean minus each row, float64, shape (n,)."""
    products = np.zeros(len(rows))
    for columns, block in rows.blocks():
        products += (mean[columns] - block) @ direction[columns]
    return products


def largest_step(direction: Floats, products: Floats, to_mean: Floats, limit: float) -> float:
    """Return the largest step γ such that |μ + γ p - x_i|² ≤ limit for all rows x_i.

    Example:
        >>> largest_step(np.array([1.0]), np.array([1.0, -1.0]), np.array([1.0, 1.0]), limit=4.0)
        1.0
    """
    square = float(np.einsum("i,i->", direction, direction, dtype=np.float64))
    if not square:
        return 0.0
    roots = np.sqrt(np.maximum(products**2 + square * (limit - to_mean), 0))
    return float(((roots - products) / square).min())
