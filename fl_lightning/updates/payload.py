"""Which numbers travel, and in which form: what transforms hand over and the codec writes.

    Dense       x_i                           the numbers themselves, in their dtype
    Quantised   x_i = o_b + s_b c_i           integers c_i of 1 to 8 bits, a scale (and offset) a block
    Sparse      x_i = v_j if i = i_j, else 0  some of k numbers, and where they stand

A payload is a description, it knows nothing of bytes. `Sparse` holds either of the other two.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

# How many neighbours share a scale: so many each, each group its own number, or all of them.
Block = int | tuple[int, ...] | None

FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)


@dataclass(frozen=True, eq=False)
class Dense:
    """Every number by itself.

    Args:
        values: shape (n,), of dtype float64, float32, float16 or bfloat16, in which it travels.

    Raises:
        ValueError: for another shape or dtype.

    Example:
        >>> Dense(torch.tensor([1.0, 2.0]).half()).to_dense()
        tensor([1., 2.])
    """

    values: Tensor

    def __post_init__(self) -> None:
        if self.values.dim() != 1 or self.values.dtype not in FLOATS:
            raise ValueError(
                f"values must be a vector of one of {', '.join(map(str, FLOATS))}, got shape "
                f"{tuple(self.values.shape)} and {self.values.dtype}"
            )

    @property
    def size(self) -> int:
        """How many numbers this stands for."""
        return self.values.numel()

    @property
    def is_half(self) -> bool:
        """Whether they are rounded to half precision."""
        return self.values.dtype in (torch.float16, torch.bfloat16)

    def to_dense(self) -> Tensor:
        """Return the numbers in float32 or wider, shape (n,)."""
        return self.values if self.values.dtype == torch.float64 else self.values.float()


@dataclass(frozen=True, eq=False)
class Quantised:
    """Integers of a few bits, with a scale for each block of neighbours.

    Args:
        codes: shape (n,). Without offsets int8, from -2^(bits-1) to 2^(bits-1) - 1; with offsets
            uint8, from 0 to 2^bits - 1.
        bits: of a code, from 1 to 8; without offsets from 2, because one bit has no sign and value.
        scales: what a step of one is worth, ≥ 0, float32, shape (number of blocks,).
        offsets: what the code 0 stands for, float32, shape (number of blocks,); None for 0.
        block: numbers that share a scale, the last block may have fewer; of blocks that differ,
            the size of each; None for one block.

    Raises:
        ValueError: if shapes, dtypes or ranges do not fit together.

    Example:
        >>> codes = torch.tensor([0, 255, 128], dtype=torch.uint8)
        >>> affine = Quantised(codes, 8, torch.tensor([0.5]), offsets=torch.tensor([-1.0]))
        >>> affine.to_dense()
        tensor([ -1.0000, 126.5000,  63.0000])
    """

    codes: Tensor
    bits: int
    scales: Tensor
    offsets: Tensor | None = None
    block: Block = None

    def __post_init__(self) -> None:
        lowest = 2 if self.offsets is None else 1
        if not lowest <= self.bits <= 8:
            raise ValueError(f"bits must be from {lowest} to 8, got {self.bits}")
        sizes = self.block if isinstance(self.block, tuple) else (self.block or 1,)
        if min(sizes, default=1) < 1 or self.block == 0:
            raise ValueError(f"block must be at least 1, or None for one block, got {self.block}")
        wanted = torch.int8 if self.offsets is None else torch.uint8
        if self.codes.dim() != 1 or self.codes.dtype != wanted:
            raise ValueError(
                f"codes must be a vector of {wanted}, got shape {tuple(self.codes.shape)} and "
                f"{self.codes.dtype}"
            )
        if isinstance(self.block, tuple) and sum(self.block) != self.size:
            raise ValueError(f"blocks of {sum(self.block)} numbers in all, got {self.size} codes")
        for name, values in (("scales", self.scales), ("offsets", self.offsets)):
            if values is None:
                continue
            if values.shape != (self.num_blocks,) or values.dtype != torch.float32:
                raise ValueError(
                    f"{name} must be {self.num_blocks} numbers of float32, one a block, got shape "
                    f"{tuple(values.shape)} and {values.dtype}"
                )

    @property
    def size(self) -> int:
        """How many numbers this stands for."""
        return self.codes.numel()

    @property
    def num_blocks(self) -> int:
        """How many blocks share their scale."""
        return num_blocks(self.size, self.block)

    def to_dense(self) -> Tensor:
        """Return the numbers in float32, shape (n,)."""
        values = self.codes.float() * per_member(self.scales, self.size, self.block)
        if self.offsets is None:
            return values
        return values.add_(per_member(self.offsets, self.size, self.block))


@dataclass(frozen=True, eq=False)
class Sparse:
    """Some of ``size`` numbers; the others are zero.

    Args:
        indices: where they stand, int64, strictly increasing from 0 to size - 1, shape (n,).
        values: the numbers there, n of them.
        size: how many numbers there are in all.

    Raises:
        ValueError: if shapes or dtypes do not fit together.

    Example:
        >>> Sparse(torch.tensor([1, 3]), Dense(torch.tensor([5.0, 6.0])), size=4).to_dense()
        tensor([0., 5., 0., 6.])
    """

    indices: Tensor
    values: Dense | Quantised
    size: int

    def __post_init__(self) -> None:
        if self.indices.shape != (self.values.size,) or self.indices.dtype != torch.int64:
            raise ValueError(
                f"indices must be {self.values.size} of int64, one a value, got shape "
                f"{tuple(self.indices.shape)} and {self.indices.dtype}"
            )
        if self.values.size > self.size:
            raise ValueError(f"{self.values.size} values do not fit into size={self.size}")

    @property
    def is_half(self) -> bool:
        """Whether the values are rounded to half precision."""
        return isinstance(self.values, Dense) and self.values.is_half

    def to_dense(self) -> Tensor:
        """Return all numbers in float32 or wider, shape (size,)."""
        values = self.values.to_dense()
        return values.new_zeros(self.size).scatter_(0, self.indices, values)


Payload = Dense | Quantised | Sparse


def num_blocks(size: int, block: Block) -> int:
    """Return how many blocks ``size`` numbers make; none at all make none."""
    if isinstance(block, tuple):
        return len(block)
    return -(-size // (block or max(size, 1)))


def per_member(per_block: Tensor, size: int, block: Block) -> Tensor:
    """Return each block's number for each of its members; one block's as it is."""
    if isinstance(block, tuple):
        sizes = torch.tensor(block, dtype=torch.int64, device=per_block.device)
        return per_block.repeat_interleave(sizes)
    if block is None or len(per_block) == 1:
        return per_block
    return per_block.repeat_interleave(block)[:size]
