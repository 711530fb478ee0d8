"""What the next step of G slots works on: batches, and the random numbers of the step.

One client's numbers come from the global generators, seeded for it when it begins: first those of
its batch (augmentation), then those of the step (dropout), as when it trains alone. The generators'
states are put aside while the other slots draw, so that nobody's draws depend on the company.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from fl_lightning.client.work import ClientWork
from fl_lightning.core.seeds import GlobalGenerators, seed_global_generators
from fl_lightning.core.whole_numbers import Integers
from fl_lightning.engines.cannot_stack import CannotStack
from fl_lightning.engines.functional.functional_step import map_tensors, tensors_in
from fl_lightning.engines.slots.drawn_rows import DrawnRows

# The random numbers of a step by the size of batches; empty if it draws none.
Draws = Mapping[int, DrawnRows]
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


class StepPlan(NamedTuple):
    """One step of all slots.

    Attributes:
        number: of the step, counted from the start of the pass.
        indices: of its examples, shape (G, B); smaller batches repeat their last one.
        valid: 1 where an example counts, 0 where it is a repetition, shape (G, B).
        sizes: of the batches, 0 where a slot has none, shape (G,).
    """

    number: int
    indices: Tensor
    valid: Tensor
    sizes: Integers


class StepPart(NamedTuple):
    """Batches of one size.

    Attributes:
        slots: where they are; None for all slots, also those that have none.
        batch: tensors in tuples, lists and dicts, each of shape (G, B, …), G slots and B examples.
        valid: 1 where an example counts, 0 where it is padding, shape (G, B).
        draws: the step's random numbers, shape (G, …); of all slots.
    """

    slots: list[int] | None
    batch: Any
    valid: Tensor
    draws: list[Tensor]


class SlotInputs:
    """Makes the inputs of one step after the other.

    Args:
        read: builds batches.
        num_slots: G.
        batch_size: B of full batches.
        padded: whether smaller batches are padded.
        reads_at_random: whether what is read for an index is not always the same, so that every
            client's batch must be read by itself.
    """

    def __init__(
        self,
        read: ReadBatch,
        *,
        num_slots: int,
        batch_size: int,
        padded: bool,
        reads_at_random: bool,
    ) -> None:
        self._read, self._padded = read, padded
        self._num_slots, self._batch_size = num_slots, batch_size
        self._reads_at_random = reads_at_random
        self._guests: dict[int, Guest] = {}
        self._generators: dict[int, GlobalGenerators] = {}

    def asks_guests(self, draws: Draws) -> bool:
        """Return whether what a step works on depends on who is in which slot."""
        return bool(draws) or self._reads_at_random

    def batch_like(self, work: ClientWork, size: int) -> Any:
        """Return a batch of some of one client's examples, of which some may come twice."""
        places = torch.arange(size) % len(work.order)
        return self._read(work.order[places])

    def next(self, plan: StepPlan, new: Sequence[Guest], draws: Draws) -> list[StepPart]:
        """Return the batches of one step, those of all slots first, and refill its random numbers.

        Args:
            plan: which examples they have.
            new: clients that begin with it, where it `asks_guests`.
            draws: the step's.
        """
        alone: dict[int, Any] = {}
        if self.asks_guests(draws):
            before = self._guests if plan.number else {}  # and none of another pass
            here = {slot: guest for slot, guest in before.items() if guest.end > plan.number}
            self._guests = here | {guest.slot: guest for guest in new}
            alone = self._drawn(plan, draws)
        parts = []
        for size, slots in self._by_size(plan.sizes):
            numbers = draws[size].numbers if draws else []
            valid, picked = plan.valid[:, :size], plan.indices[:, :size]
            if slots is not None:
                valid, picked = valid[slots], picked[slots]
            if self._reads_at_random:
                places = range(self._num_slots) if slots is None else slots
                batch = self._stacked([alone.get(slot) for slot in places], size)
            else:
                batch = self._by_slot(self._read(picked.reshape(-1)), len(picked))
            parts.append(StepPart(slots, batch, valid, numbers))
        return parts

    def _by_size(self, sizes: Integers) -> Iterator[tuple[int, list[int] | None]]:
        """Yield the sizes of batches, and the slots that have them; None for all."""
        if self._padded:
            yield self._batch_size, None
            return
        largest, *others = sorted({*sizes.tolist()} - {0}, reverse=True)
        yield largest, None
        for size in others:
            yield size, np.flatnonzero(sizes == size).tolist()

    def _drawn(self, plan: StepPlan, draws: Draws) -> dict[int, Any]:
        """Refill the clients' random numbers, and return the batches that are read at random, by slot."""
        batches: dict[int, Any] = {}
        for slot, guest in self._guests.items():
            size = int(plan.sizes[slot])
            if plan.number == guest.begin:
                seed_global_generators(guest.work.seed)
            else:
                self._generators[slot].put_back()
            if self._reads_at_random:
                batches[slot] = self._read(plan.indices[slot, :size])
            if draws:
                draws[self._batch_size if self._padded else size].fill(slot, size)
            self._generators[slot] = GlobalGenerators(only_torch=not self._reads_at_random)
        return batches

    def _by_slot(self, batch: Any, num_slots: int) -> Any:
        return map_tensors(lambda x: x.view(num_slots, -1, *x.shape[1:]), batch)

    def _stacked(self, batches: Sequence[Any], size: int) -> Any:
        """Return padded batches side by side; an empty slot repeats one that somebody has.

        Args:
            batches: None where there is none.
            size: of the stacked batches.
        """
        fitting = [b if b is not None and len(tensors_in(b)[0]) <= size else None for b in batches]
        anyone = next(batch for batch in fitting if batch is not None)
        leaves = [tensors_in(anyone if batch is None else batch) for batch in fitting]
        if len({len(of_slot) for of_slot in leaves}) > 1:
            raise CannotStack("its batches differ in their parts")
        if len({_shapes(of_slot) for of_slot in leaves}) > 1:
            raise CannotStack("batches of clients that train together have different shapes")
        parts = iter(zip(*leaves, strict=True))
        padded = partial(_padded, size=size)
        return map_tensors(lambda _: torch.stack([*map(padded, next(parts))]), anyone)


def _padded(tensor: Tensor, size: int) -> Tensor:
    missing = size - len(tensor)
    if not missing:
        return tensor
    return torch.cat([tensor, tensor[-1:].expand(missing, *tensor.shape[1:])])


def _shapes(leaves: Sequence[Tensor]) -> tuple[Any, ...]:
    """Return the shapes of examples in a batch's parts."""
    return tuple(leaf.shape[1:] for leaf in leaves)
