"""Cohorts that prefer clients with many examples, or with a high loss.

    by size:            P(k) ∝ n_k
    by loss:            P(k) ∝ exp(F_k / temperature)
    power of choice:    d candidates by size; of these the m with the highest F_k

all without replacement. F_k is client k's training loss, as the server last heard it or measured
on the present global model before the draw.

Sources: by size, Li et al. 2020 (FedProx, 1812.06127), Algorithm 2, there with replacement; by
loss, Goetz et al. 2019, *Active federated learning* (1909.12641), section 3, without its uniform
part; power of choice, Cho et al. 2020 (2010.01243), Algorithm 1 (π_pow-d; with few ``loss_batches``
π_cpow-d, with ``last_known`` losses π_rpow-d). A client that has not been heard of counts as one
with the highest loss, so that everybody has a turn.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, final

import numpy as np

from fl_lightning.core.errors import ConfigurationError
from fl_lightning.core.seeds import numpy_generator
from fl_lightning.data.cohorts.cohort import SizedCohort
from fl_lightning.data.cohorts.population import ClientIds, Population
from fl_lightning.data.cohorts.weighted_draw import log_of, weighted_draw

Losses = Literal["last_known", "fresh"]


@final
@dataclass(frozen=True, kw_only=True)
class BySizeCohort(SizedCohort):
    """A fixed number of clients, drawn with probability proportional to their examples.

    Args: those of `UniformCohort`.

    Example:
        >>> population = Population(np.array([1, 1, 1, 500, 500]))
        >>> BySizeCohort(size=2).sample(0, population, seed=0).tolist()
        [3, 4]
    """

    def sample(self, round_index: int, population: Population, seed: int) -> ClientIds:
        """Return `expected_size` distinct client ids, or all that are available."""
        size = self.expected_size(population.num_clients)
        return _draw_by_size(size, round_index, population, seed)


@final
@dataclass(frozen=True, kw_only=True)
class ByLossCohort(SizedCohort):
    """A fixed number of clients, drawn with probability proportional to exp(loss / temperature).

    Args:
        fraction: share of all clients, in (0, 1]; or
        size: the number itself, ≥ 1.
        min_size: at least so many clients when ``fraction`` gives fewer.
        temperature: > 0, in units of the loss: the higher, the more alike clients count.
        losses: ``last_known``, from the last round that each took part in, or ``fresh``, of all
            clients on the present model, which costs a forward pass over everybody's examples.
        loss_batches: fresh losses over at most so many batches of each client; None is all.

    Example:
        >>> population = Population(np.array([10, 10, 10]))
        >>> population.note([0, 1, 2], round_index=0, losses={0: 0.1, 1: 9.0, 2: 0.2})
        >>> ByLossCohort(size=1).sample(1, population, seed=0).tolist()
        [1]
    """

    temperature: float = 1.0
    losses: Losses = "last_known"
    loss_batches: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_losses(self.losses, self.loss_batches)
        if not 0 < self.temperature < np.inf:
            raise ConfigurationError(
                f"temperature must be greater than 0 and finite, got {self.temperature}: UniformCohort "
                "has all clients count alike"
            )

    @property
    def needs_fresh_losses(self) -> bool:
        """Unless the last known ones will do."""
        return self.losses == "fresh"

    def candidates(self, round_index: int, population: Population, seed: int) -> ClientIds:
        """Return whose losses must be fresh: everybody's, or nobody's."""
        return population.available_ids if self.losses == "fresh" else np.empty(0, np.int64)

    def sample(self, round_index: int, population: Population, seed: int) -> ClientIds:
        """Return `expected_size` distinct client ids, or all that are available."""
        ids = population.available_ids
        losses = population.losses[ids]
        highest = np.nanmax(losses) if not np.isnan(losses).all() else 0.0
        logs = np.nan_to_num(losses, nan=highest) / self.temperature
        size = self.expected_size(population.num_clients)
        return ids[weighted_draw(logs, size, numpy_generator(seed, "cohort", round_index))]


@final
@dataclass(frozen=True, kw_only=True)
class PowerOfChoiceCohort(SizedCohort):
    """Of d candidates, drawn by their sizes, the m with the highest loss; by lot among equals.

    An unknown loss counts as the highest.

    With d = m it draws as `BySizeCohort` does, client by client the same.

    Args:
        fraction: share of all clients that takes part, in (0, 1]; or
        size: the number itself, m ≥ 1.
        min_size: at least so many clients when ``fraction`` gives fewer.
        num_candidates: d, from m to the number of clients.
        losses: ``fresh``, of the candidates on the present model (a forward pass over their
            examples), or ``last_known``, which costs nothing.
        loss_batches: fresh losses over at most so many batches of each candidate; None is all.

    Raises:
        ConfigurationError: if there are fewer candidates than clients to choose.

    Example:
        >>> population = Population(np.array([10, 10, 10, 10]))
        >>> losses = {0: 0.1, 1: 0.9, 2: 0.2, 3: 0.7}
        >>> population.note([0, 1, 2, 3], round_index=0, losses=losses)
        >>> PowerOfChoiceCohort(size=2, num_candidates=4).sample(1, population, seed=0).tolist()
        [1, 3]
    """

    num_candidates: int
    losses: Losses = "fresh"
    loss_batches: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_losses(self.losses, self.loss_batches)
        if self.num_candidates < 1:
            raise ConfigurationError(
                f"num_candidates must be at least 1, got {self.num_candidates}: from the cohort's size to "
                "the number of clients"
            )

    def expected_size(self, num_clients: int) -> int:
        """Return the number of clients in every round."""
        size = super().expected_size(num_clients)
        if not size <= self.num_candidates <= num_clients:
            raise ConfigurationError(
                f"num_candidates must be from {size}, the cohort's size, to {num_clients}, the "
                f"number of clients, got {self.num_candidates}: the cohort is chosen among them"
            )
        return size

    @property
    def needs_fresh_losses(self) -> bool:
        """Unless the last known ones will do."""
        return self.losses == "fresh"

    def candidates(self, round_index: int, population: Population, seed: int) -> ClientIds:
        """Return whose losses must be fresh."""
        if self.losses != "fresh":
            return np.empty(0, np.int64)
        return _draw_by_size(self.num_candidates, round_index, population, seed)

    def sample(self, round_index: int, population: Population, seed: int) -> ClientIds:
        """Return `expected_size` distinct client ids, or all that are available."""
        size = self.expected_size(population.num_clients)
        drawn = _draw_by_size(self.num_candidates, round_index, population, seed)
        losses = np.nan_to_num(population.losses[drawn], nan=np.inf)
        # as long as nobody's loss is known, all are equal
        lots = numpy_generator(seed, "cohort", round_index, 1).random(len(drawn))
        return np.sort(drawn[np.lexsort((lots, -losses))[:size]])


def _draw_by_size(size: int, round_index: int, population: Population, seed: int) -> ClientIds:
    ids = population.available_ids
    logs = log_of(population.num_examples[ids])
    return ids[weighted_draw(logs, size, numpy_generator(seed, "cohort", round_index))]


def _check_losses(losses: str, loss_batches: int | None) -> None:
    if losses not in ("last_known", "fresh"):
        raise ConfigurationError(f"losses must be last_known or fresh, got {losses!r}")
    if loss_batches is not None and loss_batches < 1:
        raise ConfigurationError(f"loss_batches must be at least 1 batch, got {loss_batches}")
