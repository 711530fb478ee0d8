"""Means of updates: of FedAvg, for clients with masks of their own, and of FedNova.

FedAvg:

    mean = Σ_k w_k Δ_k / Σ_k w_k        w_k = n_k, or 1 if clients count alike

Source: McMahan et al. 2017, Algorithm 1 with the paper's own erratum: the sum of weights runs over
the clients that were sampled, not over all. Updates are added in the order in which they arrive;
clients train in increasing order of their ids, so the sum is the same in every run. Several
processes each fold the updates of their own clients; their sums are then added up.

Clients with masks of their own: each coordinate is averaged over the clients that may move it.

    Δ_j = Σ_i n_i m_ij Δ_ij / Σ_i n_i m_ij,   0 if no client may move it

The plain mean would count a client that may not move a coordinate as one that wants it to stay. If
all clients may move all coordinates, this is the plain mean, bit for bit. A coordinate that no client
of a round may move stays bit-identical in that round, whatever the server's optimizer remembers.

FedNova: clients that took more steps do not count more.

    Δ = τ Σ_i p_i Δ_i / ‖a_i‖₁,      τ = Σ_i p_i ‖a_i‖₁,      p_i = n_i / Σ n

‖a_i‖₁ is the number of gradients in a client's delta: its local steps for plain SGD, else see
`fl_lightning.client.local_solver`. Source: Wang et al. 2020, "Tackling the Objective Inconsistency
Problem in Heterogeneous Federated Optimization", equation 6 with τ_eff of section 4.1.
"""

from __future__ import annotations

from typing import final

import torch
from torch import Tensor
from typing_extensions import override

from fl_lightning.core.errors import ConfigurationError
from fl_lightning.core.traits import Trait, Traits
from fl_lightning.core.update import ClientUpdate, Updates
from fl_lightning.server.aggregator import Aggregator, FoldedMeans, WeightedMean
from fl_lightning.server.means.running_mean import check_summable, new_mean

_BY_EXAMPLES = Traits(
    breaks={
        Trait.PRIVATE_CLIENTS: "weighs clients by their examples, so that a client with many can move the model "
        "by more than the clip norm"
    },
    instead={
        Trait.PRIVATE_CLIENTS: "set the aggregator's weight_by_examples to false, or leave the aggregator out"
    },
)


class Mean(WeightedMean):
    """Mean of a round's updates, as in FedAvg.

    Args:
        weight_by_examples: weigh each update by its ``num_examples``; else weigh clients equally.
        exact: be bit-identical over any number of processes, see `ExactMean`, for four times the
            memory. Else results over different numbers of processes agree to about 1e-6.

    Example:
        >>> import torch
        >>> def aggregate(aggregator):
        ...     aggregator.open(torch.empty(1))
        ...     for value, n in ((2.0, 1), (4.0, 3)):
        ...         aggregator.add(ClientUpdate(0, torch.tensor([value]), torch.empty(0), n, 1))
        ...     return aggregator.close()
        >>> aggregate(Mean()), aggregate(Mean(weight_by_examples=False))
        (tensor([3.5000]), tensor([3.]))
    """

    def __init__(self, weight_by_examples: bool = True, exact: bool = False) -> None:
        self.weight_by_examples = weight_by_examples
        self.exact = exact

    @property
    def traits(self) -> Traits:
        """Conditions on a round that the mean needs or breaks; weights by examples break client-level privacy."""
        if self.weight_by_examples:
            return super().traits | _BY_EXAMPLES
        return super().traits.without(*_BY_EXAMPLES.breaks)

    def weight(self, update: ClientUpdate) -> float:
        """Return the client's number of examples, or 1 if clients have equal weights."""
        return update.num_examples if self.weight_by_examples else 1

    def receive(self, updates: Updates) -> None:
        """Add several updates at once; bit-identical to adding one after the other."""
        if type(self).weight is not Mean.weight:  # a user's subclass
            super().receive(updates)
            return
        alike = [1] * len(updates.num_examples)
        weights = updates.num_examples if self.weight_by_examples else alike
        self._mean.add_rows(updates.deltas, weights)


@final
class OverlapMean(Aggregator):
    """Mean of each coordinate over the clients whose masks let it train.

    It needs three times the memory of `Mean`, for a sum of weights per coordinate.

    Args:
        weight_by_examples: weigh each update by its ``num_examples``; else weigh clients equally.

    Example:
        >>> aggregator = OverlapMean()
        >>> aggregator.open(torch.empty(3))
        >>> for delta, active in (([2.0, 4.0, 0.0], [1, 1, 0]), ([0.0, 8.0, 0.0], [0, 1, 0])):
        ...     values = torch.tensor(delta), torch.empty(0), 10, 1
        ...     aggregator.add(ClientUpdate(0, *values, active=torch.tensor(active) > 0))
        >>> aggregator.close()
        tensor([2., 6., 0.])
    """

    def __init__(self, weight_by_examples: bool = True) -> None:
        self.weight_by_examples = weight_by_examples

    @property
    def traits(self) -> Traits:
        """Conditions on a round that the mean needs or breaks; clients may have different masks."""
        return super().traits.without(Trait.ONE_MASK)

    @override
    def open(self, like: Tensor) -> None:
        self._mean = torch.zeros_like(like)
        self._weights = torch.zeros_like(like, dtype=torch.float64)

    def add(self, update: ClientUpdate) -> None:
        """Add one update; only coordinates in its ``active`` count, or all if that is None."""
        weight = update.num_examples if self.weight_by_examples else 1
        own: Tensor | int = weight if update.active is None else weight * update.active
        self._weights += own
        share = own / self._weights.clamp(min=1)
        self._mean.lerp_(update.delta, share.to(self._mean.dtype))

    @override
    def sums(self) -> list[Tensor]:
        return [self._mean * self._weights, self._weights]

    @override
    def load_sums(self, sums: list[Tensor]) -> None:
        total, self._weights = sums
        self._mean = (total / self._weights.clamp(min=1)).to(self._mean.dtype)

    @override
    def close(self) -> Tensor:
        return self._mean

    @property
    @override
    def untouched(self) -> Tensor:
        return self._weights == 0


@final
class NormalisedMean(FoldedMeans):
    """FedNova: the mean of the clients' average gradients, times their mean number of steps.

    With equal numbers of steps it is `Mean`, up to rounding. The clients' optimizer must be SGD,
    with or without momentum; a correction's pull (FedProx) is accounted for. A client whose optimizer
    took no step, because all its batches were skipped, is ignored.

    Args:
        weight_by_examples: weigh each update by its ``num_examples``; else weigh clients equally.
        exact: be bit-identical over any number of processes, see `Mean`.

    Example:
        >>> aggregator = NormalisedMean(weight_by_examples=False)
        >>> aggregator.open(torch.empty(1))
        >>> for delta, steps in ((2.0, 1), (9.0, 3)):
        ...     update = ClientUpdate(
        ...         0, torch.tensor([delta]), torch.empty(0), 10, steps, effective_steps=steps
        ...     )
        ...     aggregator.add(update)
        >>> aggregator.close()
        tensor([5.])
    """

    needs_effective_steps = True

    def __init__(self, weight_by_examples: bool = True, exact: bool = False) -> None:
        self.weight_by_examples = weight_by_examples
        self.exact = exact

    @override
    def open(self, like: Tensor) -> None:
        self._directions = new_mean(like, exact=self.exact)
        wide = like.dtype if like.device.type == "mps" else torch.float64
        self._steps = new_mean(like.new_empty((), dtype=wide), exact=self.exact)
        self._means = {"directions": self._directions, "steps": self._steps}

    @override
    def check(self, update: ClientUpdate, num_updates: int) -> None:
        super().check(update, num_updates)
        if self.exact and (steps := update.effective_steps):
            weight = update.num_examples if self.weight_by_examples else 1
            for vector in (update.delta / steps, torch.tensor(steps)):
                check_summable(vector, weight, num_updates)

    def add(self, update: ClientUpdate) -> None:
        """Add one client's update to the mean.

        Raises:
            ConfigurationError: if its ``effective_steps`` are missing, or 0 though the client moved.
        """
        steps = update.effective_steps
        if update.optimizer_steps == 0 and not bool(update.delta.any()):
            return
        if steps is None or not steps > 0:
            raise ConfigurationError(
                f"NormalisedMean divides an update by its effective number of gradient steps, which is {steps} "
                f"for client {update.client_id}: use Mean, or a smaller learning rate or pull"
            )
        weight = update.num_examples if self.weight_by_examples else 1
        self._directions.add(update.delta / steps, weight)
        self._steps.add(update.delta.new_tensor(steps, dtype=self._steps.value().dtype), weight)

    @override
    def close(self) -> Tensor:
        directions = self._directions.value()
        return directions * self._steps.value().to(directions.dtype)
