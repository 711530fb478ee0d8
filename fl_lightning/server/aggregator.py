"""Aggregators: objects to which a round's updates are added, and which then return the aggregate.

A weighted mean derives from `WeightedMean` and defines `weight`; a rule that needs all updates of a
round together is a `RobustRule`; anything else derives from `Aggregator`, or from `KeptUpdates` if it
keeps all updates until the round ends. Processes add up the sums of a mean; kept updates are sent to all
processes instead.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from itertools import islice
from typing import Any, Protocol

from torch import Tensor
from torch.optim import Optimizer
from typing_extensions import override

from fl_lightning.core.errors import ConfigurationError
from fl_lightning.core.traits import Trait, Traits
from fl_lightning.core.update import ClientUpdate, Updates
from fl_lightning.server.means.running_mean import ExactMean, RunningMean, check_summable, new_mean
from fl_lightning.server.protected import NoiseShares, Protected
from fl_lightning.server.robust.matrix import UpdateRows

# Replaces a tensor by its sum over all processes, in place
AllReduce = Callable[[Tensor], None]
# Returns one value per process, in order of rank
Gather = Callable[[Any], list[Any]]


_OF_ANY = Traits(
    needs={
        Trait.ONE_MASK: "averages an entry over all clients, even those whose mask keeps it from moving"
    },
    breaks={Trait.PRIVATE_CLIENTS: "has no proven bound on how far one client moves the model"},
    instead={
        Trait.ONE_MASK: "set aggregator to OverlapMean, or leave it out",
        Trait.PRIVATE_CLIENTS: "leave federation.aggregator out for the mean of clipped updates",
    },
)
# traits of rules that weigh clients by the length of their steps
BY_STEPS = Traits(
    needs=dict.fromkeys(
        (Trait.ONE_OPTIMIZER, Trait.ONE_RATE), "divides by the length of a client's steps"
    ),
    instead=dict.fromkeys((Trait.ONE_OPTIMIZER, Trait.ONE_RATE), "use Mean"),
)
_WITHOUT_EXAMPLES = Traits(
    breaks={
        Trait.EXAMPLE_WEIGHTS: "weights clients alike, or by something other than their examples"
    },
    instead={Trait.EXAMPLE_WEIGHTS: "use Mean, or another aggregator with weight_by_examples true"},
)
_OF_SUMS = Traits(
    needs={Trait.ONE_MASK: "adds up whole updates"},
    breaks={Trait.SINGLE_UPDATES: "shows the server only sums over whole cohorts"},
    instead={Trait.ONE_MASK: "set per_client of MaskCalibration to false"},
)
_IN_CLEAR_OVER_SITES = Traits(
    needs={Trait.SIMULATION: "can only be simulated with these options"},
    instead={
        Trait.SIMULATION: "use SecureMean with protocol: run, or EncryptedMean with CKKS and fraction: 1"
    },
)


class Aggregator(ABC):
    """Base of aggregators: `open` starts a round, `add` adds an update, `close` returns the aggregate.

    Attributes:
        exact: whether the aggregate is bit-identical for any order of the updates and any number of
            processes. Buffers are then averaged in the same way.
        is_private: whether clients' buffers are ignored, and a round without a reply is released
            like any other.
        needs_effective_steps: whether the aggregator reads ``effective_steps`` of the updates.
        weight_by_examples: whether updates are weighted by their ``num_examples``.
        exchanges: whether processes exchange more than sums, see `exchange`.
        buffers: new buffers of the model after `close`; None for the mean of the clients' buffers.
    """

    exact: bool = False
    is_private: bool = False
    needs_effective_steps: bool = False
    weight_by_examples: bool = False
    exchanges: bool = False
    buffers: Tensor | None = None
    _memory: dict[str, Tensor] | None = None

    @property
    def memory(self) -> dict[str, Tensor]:
        """Tensors that the aggregator keeps between rounds; those of shape (k,) are adapted when masks change.

        They change only between the last update of a round and the first of the next.
        """
        if self._memory is None:
            self._memory = {}
        return self._memory

    @memory.setter
    def memory(self, values: dict[str, Tensor]) -> None:
        self._memory = values

    @property
    def protection(self) -> Protected | None:
        """The aggregator itself if it hides single updates from the server (e.g. a secure sum), else None."""
        return None

    @property
    def noise_shares(self) -> TakesNoiseShares | None:
        """The aggregator itself if it can sum updates to which clients have added noise, else None."""
        return None

    @property
    def traits(self) -> Traits:
        """Conditions on a round that the aggregator needs or breaks, to detect conflicting options."""
        traits = BY_STEPS | _OF_ANY if self.needs_effective_steps else _OF_ANY
        if not self.weight_by_examples:
            traits |= _WITHOUT_EXAMPLES
        if self.protection is None:
            return traits
        if not self.protection.spans_network:
            traits |= _IN_CLEAR_OVER_SITES
        return (
            traits if self.noise_shares is None else traits.without(Trait.PRIVATE_CLIENTS)
        ) | _OF_SUMS

    def of_clients(self, optimizer: Optimizer) -> Aggregator:
        """Return the aggregator to use when clients train with this optimizer; by default the same."""
        return self

    def start_round(self, round_index: int) -> None:
        """Called before `open` with the number of the round; does nothing by default."""
        return

    @abstractmethod
    def open(self, like: Tensor) -> None:
        """Start a round of deltas with the shape (k,), dtype and device of ``like``."""

    def check(self, update: ClientUpdate, num_updates: int) -> None:
        """Raise an error if this one client's update could make the whole round fail.

        Called with finite updates that remote clients have sent, before they are added.

        Args:
            update: update of a client.
            num_updates: number of updates in the round.

        Raises:
            ClientFailure: if the aggregator cannot use the client's loss.
            RoundFailure: if an entry of the update is too large for an exact mean.
        """
        if self.exact:
            check_summable(update.buffers, update.num_examples, num_updates)

    @abstractmethod
    def add(self, update: ClientUpdate) -> None:
        """Add one client's update to the round."""

    def receive(self, updates: Updates) -> None:
        """Add several updates in order, as `add` does."""
        for update in updates:
            self.add(update)

    def new_rows(self, like: Tensor) -> UpdateRows:
        """Return an empty matrix to which the round's updates will be added as rows."""
        return UpdateRows(like)

    def exchange(self, gather: Gather, all_reduce: AllReduce) -> None:
        """Send this process's updates to all processes, so that each has all updates; called by every process."""
        return

    @abstractmethod
    def sums(self) -> list[Tensor]:
        """Return this process's partial sums, which are then added up over all processes."""

    @abstractmethod
    def load_sums(self, sums: list[Tensor]) -> None:
        """Replace this process's partial sums by the sums over all processes."""

    @abstractmethod
    def close(self) -> Tensor:
        """End the round and return the aggregate, shape (k,)."""

    @property
    def untouched(self) -> Tensor | slice:
        """Coordinates that no client of the round could change: bool of shape (k,), or an empty slice."""
        return slice(0)


class FoldedMeans(Aggregator):
    """Base of aggregators that compute weighted means only; `open` creates these, by name."""

    _means: dict[str, RunningMean | ExactMean]

    @override
    def sums(self) -> list[Tensor]:
        return [tensor for mean in self._means.values() for tensor in mean.sums()]

    @override
    def load_sums(self, sums: list[Tensor]) -> None:
        left = iter(sums)
        for mean in self._means.values():
            mean.load_sums(list(islice(left, len(mean.sums()))))


class WeightedMean(FoldedMeans):
    """A weighted mean of updates Δ_k: Σ_k w_k Δ_k / Σ_k w_k. Subclasses define `weight`.

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
        """Return an update's weight in the mean, finite and ≥ 0 (0 ignores it), whole if `exact` is true."""

    @override
    def open(self, like: Tensor) -> None:
        self._mean = new_mean(like, exact=self.exact)
        self._means = {"mean": self._mean}

    @override
    def check(self, update: ClientUpdate, num_updates: int) -> None:
        super().check(update, num_updates)
        if self.exact:
            check_summable(update.delta, self.weight(update), num_updates)

    def add(self, update: ClientUpdate) -> None:
        """Add one client's update to the weighted mean.

        Raises:
            ConfigurationError: if its weight is negative or not finite, or no whole number while `exact` is true.
        """
        weight = self.weight(update)
        if not 0 <= weight < math.inf or (self.exact and weight % 1):
            raise ConfigurationError(
                f"{type(self).__name__}.weight returned {weight} for client {update.client_id}: it must be finite "
                "and at least 0, and a whole number if exact is true"
            )
        self._mean.add(update.delta, weight)

    @override
    def close(self) -> Tensor:
        return self._mean.value()


class PrivateAggregator(Aggregator):
    """Base of aggregators for client-level privacy, which add up updates clipped to an L2 norm.

    Attributes:
        clip_norm: bound of an update's L2 norm in the current round, set before `open`.
    """

    is_private = True

    clip_norm: float = float("inf")

    @property
    @abstractmethod
    def num_unclipped(self) -> int:
        """Number of the round's updates whose L2 norm is within the clipping norm."""

    @property
    @abstractmethod
    def num_replies(self) -> int:
        """Number of updates received so far in the round."""


class TakesNoiseShares(Protocol):
    """An aggregator that can sum integer updates to which each client has added a share of the noise."""

    def fewest_survivors(self, num_clients: int) -> int:
        """Return the smallest number of updates that may be summed if the cohort has ``num_clients``."""

    def with_noise_shares(self, shares: Callable[[], NoiseShares]) -> PrivateAggregator:
        """Return an aggregator that sums integer updates with noise; called after `Protected.begin`."""


class KeptUpdates(Aggregator):
    """Base of aggregators that need all updates at once, as rows of a matrix, e.g. for a median."""

    exchanges = True

    _rows: UpdateRows

    @property
    def reader(self) -> str:
        """Name of the aggregator that compares the updates, for error messages."""
        return type(self).__name__

    def add(self, update: ClientUpdate) -> None:
        """Add one update as a row of the matrix.

        Raises:
            ConfigurationError: if the client has a mask of its own.
        """
        check_whole(update, self.reader)
        self._rows.append(update)

    @override
    def exchange(self, gather: Gather, all_reduce: AllReduce) -> None:
        self._rows = self._rows.exchange(gather, all_reduce)

    def sums(self) -> list[Tensor]:
        """Return an empty list: this aggregator has no sums, and `exchange` sends whole updates."""
        return []

    @override
    def load_sums(self, sums: list[Tensor]) -> None:
        assert not sums


def check_whole(update: ClientUpdate, name: str) -> None:
    """Raise ConfigurationError if the client trained with its own mask, so that its update lacks coordinates."""
    if update.active is not None:
        raise ConfigurationError(
            f"{name} compares whole updates, and client {update.client_id} has a mask of its own: use one mask "
            "for all clients, or aggregator OverlapMean"
        )
