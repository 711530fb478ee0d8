"""FedProx: clients are pulled back to where their round began.

    min_y F_i(y) + μ/2 ‖y - x‖²

Source: Li et al. 2020, "Federated Optimization in Heterogeneous Networks", equation 2.
Differs: clients are drawn and averaged as the cohort and the aggregator say; the paper's
Algorithm 2 draws them with probability p_k and averages them alike.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

from fl_lightning.client.corrections.correction import Correction
from fl_lightning.core.errors import ConfigurationError


@final
@dataclass(frozen=True)
class FedProx(Correction):
    """A pull towards the round's start; with ``mu`` 0 it is FedAvg, bit for bit.

    Any optimizer takes it: the pull is part of the gradient, before clipping and the step.

    Args:
        mu: strength μ ≥ 0; the paper's are 0.001 to 1.

    Raises:
        ConfigurationError: for a negative one.

    Example:
        >>> FedProx(mu=0.1).term(None, None)
        GradientTerm(pull=0.1, shift=None)
    """

    mu: float = 0.01

    def __post_init__(self) -> None:
        if not 0 <= self.mu < float("inf"):
            raise ConfigurationError(f"FedProx: mu must be at least 0 and finite, got {self.mu}")

    @property
    def pull(self) -> float:
        """μ."""
        return self.mu
