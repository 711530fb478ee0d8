"""Attacks on a round, to test defences.

Attackers see what others send, and then send something else.

`Forged` wraps an aggregator. It keeps the round's updates until all are there, because the strongest
attacks know the honest ones, and then folds them in, the attackers' replaced.

Attacks of clients that know nothing of the others.

    sign flip -s x_i;     Gaussian σ N(0, I);     scaling γ x_i

Sources: sign flip and Gaussian: Blanchard et al. 2017 (there σ = 200); scaling: Bagdasaryan
et al. 2020, How to Backdoor Federated Learning, model replacement, where γ is the
number of updates over the server's learning rate.

Attacks of clients that know all honest updates of the round, and send one vector together.

    ALIE      μ - z σ,   z = Φ⁻¹((n - m - s) / (n - m)),   s = ⌊n / 2⌋ + 1 - m
    IPM       -ε μ
    min-max   μ + γ p,   the largest γ with max_i |μ + γ p - x_i| ≤ max_ij |x_i - x_j|

with mean μ and standard deviation σ of every coordinate over the honest updates, n updates and m
attackers. Sources: Baruch et al. 2019, A Little Is Enough; Xie et al. 2020, Fall of
Empires; Shejwalkar and Houmansadr 2021, Manipulating the Byzantine.
Differs: the papers' ALIE estimates μ and σ from the attackers' own honest training, ours knows them;
min-max's γ is solved for (a quadratic per honest update) instead of bisected.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import repeat
from statistics import NormalDist
from typing import Literal, Protocol, final

import numpy as np
import torch
from torch import Tensor

from fl_lightning.core.errors import ConfigurationError
from fl_lightning.core.seeds import numpy_generator
from fl_lightning.server.aggregator import Aggregator
from fl_lightning.server.kept_updates import KeptUpdates
from fl_lightning.server.robust.matrix import ChosenRows, Floats, Rows, RowsAndOne
from fl_lightning.server.robust.passes import combined, mean_and_spread, squared_distances

# Of one attacker, by its client id
Generators = Callable[[int], np.random.Generator]


class Forgery(Protocol):
    """What attackers make of their updates."""

    def forge(
        self, rows: Rows, attackers: Sequence[int], generators: Generators
    ) -> Iterator[Floats]:
        """Yield what each attacker sends, shape (k,).

        Args:
            rows: all updates of the round, as honest training made them.
            attackers: the places of the attackers' among them, at least one, increasing.
            generators: what an attacker draws from.
        """


@final
class Forged(KeptUpdates):
    """An aggregator whose clients are not all honest.

    Args:
        aggregator: what the updates go to, the attackers' replaced.
        forgery: what attackers send.
        attackers: their client ids.
        seed: root of what they draw.

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
    def reader(self) -> str:
        """The attack."""
        return type(self.forgery).__name__

    @property
    def buffers(self) -> Tensor | None:
        """What the aggregator has made of the last round's buffers; None for their mean."""
        return self.aggregator.buffers

    @property
    def memory(self) -> dict[str, Tensor]:
        """What the aggregator keeps from round to round."""
        return self.aggregator.memory

    @memory.setter
    def memory(self, values: dict[str, Tensor]) -> None:
        self.aggregator.memory = values

    def start_round(self, round_index: int) -> None:
        """Learn which round comes next."""
        self._round_index = round_index
        self.aggregator.start_round(round_index)

    def open(self, like: Tensor) -> None:
        """Start without updates."""
        self._like = like
        # the rule has as many again, with the attackers' in their places
        self._rows = self.aggregator.new_rows(like)

    def close(self) -> Tensor:
        """Return the aggregate of the honest updates and the forged ones."""
        rows = self._rows
        places = [place for place, client in enumerate(rows.client_ids) if client in self.attackers]
        forged = self.forgery.forge(rows, places, self._generator) if places else iter(())
        self.aggregator.open(self._like)
        for update in rows.updates():
            sent = update
            if update.client_id in self.attackers:
                vector = torch.from_numpy(np.ascontiguousarray(next(forged)))
                sent = replace(update, delta=vector.to(self._like))
            self.aggregator.add(sent)
        del self._rows
        return self.aggregator.close()

    def _generator(self, client: int) -> np.random.Generator:
        return numpy_generator(self._seed, "attack", self._round_index, client)


@final
@dataclass(frozen=True)
class Scaling:
    """Sends its update times a factor: with poisoned examples, model replacement.

    Args:
        factor: γ; 1 changes nothing.
    """

    factor: float = 10.0

    def __post_init__(self) -> None:
        if not np.isfinite(self.factor):
            raise ConfigurationError(f"Scaling: factor must be a finite number, got {self.factor}")

    def forge(
        self, rows: Rows, attackers: Sequence[int], generators: Generators
    ) -> Iterator[Floats]:
        """Yield the scaled updates."""
        for place in attackers:
            yield combined(rows, self.factor * (np.arange(len(rows)) == place))


@final
@dataclass(frozen=True)
class SignFlip:
    """Sends its update with the opposite sign.

    Args:
        scale: s, ≥ 0, times as long.

    Raises:
        ConfigurationError: if it is negative.
    """

    scale: float = 1.0

    def __post_init__(self) -> None:
        if not 0 <= self.scale < np.inf:
            raise ConfigurationError(
                f"SignFlip: scale must be at least 0 and finite, got {self.scale}"
            )

    def forge(
        self, rows: Rows, attackers: Sequence[int], generators: Generators
    ) -> Iterator[Floats]:
        """Yield the reversed updates."""
        return Scaling(-self.scale).forge(rows, attackers, generators)


@final
@dataclass(frozen=True)
class GaussianNoise:
    """Sends noise.

    Args:
        std: σ, ≥ 0, of every coordinate.

    Raises:
        ConfigurationError: if it is negative.
    """

    std: float = 1.0

    def __post_init__(self) -> None:
        if not 0 <= self.std < np.inf:
            raise ConfigurationError(
                f"GaussianNoise: std must be at least 0 and finite, got {self.std}"
            )

    def forge(
        self, rows: Rows, attackers: Sequence[int], generators: Generators
    ) -> Iterator[Floats]:
        """Yield noise, of each attacker its own."""
        for place in attackers:
            generator = generators(rows.client_ids[place])
            noise = generator.standard_normal(rows.num_columns, np.float32)
            yield (self.std * noise).astype(rows.dtype)


@final
@dataclass(frozen=True)
class ALIE:
    """A little is enough: within the spread of honest updates, all at the same end of it.

    Args:
        z: how many standard deviations; the largest that a majority would still hide if None.
    """

    z: float | None = None

    def __post_init__(self) -> None:
        if not np.isfinite(0.0 if self.z is None else self.z):
            raise ConfigurationError(f"ALIE: z must be a finite number, got {self.z}")

    def forge(
        self, rows: Rows, attackers: Sequence[int], generators: Generators
    ) -> Iterator[Floats]:
        """Yield the same vector for everyone."""
        mean, spread = mean_and_spread(honest_of(rows, attackers))
        z = hidden_deviations(len(rows), len(attackers)) if self.z is None else self.z
        return repeat(mean - mean.dtype.type(z) * spread, len(attackers))


@final
@dataclass(frozen=True)
class InnerProductManipulation:
    """Sends the honest mean backwards.

    Args:
        epsilon: ε, how long; small ones hide from distances, large ones turn the mean around.
    """

    epsilon: float = 0.5

    def __post_init__(self) -> None:
        if not np.isfinite(self.epsilon):
            raise ConfigurationError(
                f"InnerProductManipulation: epsilon must be a finite number, got {self.epsilon}"
            )

    def forge(
        self, rows: Rows, attackers: Sequence[int], generators: Generators
    ) -> Iterator[Floats]:
        """Yield the same vector for everyone."""
        mean, _ = mean_and_spread(honest_of(rows, attackers))
        return repeat(mean.dtype.type(-self.epsilon) * mean, len(attackers))


@final
@dataclass(frozen=True)
class MinMax:
    """As far from the honest mean as the honest updates are from each other.

    Args:
        direction: p: ``std`` for -σ, ``unit`` for -μ / |μ|, ``sign`` for -sign(μ).
    """

    direction: Literal["std", "unit", "sign"] = "std"

    def forge(
        self, rows: Rows, attackers: Sequence[int], generators: Generators
    ) -> Iterator[Floats]:
        """Yield the same vector for everyone."""
        honest = honest_of(rows, attackers)
        mean, spread = mean_and_spread(honest)
        if self.direction == "std":
            away = -spread
        elif self.direction == "unit":
            away = -mean / max(np.linalg.norm(mean), np.finfo(mean.dtype).tiny)
        else:
            away = -np.sign(mean)
        distances = squared_distances(RowsAndOne(honest, mean))
        limit, to_mean = distances[:-1, :-1].max(), distances[:-1, -1]
        gamma = largest_step(away, along(honest, mean, away), to_mean, limit)
        return repeat(mean + mean.dtype.type(gamma) * away, len(attackers))


def honest_of(rows: Rows, attackers: Sequence[int]) -> Rows:
    """Return the honest rows; without any, what the attackers would have sent honestly."""
    honest = sorted(set(range(len(rows))) - set(attackers))
    return ChosenRows(rows, honest) if honest else rows


def hidden_deviations(num_updates: int, num_attackers: int) -> float:
    """Return ALIE's z, ≥ 0.

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
    """Return the inner products <p, μ - x_i>, float64, shape (n,)."""
    products = np.zeros(len(rows))
    for columns, block in rows.blocks():
        products += (mean[columns] - block) @ direction[columns]
    return products


def largest_step(direction: Floats, products: Floats, to_mean: Floats, limit: float) -> float:
    """Return the largest γ with γ² |p|² + 2 γ <p, μ - x_i> + |μ - x_i|² ≤ limit for all i.

    Example:
        >>> largest_step(np.array([1.0]), np.array([1.0, -1.0]), np.array([1.0, 1.0]), limit=4.0)
        1.0
    """
    square = float(np.einsum("i,i->", direction, direction, dtype=np.float64))
    if not square:
        return 0.0
    roots = np.sqrt(np.maximum(products**2 + square * (limit - to_mean), 0))
    return float(((roots - products) / square).min())
