"""Rules that clip or reweigh whole updates: centred clipping, norm bounding, RFA, FLTrust.

Centred clipping: the mean of the updates, each clipped to a ball around the last aggregate.

    v ← v + (1/n) Σ_i (x_i - v) min(1, τ / |x_i - v|),   L times, from the last round's v

Source: Karimireddy et al. 2021, Learning from History for Byzantine Robust Optimization, Algorithm
2. Differs: the paper's workers send momenta, ours the updates themselves. v starts at 0.

Norm bounding: every update is clipped to a bound.

    aggregate = Σ_i w_i x_i min(1, M / |x_i|) / Σ_i w_i

Source: Sun et al. 2019, Can You Really Backdoor Federated Learning? Differs: the paper's bound is
given; by default it is the median of the round's norms.

The geometric median: the point with the smallest sum of distances to the updates.

    z* = argmin_z Σ a_i |x_i - z|;      z ← Σ β_i x_i / Σ β_i,   β_i = a_i / max(ν, |x_i - z|)

Source: Pillutla et al. 2022, Robust Aggregation for Federated Learning (RFA), Algorithm 2, the
smoothed Weiszfeld iteration. It runs until it converges, not for a few steps (byzfl's default is
three, with ν = 0.1). z is a weighted mean of the updates throughout, so that the iteration runs on n
weights: |x_i - Σ a_j x_j|² = (D a)_i - aᵀ D a / 2, with D the squared distances. a_i = 1 / n, or the
share of examples, as in the paper, with ``weight_by_examples``.

FLTrust: the server trains on trusted examples of its own and compares updates with its result.

    t_i = max(0, cos(x_i, x_0)),    aggregate = Σ_i t_i |x_0| / |x_i| x_i / Σ_i t_i

Source: Cao et al. 2021, FLTrust, Algorithm 2, with x_0 the server's own update. Here the server's
root set is the shard of one client, given by its number: it trains like any other client, and its
update is compared with the others but not averaged. If no update is trusted, the aggregate is 0.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, final

import numpy as np
from typing_extensions import override

from fl_lightning.core.errors import RoundFailure
from fl_lightning.server.robust.matrix import Floats, Rows, rows_and_one
from fl_lightning.server.robust.passes import combined, row_norms, squared_distances
from fl_lightning.server.robust.rule import RobustRule, RuleContext

_CENTRE = "centre"


@final
@dataclass
class CentredClipping(RobustRule):
    """Centred clipping: clips updates around the last round's aggregate, and averages them.

    Args:
        radius: τ > 0, in units of an update's norm: no update moves the aggregate by more than
            τ / n in an iteration.
        num_iterations: number of iterations L ≥ 1.

    Raises:
        ConfigurationError: for values out of range.
    """

    radius: float = 1.0
    num_iterations: int = 1

    ranges: ClassVar[dict[str, str]] = {
        "radius": "greater than 0 or inf",
        "num_iterations": "at least 1",
    }

    def combine(self, rows: Rows, context: RuleContext) -> Floats:
        """Return the new centre, shape (k,), around which updates are clipped in the next round."""
        centre = context.memory.get(_CENTRE, np.zeros(rows.num_columns, rows.dtype))
        points = rows_and_one(rows, centre)
        shares = clipped_shares(squared_distances(points), self.radius, self.num_iterations)
        centre = context.memory[_CENTRE] = combined(points, shares)
        return centre


def clipped_shares(distances: Floats, radius: float, num_iterations: int) -> Floats:
    """Return the weights of the n updates and the old centre in the new centre: shape (n + 1,), sum 1.

    Args:
        distances: squared distances of all points and, last, the old centre; shape (n + 1, n + 1).
        radius: τ.
        num_iterations: L.

    Example:
        >>> points = np.array([1.0, 8.0, 0.0])
        >>> clipped_shares((points[:, None] - points) ** 2, radius=2.0, num_iterations=1).tolist()
        [0.5, 0.125, 0.375]
    """
    count = len(distances) - 1
    finite = np.where(np.isfinite(distances), distances, 0.0)
    is_far = ~np.isfinite(distances[:-1, -1])
    weights = np.zeros(count + 1)
    weights[-1] = 1.0
    for _ in range(num_iterations):
        to_all = finite @ weights
        reach = np.sqrt(np.maximum(to_all - weights @ to_all / 2, 0))[:-1]
        with np.errstate(divide="ignore"):
            factors = np.minimum(1, radius / reach) * ~is_far / count
        weights *= 1 - factors.sum()
        weights[:-1] += factors
    return weights


@final
@dataclass
class NormBounding(RobustRule):
    """The mean of updates, each scaled down to at most a given norm.

    Args:
        bound: largest L2 norm M > 0 of an update, ∞ for the plain mean; the median of the round's
            norms if None.
        weight_by_examples: weigh updates by their examples, which attackers can exaggerate.

    Raises:
        ConfigurationError: if the bound is not positive.
    """

    bound: float | None = None
    weight_by_examples: bool = False

    ranges: ClassVar[dict[str, str]] = {"bound": "greater than 0 or inf"}

    @override
    def combine(self, rows: Rows, context: RuleContext) -> Floats:
        norms = row_norms(rows)
        bound = float(np.median(norms)) if self.bound is None else self.bound
        if not bound:  # most updates are 0
            return np.zeros(rows.num_columns, rows.dtype)
        weights = rows.num_examples if self.weight_by_examples else np.ones(len(rows))
        factors = np.divide(bound, norms, out=np.ones_like(norms), where=norms > bound)
        return combined(rows, factors * weights / weights.sum())


# the iteration converges linearly; it stops once a step is this small relative to the distances
_TOLERANCE = 1e-9
_MOST_STEPS = 100_000


@final
@dataclass
class GeometricMedian(RobustRule):
    """The geometric median of the updates (RFA); tolerates fewer than half of the clients as attackers.

    Args:
        smoothing: ν > 0, in units of an update's norm: the pull of an update stays constant below
            this distance.
        weight_by_examples: weigh updates by their examples, which attackers can exaggerate.

    Raises:
        ConfigurationError: if the smoothing is not positive.
    """

    smoothing: float = 1e-6
    weight_by_examples: bool = False

    ranges: ClassVar[dict[str, str]] = {"smoothing": "greater than 0 and finite"}

    @override
    def combine(self, rows: Rows, context: RuleContext) -> Floats:
        shares = rows.num_examples if self.weight_by_examples else np.ones(len(rows))
        return combined(rows, weiszfeld(squared_distances(rows), shares, self.smoothing))


def weiszfeld(distances: Floats, shares: Floats, smoothing: float) -> Floats:
    """Return the weights of points in their geometric median, by Weiszfeld's algorithm: shape (n,), sum 1.

    Points infinitely far from the others have weight 0.

    Args:
        distances: squared distances, shape (n, n).
        shares: weights of the points in the sum of distances, shape (n,).
        smoothing: ν, see `GeometricMedian`.

    Example:
        >>> points = np.array([0.0, 1.0, 5.0])
        >>> weiszfeld((points[:, None] - points) ** 2, np.ones(3), 1e-9).round(6).tolist()
        [0.0, 1.0, 0.0]
    """
    near = np.isfinite(distances).sum(1) * 2 > len(distances)
    shares = shares * near
    finite = np.where(np.isfinite(distances), distances, 0.0)
    weights: Floats = shares / shares.sum()
    for _ in range(_MOST_STEPS):
        to_all = finite @ weights
        reach = np.sqrt(np.maximum(to_all - weights @ to_all / 2, 0))
        pulls = shares / np.maximum(reach, smoothing)
        new = pulls / pulls.sum()
        change, weights = new - weights, new
        step = -change @ finite @ change / 2
        if step <= _TOLERANCE**2 * (weights @ finite @ weights):
            break
    return weights


@final
@dataclass
class FLTrust(RobustRule):
    """FLTrust: the mean of updates scaled to a trusted client's norm, weighted by their cosine with its update.

    Args:
        trusted_client: client whose shard is the server's root set; it must be in every cohort.

    Raises:
        ConfigurationError: if it is negative.
    """

    trusted_client: int = 0

    ranges: ClassVar[dict[str, str]] = {"trusted_client": "at least 0: it is a client's number"}

    @property
    @override
    def min_updates(self) -> int:
        return 2

    def combine(self, rows: Rows, context: RuleContext) -> Floats:
        """Return FLTrust's aggregate, shape (k,).

        Raises:
            RoundFailure: if the trusted client sent no update.
        """
        if self.trusted_client not in rows.client_ids:
            raise RoundFailure(
                f"FLTrust needs the update of its trusted client {self.trusted_client}, which is not in this round: "
                "use a cohort with this client in every round, e.g. AllClients"
            )
        own = rows.client_ids.index(self.trusted_client)
        return combined(rows, trusted_shares(similarities(rows, own), row_norms(rows), own))


def similarities(rows: Rows, place: int) -> Floats:
    """Return the inner products of all rows with row number ``place``, float64, shape (n,)."""
    products = np.zeros(len(rows))
    for _, block in rows.blocks():
        products += np.einsum("ij,j->i", block, block[place], dtype=np.float64)
    return products


def trusted_shares(products: Floats, norms: Floats, own: int) -> Floats:
    """Return the factor of each update in FLTrust's aggregate, shape (n,); 0 for the trusted client's.

    Args:
        products: inner products with the trusted update, shape (n,).
        norms: L2 norms of the updates, shape (n,).
        own: row number of the trusted update.

    Example:
        >>> trusted_shares(np.array([4.0, 6.0, -2.0]), np.array([2.0, 4.0, 1.0]), 0).tolist()
        [0.0, 0.5, 0.0]
    """
    lengths = np.maximum(norms, np.finfo(float).tiny)
    trust = np.maximum(products / lengths / lengths[own], 0)
    trust[own] = 0
    total = max(trust.sum(), np.finfo(float).tiny)
    shares: Floats = trust / total * norms[own] / lengths
    return shares
