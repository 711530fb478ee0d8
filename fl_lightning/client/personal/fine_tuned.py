"""Fine-tuning: the personal model is the global one after a few steps on the client's examples.

    z_i = x after n local steps on client i's training examples; then it is evaluated and forgotten

Source: Wang et al. 2019, "Federated Evaluation of On-device Personalization", section 3; Yu et al.
2020, "Salvaging Federated Learning by Local Adaptation", section 3 (FT).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

from torch import nn

from fl_lightning.client.personal.personalisation import Personalisation
from fl_lightning.core.errors import ConfigurationError


@final
@dataclass(frozen=True)
class FineTuned(Personalisation):
    """Clients fine-tune the global model before they are evaluated; training does not change.

    The steps are plain ones, by a new optimizer of the module's ``configure_optimizers``, with
    neither clipping nor hooks.

    Args:
        local_steps: how many, n ≥ 1.

    Raises:
        ConfigurationError: for a number below 1.

    Example:
        >>> FineTuned(local_steps=10).names(nn.Linear(2, 1))
        []
    """

    local_steps: int = 10

    def __post_init__(self) -> None:
        if self.local_steps < 1:
            raise ConfigurationError(
                f"FineTuned: local_steps must be at least 1, got {self.local_steps}: leave "
                "personal out to evaluate the global model"
            )

    @property
    def tuning_steps(self) -> int:
        """How many."""
        return self.local_steps

    def names(self, module: nn.Module) -> list[str]:
        """Return none: clients keep nothing."""
        return []
