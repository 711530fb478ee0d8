"""The random numbers of G clients' next step, each client's from its own generator.

    of one client:  (…, m b, …)  ->  (b, …, m, …), a row of (G, B, …)

A step on padded batches is evaluated example by example, so the axis along which a draw grows with
the batch comes to the front. Which axis that is shows when the step is seen on a batch and on one
example of it. A draw that does not grow (of a mask over weights) is the same for all examples.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fl_lightning.engines.cannot_stack import CannotStack
from fl_lightning.engines.functional.random_draws import Draw


@dataclass(frozen=True)
class _Rows:
    """One draw of the step, for all slots: ``numbers`` of (G, B, …), or (G, …) if no axis grows."""

    draw: Draw
    axis: int | None
    numbers: Tensor

    def fill(self, slot: int, size: int) -> None:
        row = self.numbers[slot]
        if self.axis is None:
            row.copy_(self.draw.again())
            return
        per_example = self.numbers.shape[2 + self.axis]
        if self.axis == 0 and per_example == 1 and self._is_in_order:
            self.draw.into(row[:size].squeeze(1))
        else:
            shape = list(self.draw.shape)
            shape[self.axis] = size * per_example
            drawn = self.draw.again(shape).unflatten(self.axis, (size, per_example))
            row[:size].copy_(drawn.movedim(self.axis, 0))
        if size < len(row):  # padding repeats an example
            row[size:] = row[size - 1]

    @property
    def _is_in_order(self) -> bool:
        return self.draw.order == tuple(range(len(self.draw.shape)))


class DrawnRows:
    """Holds and refills the random numbers of a stacked step.

    Args:
        full: draws of the step on a full batch.
        single: draws on one example; None if the step keeps its batch whole.
        num_slots: G.
        batch_size: B.

    Raises:
        CannotStack: if a draw does not grow with the batch along one axis.

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
            raise CannotStack("training_step draws other random numbers for other sizes of a batch")
        axes = [_axis(d, s, batch_size) for d, s in zip(full, single or full, strict=True)]
        self._rows = []
        for draw, one, axis in zip(full, single or full, axes, strict=True):
            shape = (
                (num_slots, *draw.shape) if axis is None else (num_slots, batch_size, *one.shape)
            )
            numbers = torch.zeros(shape, dtype=draw.dtype, device=draw.device)
            self._rows.append(_Rows(draw, axis, numbers))
        for slot in range(num_slots):  # also one that stays empty holds numbers of its kind
            self.fill(slot, batch_size)

    @property
    def numbers(self) -> list[Tensor]:
        """What the step is given, one tensor a draw: (G, B, …), or (G, …) where `axes` has None."""
        return [rows.numbers for rows in self._rows]

    @property
    def axes(self) -> list[int | None]:
        """For each draw the axis of examples, after that of clients has been taken: 0 or None."""
        return [None if rows.axis is None else 0 for rows in self._rows]

    def fill(self, slot: int, size: int) -> None:
        """Draw one client's numbers from the global generator, as a step on ``size`` examples."""
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
