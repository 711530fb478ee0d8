"""Aggregators: folds over a round's updates. What a leaf does not need it inherits.

An aggregator by weights is a class on `WeightedMean` with a `weight`; a rule that looks at all updates
together is a `RobustRule`; anything else derives from `Aggregator`.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, Protocol

from torch import Tensor
from torch.optim import Optimizer

from fl_lightning.core.errors import ConfigurationError
from fl_lightning.core.traits import Trait, Traits
from fl_lightning.core.update import ClientUpdate, Updates
from fl_lightning.server.means.running_mean import new_mean
from fl_lightning.server.protected import NoiseShares, Protected
from fl_lightning.server.robust.matrix import UpdateRows
from fl_lightning.server.robust.rule import RobustRule

# Replaces a tensor by its sum over all processes, in place
AllReduce = Callable[[Tensor], None]
# Returns what every process gave, in order of rank
Gather = Callable[[Any], list[Any]]


_OF_ANY = Traits(
    needs={
        Trait.ONE_MASK: "counts a client that may not move an entry as one that wants it to stay"
    },
    breaks={Trait.PRIVATE_CLIENTS: "has no proven bound on how far one client moves the model"},
    instead={
        Trait.ONE_MASK: "set aggregator to OverlapMean, or leave it out",
        Trait.PRIVATE_CLIENTS: "leave federation.aggregator out for the mean of clipped updates",
    },
)
# of rules that weigh clients by what they report, or by how far they step
BY_LOSSES = Traits(
    breaks={Trait.PRIVATE_EXAMPLES: "weighs clients by their training losses, which have no noise"},
    instead={Trait.PRIVATE_EXAMPLES: "use Mean, or another rule that looks at updates alone"},
)
BY_STEPS = Traits(
    needs=dict.fromkeys(
        (Trait.ONE_OPTIMIZER, Trait.ONE_RATE), "divides by the length of a client's steps"
    ),
    instead=dict.fromkeys((Trait.ONE_OPTIMIZER, Trait.ONE_RATE), "use Mean"),
)
_OF_SUMS = Traits(
    needs={Trait.ONE_MASK: "adds up whole updates"},
    breaks={Trait.SINGLE_UPDATES: "shows the server sums of whole cohorts only"},
    instead={Trait.ONE_MASK: "set per_client of MaskCalibration to false"},
)
_IN_CLEAR_OVER_SITES = Traits(
    needs={Trait.SIMULATION: "is simulated only as it is configured"},
    instead={
        Trait.SIMULATION: "use SecureMean with protocol: run, or EncryptedMean with CKKS and fraction: 1"
    },
)


class Aggregator(ABC):
    """A fold over a round's updates.

    Attributes:
        exact: whether the aggregate has the same bits in whatever order the updates come and over
            however many processes they are spread. Buffers are then averaged in the same way.
        is_private: whether clients' buffers are not taken, and a round without a reply is a release
            like any other.
        needs_effective_steps: whether it reads how many gradients an update adds up to.
        exchanges: whether processes hand over more of a round than sums, see `exchange`.
        restarts: whether a round that is resumed begins with its first client.
    """

    exact: bool = False
    is_private: bool = False
    needs_effective_steps: bool = False
    exchanges: bool = False
    restarts: bool = False
    _memory: dict[str, Tensor] | None = None

    @property
    def memory(self) -> dict[str, Tensor]:
        """What it keeps from round to round; vectors of shape (k,) follow the model to other coordinates.

        It changes only between the last update of a round and the first of the next.
        """
        if self._memory is None:
            self._memory = {}
        return self._memory

    @memory.setter
    def memory(self, values: dict[str, Tensor]) -> None:
        self._memory = values

    @property
    def robust_rule(self) -> RobustRule | None:
        """The rule that judges a round's updates; None where there is no such rule."""
        return None

    @property
    def protection(self) -> Protected | None:
        """What hides updates from the server: itself, or None where the server sees them."""
        return None

    @property
    def noise_shares(self) -> TakesNoiseShares | None:
        """What adds up whole numbers with clients' noise: itself, or None where it cannot."""
        return None

    @property
    def traits(self) -> Traits:
        """Traits of the aggregator; a leaf adds to them or drops some."""
        traits = BY_STEPS | _OF_ANY if self.needs_effective_steps else _OF_ANY
        if self.protection is None:
            return traits
        if self.protection.over_sites is None:
            traits |= _IN_CLEAR_OVER_SITES
        return (
            traits if self.noise_shares is None else traits.without(Trait.PRIVATE_CLIENTS)
        ) | _OF_SUMS

    def of_clients(self, optimizer: Optimizer) -> Aggregator:
        """Return what aggregates the updates of clients that train with such an optimizer: itself."""
        return self

    def start_round(self, round_index: int) -> None:
        """Learn which round comes next."""
        return

    @abstractmethod
    def open(self, like: Tensor) -> None:
        """Start a round; updates have shape, dtype and device of ``like``, shape (k,)."""

    @abstractmethod
    def add(self, update: ClientUpdate) -> None:
        """Take in one update."""

    def receive(self, updates: Updates) -> None:
        """Take in some updates, one after the other."""
        for update in updates:
            self.add(update)

    def new_rows(self, like: Tensor) -> UpdateRows:
        """Return a place for a round's updates, side by side."""
        return UpdateRows(like)

    def exchange(self, gather: Gather, all_reduce: AllReduce) -> None:
        """Take the updates of all processes for one's own; to be called by all of them."""
        return

    @abstractmethod
    def sums(self) -> list[Tensor]:
        """Return tensors which, added up over processes, are those of all updates together."""

    @abstractmethod
    def load_sums(self, sums: list[Tensor]) -> None:
        """Take the updates of all processes for one's own, given the added `sums`."""

    @abstractmethod
    def close(self) -> Tensor:
        """End the round and return the aggregate, shape (k,)."""

    @property
    def buffers(self) -> Tensor | None:
        """What the buffers of the round that was closed become; None for their mean."""
        return None

    @property
    def untouched(self) -> Tensor | slice:
        """The coordinates that no client of the round may move: bool of shape (k,), or none."""
        return slice(0)

    @abstractmethod
    def state_dict(self) -> dict[str, Any]:
        """Return the open round's state: tensors and numbers."""

    @abstractmethod
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on with an open round."""


class WeightedMean(Aggregator):
    """A mean of updates by weights: Σ_k w_k Δ_k / Σ_k w_k.

    Sums over processes, checkpoints inside a round and exactness are here; a leaf has a `weight`.

    Example:
        >>> import torch
        >>> class ByNorm(WeightedMean):
        ...     def weight(self, update):
        ...         return float(update.norm)
        >>> mean = ByNorm()
        >>> mean.open(torch.empty(1))
        >>> for value in (1.0, 3.0):
        ...     mean.add(ClientUpdate(0, torch.tensor([value]), torch.empty(0), 10, 1))
        >>> mean.close()
        tensor([2.5000])
    """

    @abstractmethod
    def weight(self, update: ClientUpdate) -> float:
        """Return the weight of an update, finite and ≥ 0; 0 leaves it out."""

    def open(self, like: Tensor) -> None:
        """Start from zero."""
        self._mean = new_mean(like, exact=self.exact)

    def add(self, update: ClientUpdate) -> None:
        """Add one update.

        Raises:
            ConfigurationError: if its weight is none.
        """
        weight = self.weight(update)
        if not 0 <= weight < math.inf:
            raise ConfigurationError(
                f"{type(self).__name__} weighs the update of client {update.client_id} by {weight}: "
                "have weight return a finite number that is at least 0"
            )
        self._mean.add(update.delta, weight)

    def sums(self) -> list[Tensor]:
        """Return what adds up over processes."""
        return self._mean.sums()

    def load_sums(self, sums: list[Tensor]) -> None:
        """Go on with the updates of all processes."""
        self._mean.load_sums(sums)

    def close(self) -> Tensor:
        """Return the mean."""
        return self._mean.value()

    def state_dict(self) -> dict[str, Any]:
        """Return the mean so far and its weight."""
        return self._mean.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from there."""
        self._mean.load_state_dict(state)


class PrivateAggregator(Aggregator):
    """Folds clipped updates.

    Attributes:
        clip_norm: of the present round, set by whoever opens it.
    """

    is_private = True

    clip_norm: float = float("inf")

    @property
    @abstractmethod
    def num_unclipped(self) -> int:
        """Updates that were within the clip norm."""

    @property
    @abstractmethod
    def num_replies(self) -> int:
        """Updates so far."""


class TakesNoiseShares(Protocol):
    """An aggregator that can add up whole numbers with clients' noise."""

    def fewest_survivors(self, num_clients: int) -> int:
        """Return how many vectors a sum over a cohort has at least."""

    def with_noise_shares(self, shares: Callable[[], NoiseShares]) -> PrivateAggregator:
        """Return what adds up whole numbers with noise; to be called after `Protected.begin`."""
