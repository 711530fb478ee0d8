"""Sparsifiers: top-k, random-k and low rank, which send a part of an update's numbers.

Top-k: only the numbers of largest magnitude are sent, the others count as zero.

    T(x)_i = x_i if |x_i| is among the k largest, else 0

Source: Aji and Heafield 2017 (1704.05021); Stich et al. 2018 (1809.07599) for why it needs error
feedback. Of equal magnitudes the first ones are chosen, so that the choice is the same everywhere;
numbers that are exactly zero are never sent.

Random-k: numbers at random indices are sent, without the indices, which the seed determines.

    T(x)_i = (d / k) x_i if i ∈ S, else 0         S: k of d places, drawn from the shared seed

Unbiased, because every place is drawn with probability k / d. Source: Konečný et al. 2016
(1610.05492), random mask; Stich et al. 2018 (1809.07599).

Low rank: two thin factors of each matrix are sent, which a few power iterations find.

    P = orth(M Q),  Q ← orth(Mᵀ P), repeated;   sent: P and R = Mᵀ P;   T(M) = P Rᵀ

M is a tensor of shape (out, …) as a matrix of shape (out, rest), without dimensions of 1. Biases, norm
layers and tensors whose factors would save nothing are sent unchanged. P Pᵀ is a projection, so T(M) is
M itself if M has rank r or less, and is never longer than M.

Source: Vogels, Karimireddy and Jaggi 2019 (1905.13727), Algorithm 1. Differs: there, workers
average their P before they compute R, so that P Rᵀ approximates the mean gradient; here each client
factors its own update, because clients do not wait for each other, and the server adds up the products.
There, Q starts from the last step's, because each iteration costs an exchange. Here an iteration costs
arithmetic only: Q starts at random from the update's seed, and several iterations follow (Halko,
Martinsson and Tropp 2011, Algorithm 4.4). So a client needs no second memory, and a client's first
update is compressed as well as later ones.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import ClassVar, final

import numpy as np
import torch
from torch import Tensor

from fl_lightning.core.traits import Trait, Traits
from fl_lightning.kernels import keys_below, places_from
from fl_lightning.updates.payload import Dense, Payload, Sparse
from fl_lightning.updates.transform import Shapes, Transform, num_kept, only_dense

_RANGES = {"fraction": "in (0, 1]: it is the share of numbers that is sent"}


@final
@dataclass(frozen=True)
class TopK(Transform):
    """Keeps the numbers of largest magnitude. Biased: use it with `ErrorFeedback`.

    Args:
        fraction: fraction of numbers to keep, in (0, 1], at least one number; 1 changes nothing.

    Raises:
        ConfigurationError: if ``fraction`` is not in (0, 1].

    Example:
        >>> sparse = TopK(0.5).on_client(Dense(torch.tensor([1.0, -4.0, 0.0, 2.0])), seed=0)
        >>> sparse.to_dense()
        tensor([ 0., -4.,  0.,  2.])
    """

    fraction: float

    ranges: ClassVar[dict[str, str]] = _RANGES

    @property
    def name(self) -> str:
        """Name of the transform with its options, as in the message's header."""
        return f"top-k {self.fraction:g}"

    def on_client(self, payload: Payload, seed: int) -> Payload:
        """Keep the numbers of largest magnitude and drop the others."""
        if self.fraction == 1:
            return payload
        values = only_dense(payload, self.name)
        kept = num_kept(values.numel(), self.fraction)
        if not kept:
            return payload
        sizes = values.abs()
        at = sizes.numel() - kept
        if sizes.is_cpu:  # where NumPy's selection is vectorised, five times as fast
            least = torch.from_numpy(np.partition(sizes.numpy(), at)[at : at + 1])
        else:
            least = sizes.kthvalue(at + 1).values
        indices = places_from(sizes, least)
        if len(indices) > kept or not least:
            sure = (sizes > least).nonzero().flatten()
            ties = ((sizes == least) & (sizes > 0)).nonzero().flatten()[: kept - len(sure)]
            indices = torch.cat([sure, ties]).sort().values
        return Sparse(indices, Dense(values.index_select(0, indices)), values.numel())


_AS_OPTION = Traits(
    needs={Trait.SINGLE_UPDATES: "sends different coordinates for every client"},
    instead={Trait.SINGLE_UPDATES: "give it to the aggregator, as random_k of SecureMean"},
)


@final
@dataclass(frozen=True)
class RandomK(Transform):
    """Keeps numbers at random indices.

    Args:
        fraction: fraction of numbers to keep, in (0, 1], at least one number; 1 changes nothing.
        unbiased: scale the kept numbers by d / k. Use false with `ErrorFeedback`, which sends the other
            numbers later.

    Raises:
        ConfigurationError: if ``fraction`` is not in (0, 1].

    Example:
        >>> half = RandomK(0.5)
        >>> payload = half.on_client(Dense(torch.tensor([1.0, 2.0, 3.0, 4.0])), seed=1)
        >>> payload.size
        2
        >>> half.on_server(payload, seed=1, size=4).to_dense()
        tensor([2., 0., 6., 0.])
    """

    fraction: float
    unbiased: bool = True

    ranges: ClassVar[dict[str, str]] = _RANGES

    @property
    def name(self) -> str:
        """Name of the transform with its options, as in the message's header."""
        return f"random-k {self.fraction:g}{'' if self.unbiased else ' unscaled'}"

    @property
    def remedy(self) -> str:
        """Advice to the user if kept numbers are scaled up, so that errors grow under error feedback; else empty."""
        return "set unbiased: false" if self.unbiased and self.fraction < 1 else ""

    @property
    def traits(self) -> Traits:
        """Conditions on a round that random-k needs or breaks; secure sums let clients share its indices."""
        return super().traits | _AS_OPTION

    def sent_size(self, size: int) -> int:
        """Return how many of ``size`` numbers are kept and sent."""
        return num_kept(size, self.fraction)

    def on_client(self, payload: Payload, seed: int) -> Payload:
        """Keep the numbers at random indices, scaled up to an unbiased estimate if the option ``unbiased`` is set."""
        if self.fraction == 1:
            return payload
        values = only_dense(payload, self.name)
        kept = values[self._indices(seed, values.numel()).to(values.device)]
        return Dense(kept * (values.numel() / max(1, len(kept))) if self.unbiased else kept)

    def on_server(self, payload: Payload, seed: int, size: int) -> Payload:
        """Put the kept numbers back at their indices in a vector of zeros."""
        if self.fraction == 1:
            return payload
        values = payload.to_dense()
        return Sparse(self._indices(seed, size).to(values.device), Dense(values), size)

    def _indices(self, seed: int, size: int) -> Tensor:
        """Return increasing random indices, without replacement: those of the smallest of ``size`` random keys.

        NumPy guarantees the raw integers of PCG64 in every version, but not its choices and permutations;
        neither does PyTorch.
        """
        kept = num_kept(size, self.fraction)
        if not kept:
            return torch.empty(0, dtype=torch.int64)
        # almost certainly the smallest keys are below this bound, a little above their share
        share = min(1.0, kept / size + 8 * np.sqrt(kept) / size + 64 / size)
        places, small = keys_below(seed, size, min(2**64 - 1, int(share * 2**64)))
        largest = np.partition(small, kept - 1)[kept - 1]
        return torch.from_numpy(places[small <= largest][:kept])


@final
@dataclass(frozen=True)
class PowerSGD(Transform):
    """Sends low-rank factors of each matrix. Biased: use it with `ErrorFeedback`.

    It must come before other compressions; a quantiser in blocks may follow. With a mask, tensors with
    frozen entries are no matrices and are sent unchanged.

    Args:
        rank: rank r of each matrix, ≥ 1; matrices for which the factors save nothing are sent unchanged.
        iterations: number of power iterations, ≥ 1.
        shapes: shapes of the tensors in a vector; None in a federation, which sets its model's shapes.

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

    ranges: ClassVar[dict[str, str]] = {"rank": "at least 1", "iterations": "at least 1"}
    needs_shapes = True
    approximates = True  # a matrix of higher rank

    @property
    def name(self) -> str:
        """Name of the transform as in the message's header, without the number of iterations."""
        return f"low rank {self.rank}"

    def with_shapes(self, shapes: Shapes) -> PowerSGD:
        """Return a copy for vectors in which tensors of these shapes are concatenated."""
        return replace(self, shapes=shapes)

    def sent_size(self, size: int) -> int:
        """Return how many values are sent: those of the factors and of tensors without factors."""
        return sum(part.num_sent for part in self._parts_of(size))

    def on_client(self, payload: Payload, seed: int) -> Payload:
        """Factor each matrix of the update."""
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
        """Rebuild each matrix as the product of its low-rank factors."""
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
            raise ValueError(f"{self.name} works on tensors: set shapes to those of the tensors")
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
    """Return P and R, whose product P Rᵀ is close to a matrix's best approximation of rank r.

    Args:
        matrix: M, shape (m, n).
        rank: r, at most m and n.
        iterations: number of power iterations, ≥ 1.
        generator: CPU generator of the random start.

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
    """Return Mᵀ P as (Pᵀ M)ᵀ, which reads M along its rows and is several times faster."""
    return (left.T @ matrix).T


def _orthonormal(columns: Tensor) -> Tensor:
    basis: Tensor = torch.linalg.qr(columns).Q
    return basis


@dataclass(frozen=True)
class _Part:
    """A tensor of the update, viewed as a matrix; rank 0 if it is sent unfactorised."""

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
