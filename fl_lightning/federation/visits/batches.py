"""The way of a batch from the data set to a step of the module.

Conversion by the precision plugin, the hooks around the transfer that module or data module
override, and the transfer itself: as Lightning does, for batches that its loops never see.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from lightning.pytorch import Trainer
from lightning.pytorch.plugins.precision import Precision

from fl_lightning.federation.hooks import BATCH_HOOKS, overrides

_BEFORE = "on_before_batch_transfer"
_TRANSFER = ("transfer_batch_to_device", "on_after_batch_transfer")


def batch_preparation(trainer: Trainer) -> Callable[[Any], Any] | None:
    """Return what happens to a batch before the training step; None if nothing does."""
    module, data = trainer.lightning_module, trainer.datamodule  # type: ignore[attr-defined]
    precision, strategy = trainer.precision_plugin, trainer.strategy
    before = next(
        (o.on_before_batch_transfer for o in (data, module) if overrides(o, _BEFORE)), None
    )
    converts = type(precision).convert_input is not Precision.convert_input
    moves = strategy.root_device.type != "cpu" or any(
        overrides(owner, hook) for owner in (module, data) for hook in _TRANSFER
    )
    if before is None and not converts and not moves:
        return None

    def prepare(batch: Any) -> Any:
        batch = precision.convert_input(batch)
        if before is not None:
            batch = before(batch, 0)
        # after a fit the module is back on the CPU, the strategy still on its device
        return strategy.batch_to_device(batch, module.device, dataloader_idx=0)

    return prepare


def has_batch_hooks(trainer: Trainer) -> bool:
    """Return whether module or data module act on batches before or after a step."""
    owners = trainer.lightning_module, trainer.datamodule  # type: ignore[attr-defined]
    return any(overrides(owner, hook) for owner in owners for hook in BATCH_HOOKS)


def takes_index(step: Callable[..., Any]) -> bool:
    """Return whether a step takes ``(batch, batch_idx)``; Lightning also allows ``(batch)``."""
    return len(inspect.signature(step).parameters) > 1
