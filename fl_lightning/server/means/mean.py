"""Means of updates: FedAvg's, that of clients with masks of their own, FedNova's.

FedAvg's aggregation.

    mean = Σ_k w_k Δ_k / Σ_k w_k        w_k = n_k, or 1 if clients count alike

Source: McMahan et al. 2017, Algorithm 1 with the paper's own erratum: the sum of weights runs over
the clients that were sampled, not over all. Updates are added in the order in which they arrive;
clients train in increasing order of their ids, so the sum is the same in every run. Several
processes each fold the updates of their own clients; what they have then is added up.

The mean where clients move different coordinates: each is averaged over those that may move it.

    Δ_j = Σ_i n_i m_ij Δ_ij / Σ_i n_i m_ij,   0 where nobody may

With masks of the clients' own, the plain mean would count a client that may not move a coordinate
as one that wants it to stay. If all may move all, this is the plain mean, bit for bit. A coordinate
that nobody of a round may move keeps its bits in it, whatever the server's optimizer remembers.

FedNova's aggregation: clients that took more steps do not count for more.

    Δ = τ Σ_i p_i Δ_i / ‖a_i‖₁,      τ = Σ_i p_i ‖a_i‖₁,      p_i = n_i / Σ n

‖a_i‖₁ is how many gradients a client's delta adds up to: its local steps for plain SGD, else see
`fl_lightning.client.local_solver`. Source: Wang et al. 2020, "Tackling the Objective Inconsistency
Problem in Heterogeneous Federated Optimization", equation 6 with τ_eff of section 4.1.
"""

from __future__ import annotations

from typing import Any, final

import torch
from torch import Tensor

from fl_lightning.core.errors import ConfigurationError
from fl_lightning.core.traits import Trait, Traits
from fl_lightning.core.update import ClientUpdate, Updates
from fl_lightning.server.aggregator import Aggregator, WeightedMean
from fl_lightning.server.means.running_mean import new_mean

_BY_EXAMPLES = Traits(
    breaks={
        Trait.PRIVATE_CLIENTS: "weighs clients by their examples, so that one with many moves the model by "
        "more than its clip norm"
    },
    instead={
        Trait.PRIVATE_CLIENTS: "set the aggregator's weight_by_examples to false, or leave the aggregator out"
    },
)


class Mean(WeightedMean):
    """The mean of a round's updates, FedAvg's aggregation.

    Args:
        weight_by_examples: weigh each update by its ``num_examples``; else count clients alike.
        exact: give the same bits over any number of processes, see `ExactMean`, for four times the
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
        """Private where clients count alike; weights by examples have no bound."""
        traits = super().traits
        return (
            traits | _BY_EXAMPLES
            if self.weight_by_examples
            else traits.without(*_BY_EXAMPLES.breaks)
        )

    def weight(self, update: ClientUpdate) -> float:
        """Return its examples, or 1."""
        return update.num_examples if self.weight_by_examples else 1

    def receive(self, updates: Updates) -> None:
        """Add some updates at once, with the bits of one after the other."""
        if type(self).weight is not Mean.weight:  # of a class of the user's
            super().receive(updates)
            return
        alike = [1] * len(updates.num_examples)
        weights = updates.num_examples if self.weight_by_examples else alike
        self._mean.add_rows(updates.deltas, weights)


@final
class OverlapMean(Aggregator):
    """The mean of a round's updates over the clients that may move each coordinate.

    Takes three times the memory of `Mean`: the sum of weights belongs to a coordinate.

    Args:
        weight_by_examples: weigh each update by its ``num_examples``; else count clients alike.

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
        """It counts, for every coordinate, only clients that may move it."""
        return super().traits.without(Trait.ONE_MASK)

    def open(self, like: Tensor) -> None:
        """Start from zero."""
        self._mean = torch.zeros_like(like)
        self._weights = torch.zeros_like(like, dtype=torch.float64)

    def add(self, update: ClientUpdate) -> None:
        """Add one update; without ``active`` all its coordinates count."""
        weight = update.num_examples if self.weight_by_examples else 1
        own: Tensor | int = weight if update.active is None else weight * update.active
        self._weights += own
        share = own / self._weights.clamp(min=1)
        self._mean.lerp_(update.delta, share.to(self._mean.dtype))

    def sums(self) -> list[Tensor]:
        """Return what adds up over processes."""
        return [self._mean * self._weights, self._weights]

    def load_sums(self, sums: list[Tensor]) -> None:
        """Go on with the updates of all processes."""
        total, self._weights = sums
        self._mean = (total / self._weights.clamp(min=1)).to(self._mean.dtype)

    def close(self) -> Tensor:
        """Return the mean."""
        return self._mean

    @property
    def untouched(self) -> Tensor:
        """The coordinates that nobody may move: bool, shape (k,)."""
        return self._weights == 0

    def state_dict(self) -> dict[str, Any]:
        """Return the mean so far and its weights."""
        return {"mean": self._mean, "weights": self._weights}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from there."""
        self._mean.copy_(state["mean"])
        self._weights.copy_(state["weights"])


@final
class NormalisedMean(Aggregator):
    """The mean of the clients' average gradients, times their mean number of steps.

    With equal numbers of steps it is `Mean`, but for rounding. The clients' optimizer must be SGD,
    with or without momentum; a correction's pull (FedProx) is accounted for. A client whose optimizer
    took no step, because all its batches were skipped, counts for nothing.

    Args:
        weight_by_examples: weigh each update by its ``num_examples``; else count clients alike.
        exact: give the same bits over any number of processes, see `Mean`.

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

    def open(self, like: Tensor) -> None:
        """Start from zero."""
        self._directions = new_mean(like, exact=self.exact)
        wide = like.dtype if like.device.type == "mps" else torch.float64
        self._steps = new_mean(like.new_empty((), dtype=wide), exact=self.exact)

    def add(self, update: ClientUpdate) -> None:
        """Add one update.

        Raises:
            ConfigurationError: if it does not say how many gradients it adds up to, or none though
                it moved.
        """
        steps = update.effective_steps
        if update.optimizer_steps == 0 and not bool(update.delta.any()):
            return
        if steps is None or not steps > 0:
            raise ConfigurationError(
                f"NormalisedMean divides by the gradients that an update adds up to, client "
                f"{update.client_id} has {steps}: use Mean, or a smaller learning rate or pull"
            )
        weight = update.num_examples if self.weight_by_examples else 1
        self._directions.add(update.delta / steps, weight)
        self._steps.add(update.delta.new_tensor(steps, dtype=self._steps.value().dtype), weight)

    def sums(self) -> list[Tensor]:
        """Return what adds up over processes."""
        return [*self._directions.sums(), *self._steps.sums()]

    def load_sums(self, sums: list[Tensor]) -> None:
        """Go on with the updates of all processes."""
        half = len(sums) // 2
        self._directions.load_sums(sums[:half])
        self._steps.load_sums(sums[half:])

    def close(self) -> Tensor:
        """Return the normalised mean."""
        directions = self._directions.value()
        return directions * self._steps.value().to(directions.dtype)

    def state_dict(self) -> dict[str, Any]:
        """Return both means so far."""
        return {"directions": self._directions.state_dict(), "steps": self._steps.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from there."""
        self._directions.load_state_dict(state["directions"])
        self._steps.load_state_dict(state["steps"])
