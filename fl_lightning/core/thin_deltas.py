"""Updates of a single local step, left as products of two thin matrices.

    Δ_k = e_kᵀ a_k,        ‖Δ_k‖² = Σ_ij (e_k e_kᵀ)_ij (a_k a_kᵀ)_ij,        Σ_k w_k Δ_k = (w e)ᵀ a

Here e (B, O) are the errors at a dense layer's outputs and a (B, I) its inputs. FedSGD asks for no more
than norms and a weighted sum, and with few examples a batch neither needs the O·I numbers of anybody's
update: the sum is one product over the examples of all clients.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

Rows = slice | list[int]


class Factors(NamedTuple):
    """m matrices errorsᵀ inputs, as in the gradient of a dense layer's weight.

    Attributes:
        errors: at the layer's output, shape (m, B, O).
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

    def squares(self) -> Tensor:
        """Return the sum of each matrix's squares, shape (m,)."""
        errors, inputs = (factor @ factor.mT for factor in self)
        return (errors * inputs).sum((1, 2)).clamp(min=0)  # it is not negative but for rounding

    def total(self, weights: Tensor) -> Tensor:
        """Return the matrices' weighted sum as a vector."""
        errors = (self.errors * weights[:, None, None]).flatten(0, 1)
        return (errors.mT @ self.inputs.flatten(0, 1)).flatten()


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

    def total(self, weights: Tensor) -> Tensor:
        """Return the vectors' weighted sum."""
        return weights @ self.values


class ThinDeltas:
    """m deltas of k coordinates that nobody has multiplied out, see `GroupUpdate`.

    Args:
        parts: what each consists of, in order, at least one.
        multiply: returns all numbers, shape (m, k).

    Example:
        >>> parts = [Factors(torch.ones(2, 3, 1), torch.ones(2, 3, 4)), Numbers(torch.zeros(2, 1))]
        >>> deltas = ThinDeltas(parts, lambda: torch.tensor([[3.0, 3.0, 3.0, 3.0, 0.0]] * 2))
        >>> deltas.norms, deltas.total(torch.tensor([1.0, 2.0]))
        (tensor([6., 6.]), tensor([9., 9., 9., 9., 0.]))
    """

    def __init__(self, parts: Sequence[Factors | Numbers], multiply: Callable[[], Tensor]) -> None:
        self._parts, self._multiply = parts, multiply

    @property
    def shape(self) -> tuple[int, int]:
        """(m, k)."""
        return self._parts[0].shape[0], sum(part.shape[1] for part in self._parts)

    @property
    def dtype(self) -> torch.dtype:
        """Of the numbers."""
        first: Tensor = self._parts[0][0]
        return first.dtype

    @cached_property
    def whole(self) -> Tensor:
        """All numbers, shape (m, k)."""
        return self._multiply()

    @cached_property
    def norms(self) -> Tensor:
        """The L2 norm of each, shape (m,); it is finite only if every number is."""
        return torch.stack([part.squares() for part in self._parts]).sum(0).sqrt()

    def total(self, weights: Tensor) -> Tensor:
        """Return the weighted sum, shape (k,); weights have shape (m,)."""
        return torch.cat([part.total(weights) for part in self._parts])

    def of(self, rows: Rows) -> ThinDeltas:
        """Return those of some clients."""
        return ThinDeltas([part.of(rows) for part in self._parts], lambda: self.whole[rows])
