"""AFL: the mean for the worst mixture of clients, which the server looks for as it goes.

    min over x of max over λ of Σ_k λ_k F_k(x),    λ_k ≥ 0,  Σ_k λ_k = 1
    aggregate = Σ_S λ_k Δ_k / Σ_S λ_k;    then λ ← Π(λ + γ F(x)), Π onto the simplex

Source: Mohri, Sivek, Suresh 2019, Agnostic Federated Learning, Algorithm Stochastic-AFL; projection:
Duchi et al. 2008, Efficient Projections onto the l1-Ball. Differs: clients take as many local steps as
they like between two steps of λ; F_k is the mean loss of these steps, as in `QFedAvg`; of clients that
are not in the round λ only changes through the projection.
"""

from __future__ import annotations

from typing import Any, final

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from fl_lightning.core.errors import ConfigurationError
from fl_lightning.core.traits import Traits
from fl_lightning.core.update import ClientUpdate
from fl_lightning.server.aggregator import BY_LOSSES, AllReduce, Gather, WeightedMean
from fl_lightning.server.means.fair_means import reported_loss

_CLIENTS, _SHARES = "clients", "shares"


@final
class AFL(WeightedMean):
    """Agnostic federated learning; with step 0 it is the mean that counts clients alike.

    Clients begin with equal weights; one that comes later begins with the mean of those there are.

    Args:
        step: γ ≥ 0, of λ, in units of one over the loss.

    Raises:
        ConfigurationError: if the step is negative.

    Attributes:
        memory: λ from round to round, times the number of clients, shape (N, 1), and whose they are.

    Example:
        >>> aggregator = AFL(step=0.25)
        >>> def aggregate():
        ...     aggregator.open(torch.empty(1))
        ...     for client, (delta, loss) in enumerate(((1.0, 3.0), (2.0, 1.0))):
        ...         metrics = {"train/loss": torch.tensor(loss)}
        ...         delta = torch.tensor([delta])
        ...         aggregator.add(ClientUpdate(client, delta, torch.empty(0), 10, 1, metrics))
        ...     return aggregator.close()
        >>> aggregate(), aggregator.weights
        (tensor([1.5000]), {0: 0.75, 1: 0.25})
        >>> aggregate()
        tensor([1.2500])
    """

    exchanges = True

    def __init__(self, step: float = 0.1) -> None:
        if not 0 <= step < float("inf"):
            raise ConfigurationError(f"AFL: step must be at least 0, got {step}")
        self.step = step

    @property
    def traits(self) -> Traits:
        """Those of a rule by losses."""
        return super().traits | BY_LOSSES

    @property
    def weights(self) -> dict[int, float]:
        """λ of every client that has taken part."""
        shares = self._shares()
        return {client: share / len(shares) for client, share in shares.items()}

    def _shares(self) -> dict[int, float]:
        if not self.memory:
            return {}
        clients, shares = (self.memory[name].flatten().tolist() for name in (_CLIENTS, _SHARES))
        return dict(zip(clients, shares, strict=True))

    def open(self, like: Tensor) -> None:
        """Start from zero."""
        super().open(like)
        self._losses: dict[int, float] = {}
        self._before = self._shares()

    def weight(self, update: ClientUpdate) -> float:
        """Return its client's λ, and note the loss.

        Raises:
            RoundFailure: if it comes without one.
        """
        self._losses[update.client_id] = reported_loss(update)
        return self._before.get(update.client_id, 1.0)

    def exchange(self, gather: Gather, all_reduce: AllReduce) -> None:
        """Know the losses of all processes' clients; the mean adds up by `sums`."""
        self._losses = {
            client: loss for part in gather(self._losses) for client, loss in part.items()
        }

    def close(self) -> Tensor:
        """Return the mean, and move λ."""
        clients = sorted(self._before.keys() | self._losses.keys())
        shares = np.array([self._before.get(client, 1.0) for client in clients])
        if self.step:
            losses = np.array([self._losses.get(client, 0.0) for client in clients])
            shares = on_simplex(shares + self.step * len(clients) * losses, len(clients))
        self.memory = {
            _CLIENTS: torch.tensor(clients)[:, None],  # columns, as they have no coordinates
            _SHARES: torch.from_numpy(shares)[:, None],
        }
        return self._mean.value()

    def state_dict(self) -> dict[str, Any]:
        """Return the mean so far and the losses."""
        return {"mean": self._mean.state_dict(), "losses": dict(self._losses)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from there."""
        self._mean.load_state_dict(state["mean"])
        self._losses = dict(state["losses"])


def on_simplex(vector: npt.NDArray[np.float64], total: float = 1.0) -> npt.NDArray[np.float64]:
    """Return the nearest vector whose entries are at least 0 and add up to ``total``.

        max(v - θ, 0),    θ = (Σ of the ρ largest - total) / ρ,  ρ the most for which all of them stay > 0

    Example:
        >>> on_simplex(np.array([0.9, 0.5, -3.0])).round(3).tolist()
        [0.7, 0.3, 0.0]
    """
    falling = np.sort(vector)[::-1]
    counts = np.arange(1, len(vector) + 1)
    thresholds = (falling.cumsum() - total) / counts
    last = np.flatnonzero(falling > thresholds)[-1]
    nearest: npt.NDArray[np.float64] = np.maximum(vector - thresholds[last], 0)
    return nearest
