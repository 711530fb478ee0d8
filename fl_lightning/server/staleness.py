"""Asynchronous rules: the weight of an update that was computed from an older model.

    FedBuff:   Δ_i ← s(τ_i) Δ_i,  then the server steps on the aggregate of K of them
    FedAsync:  x ← (1 - α s(τ)) x + α s(τ) y       that is Δ ← α s(τ) (x - y),  with K = 1

τ is an update's staleness: the number of server steps between the client's start and the update's
arrival; y is the client's model, x the current one. s(0) = 1: without stale updates FedBuff is FedAvg.

Sources: FedBuff, Nguyen et al. 2022, AISTATS (2106.06639), Algorithm 1, s(τ) = (1 + τ)^-1/2;
FedAsync, Xie et al. 2019 (1903.03934), Algorithm 1 and section 5.2 (polynomial, hinge).
Differs: FedBuff's mean is the federation's aggregator, which weighs by examples by default; as
published it is ``Mean(weight_by_examples=False)``. FedAsync's proximal term is set by the clients'
correction. Buffers (statistics of batch norm), which neither paper mentions, are mixed with the
current ones by the same weight, b ← (1 - w) b + w b_i, w = s(τ) or α s(τ).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar, Protocol, final

from torch import Tensor

from fl_lightning.core.errors import Ranged
from fl_lightning.core.traits import Trait, Traits


class Staleness(Protocol):
    """A weight for late updates that falls with their staleness τ, the number of server steps missed."""

    def weight(self, staleness: int) -> float:
        """Return the weight s(τ) in (0, 1] of an update that is τ ≥ 0 server steps late; s(0) = 1."""


@final
@dataclass(frozen=True)
class PolynomialStaleness(Ranged):
    """Weight of an update that is τ server steps late: s(τ) = (1 + τ)^-a.

    Args:
        exponent: a ≥ 0; 0 ignores staleness.

    Example:
        >>> [round(PolynomialStaleness(0.5).weight(tau), 4) for tau in (0, 1, 3)]
        [1.0, 0.7071, 0.5]
    """

    exponent: float = 0.5

    ranges: ClassVar[dict[str, str]] = {"exponent": "at least 0 and finite"}

    def weight(self, staleness: int) -> float:
        """Return the weight s(τ) of an update that is τ server steps late."""
        return float((1 + staleness) ** -self.exponent)


@final
@dataclass(frozen=True)
class HingeStaleness(Ranged):
    """Weight of an update τ server steps late: s(τ) = 1 up to τ = b, then 1 / (a (τ - b) + 1).

    Args:
        slope: a ≥ 0.
        grace: b ≥ 0, in server steps.

    Example:
        >>> [HingeStaleness(slope=1.0, grace=2).weight(tau) for tau in (0, 2, 3)]
        [1.0, 1.0, 0.5]
    """

    slope: float = 10.0
    grace: int = 4

    ranges: ClassVar[dict[str, str]] = {
        "slope": "at least 0 and finite",
        "grace": "at least 0 rounds",
    }

    def weight(self, staleness: int) -> float:
        """Return the weight s(τ) of an update that is τ server steps late."""
        return 1 / (self.slope * max(0, staleness - self.grace) + 1)


ASYNCHRONOUS = Traits(
    needs={
        Trait.SINGLE_UPDATES: "weighs each update by its staleness",
        Trait.ONE_MASK: "lets clients start from models of several rounds, whose masks differ",
    },
    breaks={
        Trait.COHORTS: "waits for no cohort: clients start at any time, from models of several rounds",
        Trait.PRIVATE_CLIENTS: "releases means of updates for which no ε is proved",
        Trait.PRIVATE_EXAMPLES: "does not fix in advance how often a client trains",
    },
    instead=dict.fromkeys(
        (Trait.SINGLE_UPDATES, Trait.COHORTS, Trait.PRIVATE_CLIENTS, Trait.PRIVATE_EXAMPLES),
        "leave asynchronous out",
    )
    | {Trait.ONE_MASK: "use one mask for all"},
)

# traits of rules with one update per server step, whose weight by examples cancels out
ONE_BY_ONE = Traits(
    breaks={Trait.EXAMPLE_WEIGHTS: "steps on one update at a time, whose weight cancels out"},
    instead={Trait.EXAMPLE_WEIGHTS: "use FedBuff with a larger buffer_size"},
)


@dataclass(frozen=True, kw_only=True)
class AsyncRule(Ranged, ABC):
    """Base of asynchronous rules: number of clients that train at once, and weights of late updates."""

    concurrency: int
    staleness: Staleness | None = None

    ranges: ClassVar[dict[str, str]] = dict.fromkeys(
        ("concurrency", "buffer_size"), "at least 1 client"
    )

    @property
    def buffer_size(self) -> int:
        """Number of updates that the server waits for before each of its steps."""
        return 1

    @property
    def traits(self) -> Traits:
        """Conditions on a round that an asynchronous server needs or breaks, to detect conflicting options."""
        return ASYNCHRONOUS | ONE_BY_ONE if self.buffer_size == 1 else ASYNCHRONOUS

    def weight(self, tau: int) -> float:
        """Return the weight s(τ) of an update that is τ server steps late."""
        return (self.staleness or PolynomialStaleness()).weight(tau)

    @abstractmethod
    def weighed(self, deltas: Tensor, staleness: int, drift: Tensor | None) -> Tensor:
        """Return updates multiplied by their staleness weights, with the shape of ``deltas``.

        Args:
            deltas: start minus end of a client's training, shape (k,), or one row per client, (m, k).
            staleness: τ ≥ 0 of all these updates.
            drift: the current model minus the model that these clients started from, shape (k,); None if τ = 0.
        """


@final
@dataclass(frozen=True, kw_only=True)
class FedBuff(AsyncRule):
    """FedBuff: the server takes a step whenever it has received ``buffer_size`` updates.

    Args:
        concurrency: number of clients that train at any time, ≥ 1.
        buffer_size: updates per server step, K ≥ 1.
        staleness: weight of stale updates; (1 + τ)^-1/2 if None.

    Example:
        >>> import torch
        >>> rule = FedBuff(concurrency=20)
        >>> rule.weighed(torch.tensor([-1.0, 1.0]), staleness=3, drift=torch.zeros(2))
        tensor([-0.5000,  0.5000])
    """

    buffer_size: int = 10

    def weighed(self, deltas: Tensor, staleness: int, drift: Tensor | None) -> Tensor:
        """Return the updates Δ times their staleness weight, s(τ) Δ."""
        weight = self.weight(staleness)
        return deltas if weight == 1 else deltas * weight


@final
@dataclass(frozen=True, kw_only=True)
class FedAsync(AsyncRule):
    """FedAsync: the server mixes each client's model into its own as soon as it arrives.

    Args:
        concurrency: number of clients that train at any time, ≥ 1.
        mixing: α in (0, 1], the weight of a model that is not stale.
        staleness: weight of stale models; (1 + τ)^-1/2 if None.

    Example:
        >>> import torch
        >>> delta, drift = torch.tensor([0.25]), torch.tensor([1.0])
        >>> FedAsync(concurrency=4, mixing=0.5).weighed(delta, staleness=3, drift=drift)
        tensor([0.3125])
    """

    mixing: float = 0.6

    ranges: ClassVar[dict[str, str]] = {"mixing": "in (0, 1]"}

    def weighed(self, deltas: Tensor, staleness: int, drift: Tensor | None) -> Tensor:
        """Return the server's step α s(τ) (x - y), with x the server's and y the client's model."""
        weight = self.mixing * self.weight(staleness)
        apart = deltas if drift is None else deltas + drift
        return apart if weight == 1 else apart * weight
