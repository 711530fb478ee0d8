"""A site's part in masks: its clients calibrate, and train under what the server has found."""

from __future__ import annotations

from typing import Protocol

from lightning.pytorch import Trainer

from fl_lightning.flower.messages import Order
from fl_lightning.flower.site.desk import Done
from fl_lightning.flower.whole_model import RunMask, hold_model
from fl_lightning.sparsity.masks.mask import Mask


class PutsMasks(Protocol):
    """Puts masks on a module and its optimizer."""

    def apply(self, mask: Mask) -> None:
        """Let the mask's entries move."""


class Calibrates(Protocol):
    """What the configuration says of masks."""

    def what_moves(self, trainer: Trainer) -> PutsMasks:
        """Return what puts masks on a Trainer's module."""

    def answer(self, trainer: Trainer, order: Order) -> Done:
        """Return what clients of an order send for a mask or a head."""


class SiteMasks:
    """The mask of a site's module.

    Args:
        trainer: with module and optimizer in place.
        calibrates: what the configuration says.

    Attributes:
        mask: None before there is one.
    """

    def __init__(self, trainer: Trainer, calibrates: Calibrates) -> None:
        self._trainer, self._calibrates = trainer, calibrates
        self._moves = calibrates.what_moves(trainer)
        self.mask: RunMask | None = None

    def calibrated(self, order: Order) -> Done:
        """Return what clients of an order send for a mask or a head."""
        return self._calibrates.answer(self._trainer, order)

    def take(self, order: Order, mask: RunMask) -> None:
        """Have the module be an order's, and keep to a mask."""
        hold_model(self._trainer.lightning_module, order.tensors)
        self._moves.apply(mask.mask)
        self.mask = mask
