"""The entries of a tensor that may move: as indices, which are faster than a mask where they are few.

    take: v = p[active]        put: p[active] = v

An optimizer that acts on each number for itself can act on ``v`` alone: its arithmetic and its
state have as many numbers as entries move. Where nearly all move it is cheaper to step the whole
tensor and put the few frozen entries back.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

# From this fraction of moving entries on, a step of the whole tensor is faster (measured on a CPU
# with SGD, momentum and weight decay).
DENSE_FROM = 0.5


@dataclass(frozen=True)
class Split:
    """Which entries of one tensor move; both None if all do.

    Attributes:
        active: indices of those that move, in rising order, shape (k,); the optimizer steps and
            remembers these alone.
        frozen: indices of those that do not, where the optimizer steps the whole tensor.
    """

    active: Tensor | None = None
    frozen: Tensor | None = None

    @classmethod
    def of(cls, mask: Tensor | None) -> Split:
        """Return the cheaper form of a mask (``True`` = may move; None = all may).

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
        """Whether all entries move."""
        return self.active is None and self.frozen is None

    def mask(self, like: Tensor) -> Tensor:
        """Return the mask, bool, of the shape and on the device of a tensor.

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
        """Return which entries of a tensor move, in rising order, shape (k,).

        Example:
            >>> Split(frozen=torch.tensor([1])).indices(torch.zeros(3)).tolist()
            [0, 2]
        """
        if self.active is not None:
            return self.active
        return self.mask(like).flatten().nonzero().view(-1)

    def spread(self, state: Tensor, like: Tensor) -> Tensor:
        """Return state in the shape of a tensor; what it says of frozen entries means nothing."""
        if self.active is None:
            return state.clone()
        whole = torch.zeros_like(like, dtype=state.dtype)
        put(whole, self.active, state)
        return whole

    def fitted(self, param: Tensor) -> Split:
        """Return it on a parameter's device, sure to lie inside it.

        Raises:
            ValueError: if an index lies outside the parameter.
        """
        index = self.active if self.active is not None else self.frozen
        if index is None:
            return self
        if len(index) and int(index[-1]) >= param.numel():
            raise ValueError(
                f"masks: one has an entry {int(index[-1])}, but the parameter is of shape "
                f"{tuple(param.shape)}: the state belongs to another model"
            )
        index = index.to(param.device)
        return Split(active=index) if self.active is not None else Split(frozen=index)


def take(tensor: Tensor, index: Tensor) -> Tensor:
    """Return the entries at indices into the flattened tensor, shape (k,).

    Example:
        >>> take(torch.tensor([[1.0, 2.0], [3.0, 4.0]]), torch.tensor([1, 2]))
        tensor([2., 3.])
    """
    return tensor.reshape(-1).index_select(0, index)


def put(tensor: Tensor, index: Tensor, values: Tensor) -> None:
    """Write entries at indices into the flattened tensor, in place.

    Example:
        >>> tensor = torch.zeros(2, 2)
        >>> put(tensor, torch.tensor([1]), torch.tensor([5.0]))
        >>> tensor.tolist()
        [[0.0, 5.0], [0.0, 0.0]]
    """
    flat = tensor.reshape(-1).scatter_(0, index, values)
    if not tensor.is_contiguous():  # then it is flattened into a copy
        tensor.copy_(flat.view(tensor.shape))
