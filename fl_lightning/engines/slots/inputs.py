"""What the next step of G slots works on: a batch a slot, and the random numbers of the step.

One client's numbers come from the global generators, seeded for it when it begins: first those of
its batch (augmentation), then those of the step (dropout), as when it trains alone. The generators'
states are put aside while the other slots draw, so that nobody's draws depend on the company.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fl_lightning.client.work import ClientWork
from fl_lightning.core.seeds import GlobalGenerators, seed_global_generators
from fl_lightning.engines.cannot_stack import CannotStack
from fl_lightning.engines.functional.functional_step import map_tensors, tensors_in
from fl_lightning.engines.slots.drawn_rows import DrawnRows

# Builds the batch of many indices, shape (N,), on the device where the model is.
ReadBatch = Callable[[Tensor], Any]


class Guest(NamedTuple):
    """A client in a slot.

    Attributes:
        work: what it does there.
        slot: where.
        begin: its first step, counted from the start of the pass.
        end: one past its last step.
    """

    work: ClientWork
    slot: int
    begin: int
    end: int


class SlotInputs:
    """Makes the inputs of one step after the other.

    Args:
        read: builds batches.
        num_slots: G.
        batch_size: B.
        reads_at_random: whether what is read for an index is not always the same, so that every
            client's batch must be read by itself.
    """

    def __init__(
        self, read: ReadBatch, *, num_slots: int, batch_size: int, reads_at_random: bool
    ) -> None:
        self._read = read
        self._num_slots, self._batch_size = num_slots, batch_size
        self._reads_at_random = reads_at_random
        self._guests: dict[int, Guest] = {}
        self._generators: dict[int, GlobalGenerators] = {}

    def asks_guests(self, draws: DrawnRows | None) -> bool:
        """Return whether what a step works on depends on who is in which slot."""
        return draws is not None or self._reads_at_random

    def batch_like(self, work: ClientWork, size: int) -> Any:
        """Return a batch of some of one client's examples, of which some may come twice."""
        places = torch.arange(size) % len(work.order)
        return self._read(work.order[places])

    def next(
        self,
        number: int,
        indices: Tensor,
        new: Sequence[Guest],
        draws: DrawnRows | None,
    ) -> Any:
        """Return the batch of one step, of shape (G, B, …), and refill its random numbers.

        Args:
            number: of the step.
            indices: of its examples, shape (G, B).
            new: clients that begin with it, where it `asks_guests`.
            draws: the step's; None if it has none.
        """
        if not self.asks_guests(draws):
            return map_tensors(self._by_slot, self._read(indices.reshape(-1)))
        before = self._guests if number else {}  # and none of another pass
        here = {slot: guest for slot, guest in before.items() if guest.end > number}
        self._guests = here | {guest.slot: guest for guest in new}
        batches: dict[int, Any] = {}
        for slot, guest in self._guests.items():
            size = guest.work.sizes[number - guest.begin]
            if number == guest.begin:
                seed_global_generators(guest.work.seed)
            else:
                self._generators[slot].put_back()
            if self._reads_at_random:
                batches[slot] = self._read(indices[slot, :size])
            if draws is not None:
                draws.fill(slot, size)
            self._generators[slot] = GlobalGenerators(only_torch=not self._reads_at_random)
        if self._reads_at_random:
            return self._stacked(batches)
        return map_tensors(self._by_slot, self._read(indices.reshape(-1)))

    def _by_slot(self, tensor: Tensor) -> Tensor:
        return tensor.view(self._num_slots, self._batch_size, *tensor.shape[1:])

    def _stacked(self, batches: dict[int, Any]) -> Any:
        """Return padded batches side by side; an empty slot repeats one that somebody has."""
        anyone = next(iter(batches.values()))
        leaves = [tensors_in(batches.get(slot, anyone)) for slot in range(self._num_slots)]
        if len({len(of_slot) for of_slot in leaves}) > 1:
            raise CannotStack("its batches differ in their parts")
        if len({_shapes(of_slot) for of_slot in leaves}) > 1:
            raise CannotStack("batches of clients that train together have different shapes")
        parts = iter(zip(*leaves, strict=True))
        return map_tensors(lambda _: torch.stack([*map(self._padded, next(parts))]), anyone)

    def _padded(self, tensor: Tensor) -> Tensor:
        missing = self._batch_size - len(tensor)
        if not missing:
            return tensor
        return torch.cat([tensor, tensor[-1:].expand(missing, *tensor.shape[1:])])


def _shapes(leaves: Sequence[Tensor]) -> tuple[Any, ...]:
    """Return the shapes of examples in a batch's parts."""
    return tuple(leaf.shape[1:] for leaf in leaves)
