"""Masks of the clients' own: whoever has them among a Trainer's callbacks is asked for them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol, runtime_checkable

from lightning.pytorch import Trainer
from torch import Tensor


@runtime_checkable
class ClientMasks(Protocol):
    """A callback that knows which entries each client may move.

    The optimizer's masks must allow all that any client may: the vectors of the run have these
    coordinates. Of each client only its own travel.

    Attributes:
        has_client_masks: whether clients have masks of their own in this run.
    """

    has_client_masks: bool

    def mask_of_client(self, client: int) -> Mapping[str, Tensor]:
        """Return a client's mask: bool tensors by parameter name, ``True`` where it may move."""


def client_masks(trainer: Trainer) -> ClientMasks | None:
    """Return the callback with masks of the clients' own; None if they all share one or none."""
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        if isinstance(callback, ClientMasks) and callback.has_client_masks:
            return callback
    return None
