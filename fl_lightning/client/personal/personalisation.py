"""Personal parameters of a client: part of its model, or a model beside the shared one.

    z_i: client i's own tensors, one vector, which the server never sees
    a round of client i:   (x, z_i) → local training → Δ_i to the server, z_i⁺ stays

Where they are part of the model, x lacks them; where they are a copy of it, x is whole. A client
that has not yet taken part has the global model's.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

from torch import nn

from fl_lightning.core.traits import Trait, Traits

_OF_OWN_STEPS = Traits(
    breaks={Trait.PRIVATE_EXAMPLES: "takes steps that would cost as well, and which nobody counts"},
    instead={
        Trait.PRIVATE_EXAMPLES: "leave personal out",
        Trait.RETURNED_LOSS: "use Ditto or Personal",
    },
)


class Personalisation(ABC):
    """Which parameters are personal and how clients train them; subclasses are frozen and hold no state."""

    @property
    def beside(self) -> bool:
        """True if it is a copy of the model beside the shared one."""
        return False

    @property
    def pull(self) -> float:
        """λ ≥ 0, with which a copy is pulled to the global model while it trains."""
        return 0.0

    @property
    def mixture(self) -> float | None:
        """α with which clients begin that mix both models in every step; None if they do not."""
        return None

    @property
    def mixture_rate(self) -> float:
        """By how much of its slope α moves after a round, ≥ 0."""
        return 0.0

    @property
    def own_epochs(self) -> int | None:
        """Passes in which a client trains only its own part, before it trains only the shared part.

        None to train both together.
        """
        return None

    @property
    def tuning_steps(self) -> int:
        """Local steps on the client's examples from the global model, when it is evaluated."""
        return 0

    @property
    def traits(self) -> Traits:
        """Traits of the personal model; they follow from how a client trains its own part."""
        needs, ways = {}, {}
        if self.mixture is not None:
            needs[Trait.RETURNED_LOSS] = "takes gradients at a mixture of two models"
        elif self.own_epochs is not None:
            needs[Trait.RETURNED_LOSS] = (
                "freezes one part after the other (own_epochs), so that one optimizer has nothing to train"
            )
            ways[Trait.RETURNED_LOSS] = "leave own_epochs out"
        elif self.tuning_steps > 0:
            needs[Trait.RETURNED_LOSS] = "takes steps of its own on the loss"
        return _OF_OWN_STEPS | Traits(needs, {}, ways)

    @abstractmethod
    def names(self, module: nn.Module) -> list[str]:
        """Return the names of a client's own parameters and buffers in a module.

        Raises:
            ConfigurationError: for a module with which it makes no sense.
        """
