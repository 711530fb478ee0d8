"""What a training step freezes and unfreezes while a client trains is put back when it is done.

A module that steps its optimizers by hand often freezes one part while it trains another
(``toggle_optimizer``, or ``requires_grad_``). The next client starts from the round's parameters
that train, whether or not the last one put everything back.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn

from fl_lightning.core.errors import ConfigurationError


@contextmanager
def toggled_back(module: nn.Module) -> Iterator[None]:
    """Put ``requires_grad`` back after the block.

    Raises:
        ConfigurationError: if a parameter that was frozen when the block began trained inside it.

    Example:
        >>> layer = nn.Linear(1, 1)
        >>> with toggled_back(layer):
        ...     _ = layer.requires_grad_(False)
        >>> layer.weight.requires_grad
        True
    """
    before = [(name, p, p.requires_grad) for name, p in module.named_parameters()]
    try:
        yield
        for name, param, trains in before:
            if not trains and (param.requires_grad or param.grad is not None):
                raise ConfigurationError(
                    f"{name} was frozen when the run started and training_step unfroze it: what "
                    "travels between clients and server is settled when a run starts. Leave it "
                    "frozen, or unfreeze it before."
                )
    finally:
        for _, param, trains in before:
            param.requires_grad_(trains)
