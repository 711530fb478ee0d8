"""FedAvg's aggregation.

    mean = Σ_k w_k Δ_k / Σ_k w_k        w_k = n_k, or 1 if clients count alike

Source: McMahan et al. 2017, Algorithm 1 with the paper's own erratum: the sum of weights runs over
the clients that were sampled, not over all. Updates are added in the order in which they arrive;
clients train in increasing order of their ids, so the sum is the same in every run. Several
processes each fold the updates of their own clients; what they have then is added up.
"""

from __future__ import annotations

from fl_lightning.core.traits import Trait, Traits
from fl_lightning.core.update import ClientUpdate, Updates
from fl_lightning.server.aggregator import WeightedMean

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
        alike = [1] * len(updates.num_examples)
        weights = updates.num_examples if self.weight_by_examples else alike
        self._mean.add_rows(updates.deltas, weights)
