"""What each slot has in tensors that all share, as views that are made once.

To index the tensors of a small model takes longer than to refill a slot of it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from torch import Tensor


class SlotRows:
    """Rows of stacked tensors by slot.

    Args:
        tensors: each of shape (G, …); the same ones as long as the rows are used.

    Example:
        >>> import torch
        >>> counts, states = torch.arange(3), torch.zeros(3, 2)
        >>> rows = SlotRows([counts, states])
        >>> rows.of([1, 2])
        [tensor(1), tensor([0., 0.]), tensor(2), tensor([0., 0.])]
        >>> rows.following([counts, states]) is rows, rows.following([counts]).of([0])
        (True, [tensor(0)])
    """

    def __init__(self, tensors: Sequence[Tensor] = ()) -> None:
        self._tensors = list(tensors)
        self._rows: dict[int, list[Tensor]] = {}

    def following(self, tensors: Sequence[Tensor]) -> SlotRows:
        """Return the rows of these tensors: this object, if they are the ones that it has."""
        have = self._tensors
        is_same = len(have) == len(tensors) and all(map(_is, have, tensors))
        return self if is_same else SlotRows(tensors)

    def of(self, slots: Iterable[int]) -> list[Tensor]:
        """Return the rows of all tensors in some slots, one slot after the other."""
        found: list[Tensor] = []
        for slot in slots:
            rows = self._rows.get(slot)
            if rows is None:
                rows = self._rows[slot] = [tensor[slot] for tensor in self._tensors]
            found += rows
        return found


def _is(one: Tensor, other: Tensor) -> bool:
    return one is other
