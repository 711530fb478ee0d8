"""Updates of a single step of SGD, left as products of two thin matrices.

    Δ_k = e_kᵀ a_k,        ‖Δ_k‖² = Σ_ij (e_k e_kᵀ)_ij (a_k a_kᵀ)_ij

with the errors e (B, O) at a dense layer's outputs, times the learning rate, and its inputs a (B, I).
With few examples a batch the norm does not need the O·I numbers, and `dense_fold` makes them where they
go into the mean.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from fl_lightning.client.direct_linear import dense, dense_fold
from fl_lightning.core.update import Rows

# Below this share of the largest possible norm's square, rounding would show in a norm.
_CANCELLED = 1e-3


class Factors(NamedTuple):
    """m matrices errorsᵀ inputs: gradients of a thin layer's weight, or deltas.

    Attributes:
        errors: at the layer's output, for deltas times the learning rate, shape (m, B, O).
        inputs: of the layer, shape (m, B, I).
    """

    errors: Tensor
    inputs: Tensor

    @property
    def shape(self) -> tuple[int, int]:
        """(m, numbers of one matrix)."""
        return len(self.errors), self.errors.shape[2] * self.inputs.shape[2]

    @property
    def pays(self) -> bool:
        """Whether the norms take less time than writing the numbers and reading them twice.

        The first goes with B² (O + I), the second with O I; the factor is measured.
        """
        (_, examples, out), size = self.errors.shape, self.inputs.shape[2]
        return examples**2 * (out + size) < 10 * out * size

    def of(self, rows: Rows) -> Factors:
        """Return those of some clients."""
        return Factors(self.errors[rows], self.inputs[rows])

    def squares(self) -> Tensor:
        """Return the sum of each matrix's squares, shape (m,)."""
        errors, inputs = self.errors @ self.errors.mT, dense(self.inputs, self.inputs)
        squares = (errors * inputs).sum((1, 2))
        most = errors.diagonal(0, 1, 2).sum(1) * inputs.diagonal(0, 1, 2).sum(1)
        rows = (squares < _CANCELLED * most).nonzero()[:, 0].tolist()
        if rows:  # examples that pull in opposite directions
            products = self.errors[rows].mT @ self.inputs[rows]
            squares[rows] = products.square().sum((1, 2))
        return squares

    def fold(self, mean: Tensor, shares: Sequence[float]) -> None:
        """Have a mean, a vector, take in one after the other."""
        weights = mean.view(self.errors.shape[2], self.inputs.shape[2])
        dense_fold(weights, self.errors, self.inputs, shares)


class Numbers(NamedTuple):
    """m vectors as they are.

    Attributes:
        values: shape (m, n).
    """

    values: Tensor

    @property
    def shape(self) -> tuple[int, int]:
        """(m, n)."""
        return len(self.values), self.values.shape[1]

    def of(self, rows: Rows) -> Numbers:
        """Return those of some clients."""
        return Numbers(self.values[rows])

    def squares(self) -> Tensor:
        """Return the sum of each vector's squares, shape (m,)."""
        return self.values.square().sum(1)

    def fold(self, mean: Tensor, shares: Sequence[float]) -> None:
        """Have a mean, a vector, take in one after the other."""
        for values, share in zip(self.values, shares, strict=True):
            mean.lerp_(values, share)


class ThinDeltas:
    """m deltas of k coordinates, some of which are products that nobody has multiplied out.

    Args:
        parts: what each consists of, in order, at least one; float32 on the CPU.
        multiply: returns all numbers, shape (m, k).

    Example:
        >>> errors, inputs = torch.ones(2, 3, 1), torch.ones(2, 3, 8)
        >>> parts = [Factors(0.5 * errors, inputs), Numbers(torch.zeros(2, 1))]
        >>> deltas = ThinDeltas(parts, lambda: torch.tensor([[1.5] * 8 + [0.0]] * 2))
        >>> deltas.shape, deltas.norms
        ((2, 9), tensor([4.2426, 4.2426]))
    """

    dtype = torch.float32

    def __init__(self, parts: Sequence[Factors | Numbers], multiply: Callable[[], Tensor]) -> None:
        self._parts, self._multiply = parts, multiply

    @property
    def shape(self) -> tuple[int, int]:
        """(m, k)."""
        return self._parts[0].shape[0], sum(part.shape[1] for part in self._parts)

    @cached_property
    def whole(self) -> Tensor:
        """All numbers, shape (m, k)."""
        return self._multiply()

    @cached_property
    def norms(self) -> Tensor:
        """The L2 norm of each, to about four digits, shape (m,); finite only if every number is."""
        return torch.stack([part.squares() for part in self._parts]).sum(0).sqrt()

    def of(self, rows: Rows) -> ThinDeltas:
        """Return those of some clients."""
        return ThinDeltas([part.of(rows) for part in self._parts], lambda: self.whole[rows])

    def fold(self, mean: Tensor, shares: Sequence[float]) -> None:
        """Have a mean take in one after the other, with the bits that the numbers would give it.

        Args:
            mean: shape (k,); m ← m + share · (delta - m).
            shares: of each, in [0, 1].
        """
        for part, place in zip(
            self._parts, mean.split([p.shape[1] for p in self._parts]), strict=True
        ):
            part.fold(place, shares)
