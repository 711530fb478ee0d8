"""FedLC: a client's logits are shifted by how many examples it has of each class.

    loss on f_c(x) - τ n_c^(-1/4) in place of f_c(x),    n_c: the client's training examples of class c

What a client has few examples of needs a wider margin, so that its local steps do not unlearn it.

Source: Zhang et al. 2022, Federated Learning with Label Distribution Skew via Logits Calibration.
Differs: the loss stays the module's own, given the shifted logits; with cross entropy it is the paper's
(where code that others published also sums over the true class). A class of which a client has nothing,
n_c = 0, is shifted by 100 τ, as if n_c were 1e-8.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, final

import torch
from torch import Tensor, nn

from fl_lightning.client.corrections.correction import Correction
from fl_lightning.core.errors import ConfigurationError

_NOTHING = 1e-8  # examples of a class that a client does not have


@final
@dataclass(frozen=True)
class FedLC(Correction):
    """Calibrated logits in local training; with ``tau`` 0 it is FedAvg, bit for bit.

    What the module's ``forward`` returns, of shape (B, C), is shifted while a client trains, what is
    its own as well (`Personal` with ``own_epochs``, `Ditto`, `APFL`), and in its ``train/…`` metrics;
    evaluation is as it was. Clients train one after the other.

    Args:
        tau: strength τ ≥ 0.

    Raises:
        ConfigurationError: if it is negative, and in the first round for a module whose
            ``training_step`` does not get its logits by ``self(inputs)``.

    Example:
        >>> FedLC(tau=1.0).shift(torch.tensor([16, 1, 0]))
        tensor([  -0.5000,   -1.0000, -100.0000])
    """

    tau: float = 1.0

    def __post_init__(self) -> None:
        if not 0 <= self.tau < float("inf"):
            raise ConfigurationError(f"FedLC: tau must be at least 0 and finite, got {self.tau}")

    def calibrated(self, module: nn.Module, labels: Callable[[], Tensor]) -> ShiftedLogits:
        """Return the module with its logits shifted."""
        return ShiftedLogits(self, module, labels())

    def shift(self, counts: Tensor) -> Tensor:
        """Return what is added to the logits, given the examples of each class, both (C,)."""
        return -self.tau * counts.clamp(min=_NOTHING).pow(-0.25)


class ShiftedLogits:
    """Shifts what a module returns, from the time when it is made until `close`.

    Args:
        fedlc: how.
        module: whose ``forward`` returns logits.
        labels: of a client's training examples, whole numbers ≥ 0, shape (n,).
    """

    def __init__(self, fedlc: FedLC, module: nn.Module, labels: Tensor) -> None:
        self._fedlc, self._module, self._counts = fedlc, module, labels.bincount()
        self._was_asked = False
        self._handle = module.register_forward_hook(self._shifted)

    def _shifted(self, module: nn.Module, inputs: Any, logits: Any) -> Any:
        if not module.training:
            return logits
        known = len(self._counts)
        if not isinstance(logits, Tensor) or logits.ndim != 2 or logits.shape[1] < known:
            raise ConfigurationError(
                f"FedLC shifts logits of shape (B, C) with at least {known} classes, and "
                f"{type(module).__name__}.forward returns something else: have it return the logits"
            )
        self._was_asked = True
        counts = torch.zeros(logits.shape[1])
        counts[:known] = self._counts
        return logits + self._fedlc.shift(counts).to(logits)

    def close(self, *, has_trained: bool) -> None:
        """Restore the module.

        Raises:
            ConfigurationError: if a client has trained and nothing was shifted.
        """
        self._handle.remove()
        if has_trained and not self._was_asked:
            raise ConfigurationError(
                f"FedLC shifts what forward returns, and {type(self._module).__name__}.training_step "
                "does not ask for it: have it get its logits by self(inputs)"
            )
