"""Updates of a single step of SGD, left as products of two thin matrices.

    Δ_k = e_kᵀ a_k,        ‖Δ_k‖ ≤ ‖e_k‖ ‖a_k‖

with the errors e (B, O) at a dense layer's outputs, times the learning rate, and its inputs a (B, I).
The O·I numbers are made where they go into the mean, by `dense_fold`, which sums their squares as well;
that they will be finite is known before from the bound.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from fl_lightning.client.direct_linear import FEWEST_INPUTS, dense_fold
from fl_lightning.core.update import Rows

# Squares of norms below it are surely finite.
_BOUND = 1e38
# Of so few numbers, a call for each client takes longer than a copy of all.
_FEW_NUMBERS = 4096


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

    def of(self, rows: Rows) -> Factors:
        """Return those of some clients."""
        return Factors(self.errors[rows], self.inputs[rows])

    def bound(self) -> float:
        """Return what the sum of all squares is not larger than; nan or ∞ if a number may be."""
        return _squared(self.errors) * _squared(self.inputs)

    def fold(self, mean: Tensor, shares: Sequence[float]) -> Tensor:
        """Have a mean, a vector, take in one after the other; return each one's sum of squares."""
        weights = mean.view(self.errors.shape[2], self.inputs.shape[2])
        return dense_fold(weights, self.errors, self.inputs, shares)


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

    def bound(self) -> float:
        """Return the sum of all squares."""
        return _squared(self.values)

    def fold(self, mean: Tensor, shares: Sequence[float]) -> Tensor:
        """Have a mean, a vector, take in one after the other; return each one's sum of squares."""
        if FEWEST_INPUTS <= len(mean) <= _FEW_NUMBERS:
            alone = self.values.unsqueeze(1)  # one example, whose error is 1
            return dense_fold(mean.unsqueeze(0), torch.ones_like(alone[..., :1]), alone, shares)
        for values, share in zip(self.values, shares, strict=True):
            mean.lerp_(values, share)
        return self.values.square().sum(1)


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
        self._squares: Tensor | None = None

    @property
    def shape(self) -> tuple[int, int]:
        """(m, k)."""
        return self._parts[0].shape[0], sum(part.shape[1] for part in self._parts)

    @cached_property
    def whole(self) -> Tensor:
        """All numbers, shape (m, k)."""
        return self._multiply()

    @property
    def are_finite(self) -> bool:
        """Whether it is sure of every number and every norm, without the numbers."""
        return sum(part.bound() for part in self._parts) < _BOUND

    @property
    def norms(self) -> Tensor:
        """The L2 norm of each, shape (m,); known once they are folded, before by the numbers."""
        if self._squares is not None:
            return self._squares.sqrt()
        norms: Tensor = torch.linalg.vector_norm(self.whole, dim=1)
        return norms

    def of(self, rows: Rows) -> ThinDeltas:
        """Return those of some clients."""
        return ThinDeltas([part.of(rows) for part in self._parts], lambda: self.whole[rows])

    def fold(self, mean: Tensor, shares: Sequence[float]) -> None:
        """Have a mean take in one after the other, with the bits that the numbers would give it.

        Args:
            mean: shape (k,); m ← m + share · (delta - m).
            shares: of each, in [0, 1].
        """
        places = mean.split([part.shape[1] for part in self._parts])
        folded = [p.fold(place, shares) for p, place in zip(self._parts, places, strict=True)]
        self._squares = torch.stack(folded).sum(0)


def _squared(tensor: Tensor) -> float:
    """Return the sum of squares."""
    flat = tensor.reshape(-1)
    return float(torch.dot(flat, flat))
