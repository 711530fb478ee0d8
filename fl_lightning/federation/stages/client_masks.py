"""Masks of the clients' own: whoever has them among a Trainer's callbacks is asked for them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Protocol, TypeAlias, runtime_checkable

from lightning.pytorch import Trainer
from torch import Tensor

from fl_lightning.core.traits import Trait, Traits
from fl_lightning.federation.run import Run
from fl_lightning.federation.stage import Stage, Turn
from fl_lightning.updates.message import bytes_down

# A client's mask: bool tensors by parameter name, True where it may move. When it is asked for, the
# module holds the model that the client is sent.
MaskOfClient: TypeAlias = Callable[[int], Mapping[str, Tensor]]
OWN_MASKS = Traits(breaks={Trait.ONE_MASK: "gives clients masks of their own"})


@runtime_checkable
class HasClientMasks(Protocol):
    """A callback that may know which entries each client may move.

    The optimizer's masks must allow all that any client may: the vectors of the run have these
    coordinates. Of each client only its own travel.
    """

    def client_masks(self) -> MaskOfClient | None:
        """Return what gives a client's mask; None if all clients have the optimizer's."""


def client_masks(trainer: Trainer) -> MaskOfClient | None:
    """Return what gives a client's mask; None if all clients have the optimizer's."""
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        masks = callback.client_masks() if isinstance(callback, HasClientMasks) else None
        if masks is not None:
            return masks
    return None


class MaskedClients(Stage):
    """Has every client train under a mask of its own.

    Args:
        masks: gives them.
    """

    traits = OWN_MASKS
    one_at_a_time = "clients have masks of their own"

    def __init__(self, masks: MaskOfClient) -> None:
        self._masks = masks

    def enter(self, run: Run) -> None:
        """Learn whose module trains."""
        self._local = run.local

    @contextmanager
    def steps(self, turn: Turn) -> Iterator[None]:
        """Find the client's mask, with the model in the module that it is sent."""
        if turn.counts:
            self._find_mask(turn)
        yield

    def _find_mask(self, turn: Turn) -> None:
        model = turn.start.present
        self._local.restore(model)
        turn.masks = self._masks(turn.work.client_id)
        active = self._local.space.coordinates(turn.masks)
        turn.num_bytes = bytes_down(model.params, model.buffers, active)
