"""Active entries of tensors as indices, and buffers in which an optimizer updates them.

    read: v = p[active], g = ∇[active]        move v by g        write: p[active] = v

An optimizer whose rule is elementwise can be applied to ``v`` alone: its arithmetic and its state have one
number per active entry. If most entries are active, it is cheaper to step the whole tensor and restore the
few frozen entries.

A ViT has 150 tensors, most of them small, so that the overhead of each call matters: flat views and
indices, which do not change from step to step, are computed once. All chunks and all steps share one
buffer, because allocating memory costs more than copying the numbers.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import torch
from torch import Tensor

# From this fraction of active entries on, a step of the whole tensor is faster (measured on a CPU with
# SGD, momentum and weight decay).
DENSE_FROM = 0.5


@dataclass(frozen=True)
class Split:
    """A tensor's mask as indices: of its active (trained) or of its frozen entries; both None if all train.

    Attributes:
        active: rising indices of the active entries, shape (k,), if the optimizer steps only them.
        frozen: rising indices of the frozen entries, if the optimizer steps the whole tensor.
    """

    active: Tensor | None = None
    frozen: Tensor | None = None

    @classmethod
    def of(cls, mask: Tensor | None) -> Split:
        """Convert a mask into indices of its active entries, or of its frozen entries if most are active.

        Without a mask all entries are active.

        Example:
            >>> Split.of(torch.tensor([True, False, False])).active.tolist()
            [0]
            >>> Split.of(torch.tensor([True, True, False])).frozen.tolist()
            [2]
        """
        num_active = 0 if mask is None else int(mask.count_nonzero())
        if mask is None or num_active == mask.numel():
            return cls()
        flat = mask.detach().flatten()
        if num_active < DENSE_FROM * flat.numel():
            return cls(active=flat.nonzero().view(-1))
        return cls(frozen=(~flat).nonzero().view(-1))

    @property
    def is_whole(self) -> bool:
        """True if all entries of the tensor are active (train)."""
        return self.active is None and self.frozen is None

    def mask(self, like: Tensor) -> Tensor:
        """Convert the indices into a mask: bool, of the shape and on the device of ``like``.

        Example:
            >>> Split(active=torch.tensor([1])).mask(torch.zeros(3)).tolist()
            [False, True, False]
        """
        index = self.active if self.active is not None else self.frozen
        mask = torch.full(like.shape, self.active is None, device=like.device)
        if index is not None:
            mask.view(-1)[index] = self.active is not None
        return mask

    def indices(self, like: Tensor) -> Tensor:
        """Return the indices of the active (trained) entries, rising, shape (k,).

        Example:
            >>> Split(frozen=torch.tensor([1])).indices(torch.zeros(3)).tolist()
            [0, 2]
        """
        if self.active is not None:
            return self.active
        return self.mask(like).flatten().nonzero().view(-1)

    def expanded(self, state: Tensor, like: Tensor) -> Tensor:
        """Expand an optimizer's state of active entries to the shape of ``like``; frozen entries are arbitrary."""
        if self.active is None:
            return state.clone()
        whole = torch.zeros_like(like, dtype=state.dtype)
        put(whole, self.active, state)
        return whole

    def fitted(self, param: Tensor) -> Split:
        """Move the indices to a parameter's device; raises ValueError if an index is outside the parameter."""
        index = self.active if self.active is not None else self.frozen
        if index is None:
            return self
        if len(index) and int(index[-1]) >= param.numel():
            raise ValueError(
                f"masks: one has the index {int(index[-1])}, and the parameter has the shape {tuple(param.shape)}: the "
                "state of the optimizer is that of another model"
            )
        index = index.to(param.device)
        return Split(active=index) if self.active is not None else Split(frozen=index)


def take(tensor: Tensor, index: Tensor) -> Tensor:
    """Return the entries of a tensor at the given flat indices, shape (k,).

    Example:
        >>> take(torch.tensor([[1.0, 2.0], [3.0, 4.0]]), torch.tensor([1, 2]))
        tensor([2., 3.])
    """
    return tensor.reshape(-1).index_select(0, index)


def put(tensor: Tensor, index: Tensor, values: Tensor) -> None:
    """Write values into a tensor at the given flat indices, in place.

    Example:
        >>> tensor = torch.zeros(2, 2)
        >>> put(tensor, torch.tensor([1]), torch.tensor([5.0]))
        >>> tensor.tolist()
        [[0.0, 5.0], [0.0, 0.0]]
    """
    flat = tensor.reshape(-1).scatter_(0, index, values)
    if not tensor.is_contiguous():  # `reshape` has made a copy
        tensor.copy_(flat.view(tensor.shape))


# Values of this many entries stay in a core's cache from reading to writing. An accelerator is faster
# with all tensors in one chunk.
MOST_ENTRIES_ON_CPU = 50_000


class Chunk:
    """A group of parameters, equal in dtype and device, whose active entries an optimizer updates together.

    Args:
        params: parameters with active entries.
        active: indices of the active entries of each, shape (k_i,).
        memory: buffer for values and gradients, shape (2, n) with n at least Σ k_i.

    Attributes:
        params: the parameters.
        values: active entries of each parameter after `read`, shape (k_i,), to be updated in place.
        grads: gradients of these entries, of the same shapes.

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
        """Copy active entries and their gradients from the parameters; raises ValueError for sparse gradients."""
        for param, flat, index, value, grad in self._reads:
            whole = param.grad
            assert whole is not None
            if whole.layout is not torch.strided:
                raise ValueError(
                    "masks need dense gradients: construct nn.Embedding with sparse=False"
                )
            torch.index_select(whole.reshape(-1), 0, index, out=grad)
            here = param.reshape(-1) if flat is None else flat
            torch.index_select(here, 0, index, out=value)

    def write(self) -> None:
        """Write the updated values of active entries back into the parameters."""
        for param, flat, index, value, _ in self._reads:
            if flat is None:
                put(param, index, value)
            else:
                flat.scatter_(0, index, value)


class ActiveChunks:
    """Cache of an optimizer's `Chunk` objects, rebuilt only if parameters or masks change."""

    def __init__(self) -> None:
        self._known: dict[int, tuple[list[Any], list[Tensor], list[Chunk]]] = {}

    def of(self, number: int, params: list[Tensor], active: list[Tensor]) -> list[Chunk]:
        """Return the `Chunk` objects of one parameter group, cached.

        Args:
            number: number of the group.
            params: parameters with a gradient, of which some entries are active and some frozen.
            active: indices of their active entries.
        """
        # indices and memory of known chunks are kept alive, so no other tensor can have their addresses
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
    """Group (parameter, indices) pairs so that each group's active entries fit into the CPU's cache."""
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
