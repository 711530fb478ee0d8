"""Who pads with whom: everyone with everyone, or a random graph of logarithmic degree.

    a random order of the n clients in a ring; each is joined to its k / 2 next on either side

Such a graph (Harary's) falls apart only if two runs of k / 2 clients in a row are missing. Source:
Bell et al. 2020 (CCS, *Secure Single-Server Aggregation with (Poly)Logarithmic Overhead*), section
3.1 and algorithm 1. Differs: a client holds a share of its own secrets too, as in Bonawitz et al.
2017; the bound on falling apart is ours, (n over 2) (γ + δ)^k, for two runs instead of one.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass

from scipy.stats import hypergeom

from fl_lightning.core.seeds import numpy_generator

Graph = dict[int, frozenset[int]]


def neighbours(participants: Collection[int], num_neighbours: int | None, seed: int) -> Graph:
    """Return everyone's neighbours.

    Args:
        participants: places of those who take part.
        num_neighbours: k, even; None, or at least as many as there are others, for all others.
        seed: of the order.

    Example:
        >>> neighbours(range(4), None, seed=0)[1]
        frozenset({0, 2, 3})
        >>> {len(them) for them in neighbours(range(50), 6, seed=0).values()}
        {6}
    """
    everyone = frozenset(participants)
    if num_neighbours is None or num_neighbours >= len(everyone) - 1:
        return {place: everyone - {place} for place in everyone}
    order = _order(everyone, seed)
    return {place: _around(order, at, num_neighbours) for at, place in enumerate(order)}


def neighbours_of(
    place: int, participants: Collection[int], num_neighbours: int | None, seed: int
) -> frozenset[int]:
    """Return one client's neighbours: the same as `neighbours`, without those of all others."""
    everyone = frozenset(participants)
    if num_neighbours is None or num_neighbours >= len(everyone) - 1:
        return everyone - {place}
    order = _order(everyone, seed)
    return _around(order, order.index(place), num_neighbours)


def _order(participants: frozenset[int], seed: int) -> list[int]:
    generator = numpy_generator(seed, "secure sum graph", len(participants))
    order: list[int] = generator.permutation(sorted(participants)).tolist()
    return order


def _around(order: list[int], at: int, num_neighbours: int) -> frozenset[int]:
    half = num_neighbours // 2
    return frozenset(order[(at + step) % len(order)] for step in range(-half, half + 1) if step)


@dataclass(frozen=True)
class SparseGraph:
    """How many neighbours and which threshold a cohort needs.

    The threshold is low enough that with probability 1 - 2^-correctness_bits the sum of a round is
    not lost, and so high that with probability 1 - 2^-security_bits no coalition of corrupt clients
    and the server learns more than the sum over all honest survivors (semi-honest: everyone follows
    the protocol and remembers what it sees).

    Args:
        corrupt: fraction of the clients that may tell the server all they know, in [0, 1).
        dropped: fraction of the clients that may fall silent, in [0, 1); both below 1 together.
        security_bits: σ.
        correctness_bits: η.

    Raises:
        ValueError: if a fraction is outside its range.

    Example:
        >>> SparseGraph(corrupt=0.05, dropped=0.2).plan(1000)
        (50, 21)
        >>> SparseGraph(corrupt=0.05, dropped=0.2).plan(100_000)
        (64, 27)
    """

    corrupt: float = 0.05
    dropped: float = 0.2
    security_bits: int = 40
    correctness_bits: int = 20

    def __post_init__(self) -> None:
        if min(self.corrupt, self.dropped) < 0 or self.corrupt + self.dropped >= 1:
            raise ValueError(
                "corrupt and dropped must be fractions of the clients, below 1 together, got "
                f"{self.corrupt} and {self.dropped}"
            )

    def plan(self, num_clients: int) -> tuple[int, int]:
        """Return the number of neighbours and the threshold.

        For few clients that is everyone, with a threshold of more than half.
        """
        for num_neighbours in range(2, num_clients - 1, 2):
            threshold = self._threshold(num_clients, num_neighbours)
            if threshold is not None:
                return num_neighbours, threshold
        return num_clients - 1, num_clients // 2 + 1

    def _threshold(self, num_clients: int, num_neighbours: int) -> int | None:
        """Return the highest threshold that keeps both promises, if there is one."""
        others, corrupt = num_clients - 1, math.ceil(self.corrupt * num_clients)
        alive = others - math.ceil(self.dropped * num_clients)
        pairs = num_clients * others / 2
        # two promises of secrecy, each of which gets half of the probability
        leak = 2.0 ** -(self.security_bits + 1)
        if pairs * (self.corrupt + self.dropped) ** num_neighbours > leak:
            return None
        loss = 2.0**-self.correctness_bits / num_clients
        threshold = int(hypergeom.ppf(loss, others, alive, num_neighbours))
        while threshold > 1 and hypergeom.cdf(threshold - 1, others, alive, num_neighbours) > loss:
            threshold -= 1
        known = num_clients * hypergeom.sf(threshold - 1, others, corrupt, num_neighbours)
        return threshold if threshold > 1 and known <= leak else None
