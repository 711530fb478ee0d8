"""What a client has for itself: part of its model, or a model beside the shared one.

    z_i: client i's own tensors, one vector, which the server never sees
    a round of client i:   (x, z_i) → local training → Δ_i to the server, z_i⁺ stays

Where they are part of the model, x lacks them; where they are a copy of it, x is whole. A client
that has not yet taken part has the global model's.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from torch import nn


class Personalisation(Protocol):
    """What clients have for themselves and how they train it; frozen and without state.

    Attributes:
        beside: whether it is a copy of the model beside the shared one.
        pull: λ ≥ 0, with which a copy is pulled to the global model while it trains.
        own_epochs: passes in which a client trains only its own part, before it trains only the
            shared part; None to train both together.
        tuning_steps: local steps on the client's examples from the global model, when it is
            evaluated.
    """

    @property
    def beside(self) -> bool:
        """Whether it is a copy of the model beside the shared one."""

    @property
    def pull(self) -> float:
        """λ ≥ 0."""

    @property
    def own_epochs(self) -> int | None:
        """Passes over the own part alone; None for none, and both parts together."""

    @property
    def tuning_steps(self) -> int:
        """Local steps before an evaluation."""

    def names(self, module: nn.Module) -> list[str]:
        """Return the names of a client's own parameters and buffers in a module.

        Raises:
            ConfigurationError: for a module with which it makes no sense.
        """


@dataclass(frozen=True)
class AllShared:
    """Clients have nothing for themselves."""

    beside = False
    pull = 0.0
    own_epochs = None
    tuning_steps = 0

    def names(self, module: nn.Module) -> list[str]:
        """Return none."""
        return []
