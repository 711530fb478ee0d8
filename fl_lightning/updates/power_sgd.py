"""Low rank: of each matrix two thin factors are sent, which a few power iterations find.

    P = orth(M Q),  Q ← orth(Mᵀ P), again and again;   sent: P and R = Mᵀ P;   T(M) = P Rᵀ

M is a tensor of shape (out, …) as a matrix of shape (out, rest), without dimensions of 1. Biases,
norms and every tensor of which the factors would have as many numbers travel as they are. P Pᵀ
projects, so that T(M) is M itself if its rank is at most r, and never longer.

Source: Vogels, Karimireddy and Jaggi 2019 (1905.13727), Algorithm 1. Differs: there, workers
average their P before they compute R, with which P Rᵀ is of the mean gradient; here each client's
update has factors of its own, as clients do not wait for each other, and the server adds up what
they stand for. There, Q goes on from the last step, because each iteration costs an exchange. Here
it costs arithmetic only: Q starts at random from the update's seed and several iterations take
place at once (Halko, Martinsson and Tropp 2011, Algorithm 4.4). So a client needs no second memory,
and one that is seen for the first time in a thousand rounds sends as good a matrix as others.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import final

import torch
from torch import Tensor

from fl_lightning.core.errors import check_range
from fl_lightning.updates.payload import Dense, Payload
from fl_lightning.updates.transform import Shapes, Transform, only_dense


@final
@dataclass(frozen=True)
class PowerSGD(Transform):
    """Sends matrices of low rank. Biased: use it with `ErrorFeedback`.

    It comes before every other compression; a quantiser in blocks may follow. With a mask, tensors
    that train only in part have no matrix and travel as they are.

    Args:
        rank: r of each matrix; where it is high enough to save nothing, nothing changes.
        iterations: of the power method; with 1 a client computes the least.
        shapes: of the tensors that a vector consists of; a federation tells those of its model.

    Raises:
        ConfigurationError: if ``rank`` or ``iterations`` is below 1.

    Example:
        >>> outer = torch.outer(torch.arange(4.0), torch.tensor([1.0, -1.0, 2.0]))
        >>> low = PowerSGD(rank=1, shapes=[(4, 3), (2,)])
        >>> values = torch.cat([outer.flatten(), torch.tensor([5.0, 6.0])])
        >>> payload = low.on_client(Dense(values), seed=0)
        >>> payload.size  # 4 + 3 for the matrix, and the bias
        9
        >>> torch.allclose(low.on_server(payload, seed=0, size=14).to_dense(), values, atol=1e-5)
        True
    """

    rank: int = 2
    iterations: int = 4
    shapes: Sequence[Sequence[int]] | None = None

    def __post_init__(self) -> None:
        for name in ("rank", "iterations"):
            check_range(name, getattr(self, name), "at least 1")

    @property
    def name(self) -> str:
        """Name in the message's header; iterations are not part of it."""
        return f"low rank {self.rank}"

    @property
    def needs_shapes(self) -> bool:
        """Always."""
        return True

    def with_shapes(self, shapes: Shapes) -> PowerSGD:
        """Return the same for vectors of these tensors."""
        return replace(self, shapes=shapes)

    @property
    def approximates(self) -> bool:
        """Always."""
        return True

    def sent_size(self, size: int) -> int:
        """Return how many numbers are sent."""
        return sum(part.num_sent for part in self._parts_of(size))

    def on_client(self, payload: Payload, seed: int) -> Payload:
        """Factor each matrix of the delta."""
        values = only_dense(payload, self.name)
        parts = self._parts_of(values.numel())
        if not any(part.rank for part in parts):
            return payload
        generator = torch.Generator().manual_seed(seed)
        sent: list[Tensor] = []
        for part, numbers in zip(parts, values.split([p.size for p in parts]), strict=True):
            if part.rank:
                matrix = numbers.view(part.rows, part.columns)
                factors = low_rank_factors(matrix, part.rank, self.iterations, generator)
                sent += (factor.flatten() for factor in factors)
            else:
                sent.append(numbers)
        return Dense(torch.cat(sent))

    def on_server(self, payload: Payload, seed: int, size: int) -> Payload:
        """Multiply factors."""
        parts = self._parts_of(size)
        if not any(part.rank for part in parts):
            return payload
        pieces = payload.to_dense().split([part.num_sent for part in parts])
        tensors = []
        for part, numbers in zip(parts, pieces, strict=True):
            if part.rank:
                left = numbers[: part.rows * part.rank].view(part.rows, part.rank)
                right = numbers[part.rows * part.rank :].view(part.columns, part.rank)
                numbers = (left @ right.T).flatten()
            tensors.append(numbers)
        return Dense(torch.cat(tensors))

    @cached_property
    def _parts(self) -> list[_Part] | None:
        return None if self.shapes is None else [_part(s, self.rank) for s in self.shapes]

    def _parts_of(self, size: int) -> list[_Part]:
        if self._parts is None:
            raise ValueError(f"{self.name} works on tensors: say their shapes")
        expected = sum(part.size for part in self._parts)
        if size != expected:
            raise ValueError(
                f"{self.name} works on tensors of {expected} numbers in all, got {size}: put it "
                "before every other compression"
            )
        return self._parts


def low_rank_factors(
    matrix: Tensor, rank: int, iterations: int, generator: torch.Generator
) -> tuple[Tensor, Tensor]:
    """Return P and R, whose product P Rᵀ is near the best approximation of its rank.

    Args:
        matrix: M, shape (m, n).
        rank: r, at most m and n.
        iterations: of the power method, ≥ 1.
        generator: of the start, on the CPU.

    Returns:
        P with orthonormal columns, shape (m, r), and R = Mᵀ P, shape (n, r).

    Example:
        >>> matrix = torch.diag(torch.tensor([3.0, 2.0, 0.0]))
        >>> left, right = low_rank_factors(matrix, 2, 1, torch.Generator().manual_seed(0))
        >>> torch.allclose(left @ right.T, matrix, atol=1e-6)
        True
    """
    start = torch.randn(matrix.shape[1], rank, generator=generator).to(matrix)
    left = _orthonormal(matrix @ start)
    for _ in range(iterations - 1):
        left = _orthonormal(matrix @ _orthonormal(_times_transposed(matrix, left)))
    return left, _times_transposed(matrix, left)


def _times_transposed(matrix: Tensor, left: Tensor) -> Tensor:
    """Return Mᵀ P; written so, the matrix is read along its rows, at several times the speed."""
    return (left.T @ matrix).T


def _orthonormal(columns: Tensor) -> Tensor:
    basis: Tensor = torch.linalg.qr(columns).Q
    return basis


@dataclass(frozen=True)
class _Part:
    """A tensor as a matrix; rank 0 where it travels as it is."""

    rows: int
    columns: int
    rank: int

    @property
    def size(self) -> int:
        return self.rows * self.columns

    @property
    def num_sent(self) -> int:
        return self.rank * (self.rows + self.columns) if self.rank else self.size


def _part(shape: Sequence[int], rank: int) -> _Part:
    rows, *rest = [length for length in shape if length != 1] or [1]
    part = _Part(rows, math.prod(rest), rank)
    return part if part.num_sent < part.size else replace(part, rank=0)
