"""What clients have for themselves, in the slots that they train in."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from fl_lightning.core.space import Space
from fl_lightning.engines.functional.functional_step import Tensors

# Gives what a client has for itself, shape (o,); None for what the global model has.
OwnOf = Callable[[int], Tensor | None]


class SlotOwn:
    """Own tensors of the clients in G slots.

    Args:
        space: layout of a client's own tensors.
        stacked: all tensors of the slots by name, shape (G, …); what is not among them never moves.
        start: gives the global model's own tensors, shape (o,).

    Attributes:
        kept: what clients that are done are to keep, by client.
    """

    def __init__(self, space: Space, stacked: Tensors, start: Callable[[], Tensor]) -> None:
        self._space, self._start = space, start
        self._rows = [stacked.get(name) for name in space.names]
        self.kept: dict[int, Tensor] = {}
        self._own: OwnOf | None = None

    def open(self, own: OwnOf | None) -> None:
        """Begin with clients of which ``own`` knows."""
        self._own, self.kept = own, {}

    @torch.no_grad()
    def enter(self, slot: int, client: int) -> None:
        """Have a client's own tensors in a slot."""
        for rows, view in zip(self._rows, self._space.views(self._before(client)), strict=True):
            if rows is not None:
                rows[slot].copy_(view)

    @torch.no_grad()
    def leave(self, slot: int, client: int) -> bool:
        """Keep what a client has for itself at the end; return whether it is finite."""
        after = self._before(client).clone()
        for rows, view in zip(self._rows, self._space.views(after), strict=True):
            if rows is not None:
                view.copy_(rows[slot])
        self.kept[client] = after
        return bool(after.isfinite().all())

    def _before(self, client: int) -> Tensor:
        own = None if self._own is None else self._own(client)
        return self._start() if own is None else own
