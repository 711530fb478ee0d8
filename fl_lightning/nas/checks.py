"""What a search cannot have around it, each refused in a sentence before anything trains."""

from __future__ import annotations

from typing import Any

from torch.optim import Optimizer

from fl_lightning.core.errors import ConfigurationError
from fl_lightning.server.server import as_aggregator
from fl_lightning.sparsity import SparseAdamW, SparseSGDM

MASKS_IN_A_SEARCH = "a search keeps to no mask: operations would compete with parts of them missing"
MASKS_OF_ALL_SIZES = (
    "a network of all sizes keeps to no mask but its clients' capability: one of its largest size "
    "leaves smaller ones with parts missing"
)


def check_precision(precision: str) -> None:
    """Refuse float16.

    Raises:
        ConfigurationError: saying what to take instead.
    """
    if precision.startswith("16"):
        raise ConfigurationError(
            f"trainer.precision is {precision}, and gradients of alpha are taken without the scale that keeps "
            "float16 from rounding them to zero: take bf16-mixed or 32-true"
        )


def check_beside_updates(federation: Any, sends: str) -> None:
    """Refuse buffers that travel beside updates which nobody may read.

    Args:
        federation: its options.
        sends: the option that sends buffers, in words; empty if none does.

    Raises:
        ConfigurationError: saying what to take instead.
    """
    hides = protector(federation)
    if sends and hides is not None:
        raise ConfigurationError(
            f"{sends} travels in buffers beside the update, and {type(hides).__name__} protects "
            "updates alone: take architecture_state: server, and a learn by Gradient"
        )


def protector(federation: Any) -> Any:
    """Return what hides the updates of single clients; None if nothing does."""
    given = federation.aggregator
    if federation.privacy is not None or given is None:
        return federation.privacy
    return given if as_aggregator(given).protection is not None else None


def check_weights_optimizer(optimizer: Optimizer) -> None:
    """Refuse one that keeps to a mask.

    Raises:
        ConfigurationError: saying what to do first.
    """
    if isinstance(optimizer, SparseSGDM | SparseAdamW):
        raise ConfigurationError(
            f"model.optimizer is {type(optimizer).__name__}, and {MASKS_IN_A_SEARCH}. Search with "
            "torch.optim.SGD, then mask the network that was found"
        )
