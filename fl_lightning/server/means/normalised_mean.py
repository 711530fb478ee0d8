"""FedNova's aggregation: clients that took more steps do not count for more.

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
from fl_lightning.core.update import ClientUpdate
from fl_lightning.server.aggregator import Aggregator
from fl_lightning.server.means.running_mean import new_mean


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
