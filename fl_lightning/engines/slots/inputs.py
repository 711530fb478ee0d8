"""Inputs of the next step of G slots: batches and random numbers.

A client's random numbers come from the global generators, seeded when the client starts: first those
of its batch (augmentation), then those of the step (dropout), as in sequential training. The
generators' states are saved while other slots draw, so a client's numbers do not depend on other clients.

A step on padded batches is evaluated example by example. So the axis of examples in a draw, which has m b
entries for b examples, is moved to the front:

    draw of one client, shape (…, m b, …)  ->  shape (b, …, m, …)

That axis is found by comparing the draws for a batch and for one example. A draw without such an axis
(a mask over weights) is the same for all examples.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from fl_lightning.client.work import ClientWork
from fl_lightning.core.seeds import GlobalGenerators, Integers, seed_global_generators
from fl_lightning.engines.functional import CannotStack
from fl_lightning.engines.functional.draws import Draw
from fl_lightning.engines.functional.functional_step import map_tensors, tensors_in
from fl_lightning.engines.slots.plan import SlotClient, StepPlan


@dataclass(frozen=True)
class _Rows:
    """Results of one random draw for G clients, shape (G, B, …), or (G, …) if it does not depend on B."""

    draw: Draw
    axis: int | None
    numbers: Tensor

    def fill(self, slot: int, size: int) -> None:
        row = self.numbers[slot]
        if self.axis is None:
            row.copy_(self.draw.again())
            return
        per_example = self.numbers.shape[2 + self.axis]
        is_in_order = self.draw.order == tuple(range(len(self.draw.shape)))
        if self.axis == 0 and per_example == 1 and is_in_order:
            self.draw.into(row[:size].squeeze(1))
        else:
            shape = list(self.draw.shape)
            shape[self.axis] = size * per_example
            drawn = self.draw.again(shape).unflatten(self.axis, (size, per_example))
            row[:size].copy_(drawn.movedim(self.axis, 0))
        if size < len(row):  # padding repeats an example
            row[size:] = row[size - 1]


class DrawnRows:
    """Random numbers (e.g. dropout masks) of all slots in a step, which are redrawn before every step.

    Args:
        full: draws of the step on a full batch.
        single: draws of the step on one example; None if batches are not padded.
        num_slots: G.
        batch_size: B.

    Raises:
        CannotStack: if a draw's shape does not depend on the batch size along exactly one axis.

    Example:
        >>> def uniform(*shape):
        ...     order = tuple(range(len(shape)))
        ...     return Draw("uniform_", (), shape, order, torch.float32, torch.device("cpu"))
        >>> rows = DrawnRows([uniform(3, 4, 2)], [uniform(3, 1, 2)], num_slots=5, batch_size=4)
        >>> rows.numbers[0].shape, rows.axes
        (torch.Size([5, 4, 3, 1, 2]), [0])
    """

    def __init__(
        self, full: Sequence[Draw], single: Sequence[Draw] | None, num_slots: int, batch_size: int
    ) -> None:
        if single is not None and [d.method for d in full] != [d.method for d in single]:
            raise CannotStack("which random numbers training_step draws depends on the batch size")
        axes = [_axis(d, s, batch_size) for d, s in zip(full, single or full, strict=True)]
        self._rows = []
        for draw, one, axis in zip(full, single or full, axes, strict=True):
            shape = (
                (num_slots, *draw.shape) if axis is None else (num_slots, batch_size, *one.shape)
            )
            numbers = torch.zeros(shape, dtype=draw.dtype, device=draw.device)
            self._rows.append(_Rows(draw, axis, numbers))
        for slot in range(num_slots):  # empty slots need valid numbers as well
            self.fill(slot, batch_size)

    @property
    def numbers(self) -> list[Tensor]:
        """Random numbers of each draw, shape (G, B, …), or (G, …) if its shape does not depend on the batch size."""
        return [rows.numbers for rows in self._rows]

    @property
    def axes(self) -> list[int | None]:
        """Per random draw: 0 if its numbers have an axis of examples (after that of clients), else None."""
        return [None if rows.axis is None else 0 for rows in self._rows]

    def fill(self, slot: int, size: int) -> None:
        """Draw the numbers of one slot's client from the global generator, for a batch of ``size`` examples."""
        for rows in self._rows:
            rows.fill(slot, size)


def _axis(full: Draw, single: Draw, batch_size: int) -> int | None:
    shapes = list(zip(full.shape, single.shape, strict=False))
    grown = [axis for axis, (many, one) in enumerate(shapes) if many != one]
    if not grown and len(full.shape) == len(single.shape):
        return None
    axis = grown[0] if grown else 0
    same_rank = len(full.shape) == len(single.shape)
    if len(grown) != 1 or not same_rank or full.shape[axis] != batch_size * single.shape[axis]:
        raise CannotStack(
            f"training_step draws random numbers of shape {full.shape} for {batch_size} examples "
            f"and of shape {single.shape} for one"
        )
    return axis


# Random numbers of a step by batch size; empty if the step draws none.
Draws = Mapping[int, DrawnRows]
# Builds a batch from indices, shape (N,), on the model's device.
ReadBatch = Callable[[Tensor], Any]


class StepPart(NamedTuple):
    """Inputs of one step for all slots (clients trained as one batch) whose batches have the same size.

    Attributes:
        slots: slots of the batches; None for all slots, empty ones included.
        batch: tensors in tuples, lists and dicts, each of shape (G, B, …), G slots and B examples.
        valid: 1 for an example, 0 for padding, shape (G, B).
        draws: random numbers of all slots, shape (G, …).
    """

    slots: list[int] | None
    batch: Any
    valid: Tensor
    draws: list[Tensor]


class SlotInputs:
    """Builds the stacked batches and random numbers with which G clients take a step together.

    Args:
        read: builds a batch from indices.
        num_slots: G.
        batch_size: B of full batches.
        padded: True if smaller batches are padded.
        reads_at_random: True if ``read`` draws random numbers, so that each client's batch is read
            separately.
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
        self._clients: dict[int, SlotClient] = {}
        self._generators: dict[int, GlobalGenerators] = {}

    def depends_on_clients(self, draws: Draws) -> bool:
        """True if random numbers are drawn per client, so that inputs depend on which client is in which slot."""
        return bool(draws) or self._reads_at_random

    def batch_like(self, work: ClientWork, size: int) -> Any:
        """Build a batch of exactly ``size`` examples of one client, repeating examples if it has fewer."""
        places = torch.arange(size) % len(work.order)
        return self._read(work.order[places])

    def next(self, plan: StepPlan, new: Sequence[SlotClient], draws: Draws) -> list[StepPart]:
        """Build the batches of one step, one per batch size, largest first, and redraw the step's random numbers.

        Args:
            plan: examples of the step.
            new: clients that start with this step; only read if `depends_on_clients`.
            draws: random numbers to refill.
        """
        alone: dict[int, Any] = {}
        if self.depends_on_clients(draws):
            before = self._clients if plan.number else {}  # a new pass starts without clients
            here = {slot: client for slot, client in before.items() if client.end > plan.number}
            self._clients = here | {client.slot: client for client in new}
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
        """Yield each batch size, largest first, with the slots that have it; None stands for all slots."""
        if self._padded:
            yield self._batch_size, None
            return
        largest, *others = sorted({*sizes.tolist()} - {0}, reverse=True)
        yield largest, None
        for size in others:
            yield size, np.flatnonzero(sizes == size).tolist()

    def _drawn(self, plan: StepPlan, draws: Draws) -> dict[int, Any]:
        """Redraw every client's random numbers; return batches that are read with random augmentation, by slot."""
        batches: dict[int, Any] = {}
        for slot, client in self._clients.items():
            size = int(plan.sizes[slot])
            if plan.number == client.begin:
                seed_global_generators(client.work.seed)
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
        """Pad the slots' batches to one size and stack them; an empty slot repeats another slot's batch.

        Args:
            batches: batch of each slot, None for an empty slot.
            size: batch size after padding.
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
    """Return the shape of one example in each tensor of a batch."""
    return tuple(leaf.shape[1:] for leaf in leaves)
