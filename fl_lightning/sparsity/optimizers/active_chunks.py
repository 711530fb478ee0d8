"""Tensors whose active entries an optimizer moves together, and the memory that these pass through.

    read: v = p[active], g = ∇[active]        write: p[active] = v

A ViT has 150 tensors, most of them small, so that every call here counts: what does not change from
step to step (flat views, places in the memory) is found once. The memory is the same for all chunks
and all steps: new memory costs more than the numbers in it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import Any

import torch
from torch import Tensor

from fl_lightning.sparsity.optimizers.active_entries import put

# Values of so many entries stay in a core's cache from reading to writing. An accelerator is
# faster with all tensors at once.
MOST_ENTRIES_ON_CPU = 50_000


class Chunk:
    """Some parameters of one dtype and device.

    Args:
        params: with entries that move.
        active: which of each, as indices, shape (k_i,).
        memory: for values and for gradients, of at least Σ k_i numbers each.

    Attributes:
        params: as given.
        values: of the active entries since `read`, shape (k_i,) each; what is moved.
        grads: theirs.

    Example:
        >>> p = torch.tensor([1.0, 2.0])
        >>> p.grad = torch.tensor([5.0, 6.0])
        >>> chunk = Chunk([p], [torch.tensor([1])], torch.empty(2, 1))
        >>> chunk.read()
        >>> chunk.values[0] += chunk.grads[0]
        >>> chunk.write()
        >>> p
        tensor([1., 8.])
    """

    def __init__(self, params: list[Tensor], active: list[Tensor], memory: Tensor) -> None:
        self.params = params
        sizes = [len(index) for index in active]
        self.values, self.grads = (list(row[: sum(sizes)].split(sizes)) for row in memory)
        flats = [p.detach().view(-1) if p.is_contiguous() else None for p in params]
        self._reads = list(zip(params, flats, active, self.values, self.grads, strict=True))

    def read(self) -> None:
        """Take the present values and gradients.

        Raises:
            ValueError: for a sparse gradient.
        """
        for param, flat, index, value, grad in self._reads:
            whole = param.grad
            assert whole is not None
            if whole.layout is not torch.strided:
                raise ValueError("a mask needs dense gradients: give the embedding sparse=False")
            torch.index_select(whole.reshape(-1), 0, index, out=grad)
            here = param.reshape(-1) if flat is None else flat
            torch.index_select(here, 0, index, out=value)

    def write(self) -> None:
        """Put the values back."""
        for param, flat, index, value, _ in self._reads:
            if flat is None:
                put(param, index, value)
            else:
                flat.scatter_(0, index, value)


class ActiveChunks:
    """The chunks of all parameters, made anew only where tensors, memory or masks are others."""

    def __init__(self) -> None:
        self._known: dict[int, tuple[list[Any], list[Tensor], list[Chunk]]] = {}

    def of(self, number: int, params: list[Tensor], active: list[Tensor]) -> list[Chunk]:
        """Return the chunks of a parameter group's parameters.

        Args:
            number: of the group.
            params: those that have a gradient, active and frozen entries.
            active: indices of the former.
        """
        # indices and memory of the known chunks are kept alive: no other tensor has their addresses
        key = [(p.data_ptr(), id(index)) for p, index in zip(params, active, strict=True)]
        known = self._known.get(number)
        if known is None or known[0] != key:
            known = self._known[number] = key, active, _chunks(params, active)
        return known[2]


def _chunks(params: Sequence[Tensor], active: Sequence[Tensor]) -> list[Chunk]:
    chunks = []
    pairs = zip(params, active, strict=True)
    for (dtype, device), part in groupby(pairs, lambda pair: (pair[0].dtype, pair[0].device)):
        shares = list(_shares(list(part), device))
        most = max(sum(len(index) for _, index in share) for share in shares)
        memory = torch.empty(2, most, dtype=dtype, device=device)
        chunks += [Chunk([p for p, _ in s], [index for _, index in s], memory) for s in shares]
    return chunks


def _shares(
    pairs: list[tuple[Tensor, Tensor]], device: torch.device
) -> Iterator[list[tuple[Tensor, Tensor]]]:
    """Share tensors out so that the values of each share stay in the cache."""
    share: list[tuple[Tensor, Tensor]] = []
    size = 0
    for param, index in pairs:
        share.append((param, index))
        size += len(index)
        if size >= MOST_ENTRIES_ON_CPU and device.type == "cpu":
            yield share
            share, size = [], 0
    if share:
        yield share
