"""Ditto: a personal model beside the shared one, pulled to it.

    v_i ← v_i - η (∇F_i(v_i) + λ (v_i - x))        x: the global model with which the round began

Source: Li et al. 2021, "Ditto: Fair and Robust Federated Learning Through Personalization", ICML,
Algorithm 1.
Differs: a client's first v_i is the global model of the round in which it first takes part (the
paper's is the initial one, which the server would have to send as well); v_i takes the same local
steps as the client's share of the global model, on the same batches; buffers are part of it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

from torch import nn

from fl_lightning.client.personal.personalisation import Personalisation
from fl_lightning.core.errors import ConfigurationError


@final
@dataclass(frozen=True)
class Ditto(Personalisation):
    """Every client has a whole model of its own, which follows the global one loosely.

    The global model is that of a run without, bit for bit. A round takes a client twice as long.

    Args:
        pull: λ ≥ 0; with 0 clients train on their own from where they first took part. It needs
            a learning rate η with η λ < 2.

    Raises:
        ConfigurationError: for a negative one.

    Example:
        >>> Ditto(pull=0.1).names(nn.Linear(2, 1))
        ['weight', 'bias']
    """

    pull: float = 0.1

    beside = True

    def __post_init__(self) -> None:
        if not 0 <= self.pull < float("inf"):
            raise ConfigurationError(f"Ditto: pull must be at least 0 and finite, got {self.pull}")

    def names(self, module: nn.Module) -> list[str]:
        """Return all parameters that train, and all buffers."""
        params = [name for name, p in module.named_parameters() if p.requires_grad]
        return [*params, *(name for name, _ in module.named_buffers())]
