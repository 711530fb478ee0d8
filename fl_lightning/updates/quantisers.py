"""Quantisers: numbers with fewer bits, with a scale for each block of neighbours.

Blocks of numbers that share a scale: so many neighbours, those of a tensor each, or all in one.

Numbers in half precision: two bytes each.

    T(x)_i = x_i rounded to the nearest number of bfloat16 (8 bits of precision) or float16 (11 bits)

What is beyond the format's range becomes its largest number, so that everything stays finite.

Rounding to evenly spaced levels between the smallest and the largest number of a block.

    c_i = round((x_i - o_b) / s_b),   o_b = min x,   s_b = (max x - min x) / (2^bits - 1)

The error is at most half a step. A block whose numbers are equal has s_b = 0 and comes out exactly.
Source: Jacob et al. 2018 (1712.05877), section 2.1, with the minimum itself in place of an integer
zero point, so that blocks far from zero lose nothing.

Stochastic uniform quantisation to a few bits, unbiased.

    T(x)_i = (N_b / s) ξ_i        ξ_i = ⌊y⌋ + 1 with probability y - ⌊y⌋, else ⌊y⌋;  y = s x_i / N_b

N_b is the norm of the block that holds x_i, s = 2^(bits-1) - 1 the number of levels on each side of
zero. One bit has the two levels ±N_b. Source: Alistarh et al. 2017 (1610.02132), section 3.1 with
the L2 norm; its experiments use the largest magnitude in blocks, which is the default here. Levels
are of fixed width: the paper's Elias code gains for few large numbers, for which there is top-k.

Signs with a scale: one bit a number.

    T(x)_i = s_b sign(x_i)        s_b = mean |x| over the block b

Source: Karimireddy et al. 2019 (1901.09847), ‖x‖₁/d · sign(x), with error feedback; after top-k it
is sparse ternary compression, Sattler et al. 2019 (1903.02891), Algorithm 1. The sign of 0 is +1.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal, Self, final

import torch
from torch import Tensor

from fl_lightning.core.errors import ConfigurationError, check_range
from fl_lightning.kernels import rounded_at_random, rounds_in_one_pass
from fl_lightning.updates.payload import (
    Block,
    Dense,
    Payload,
    Quantised,
    Sparse,
    num_blocks,
    per_member,
)
from fl_lightning.updates.sparsifiers import TopK
from fl_lightning.updates.transform import Chain, Shapes, Transform, with_values

# What a user says of blocks, and what it becomes once the tensors are known.
BlockOption = Block | Literal["tensor"]

# Numbers that are rounded at a time on a CPU: all that is made of them stays in its cache.
_PIECE = 1 << 15


class InBlocks(Transform):
    """Base of transforms that round numbers block by block; subclasses are dataclasses.

    Attributes:
        block: neighbours that share a scale, ``tensor`` for those of each tensor, None for all.
    """

    block: BlockOption

    def __post_init__(self) -> None:
        check_range("bits", getattr(self, "bits", None), "from 1 to 8")
        block = self.block
        is_wrong = block < 1 if isinstance(block, int) else isinstance(block, str)
        if is_wrong and block != "tensor":
            raise ConfigurationError(
                f"block must be at least 1, 'tensor', or None for one block, got {block!r}"
            )

    @property
    def needs_shapes(self) -> bool:
        """True if the blocks are tensors whose shapes are not known yet."""
        return self.block == "tensor"

    def with_shapes(self, shapes: Shapes) -> Self:
        """Return the transform with a block for each of these tensors."""
        sizes = tuple(size for size in map(math.prod, shapes) if size)
        return replace(self, block=sizes) if self.needs_shapes else self  # type: ignore[type-var]


def block_name(block: BlockOption) -> str:
    """Part of a transform's name that describes its blocks."""
    if block is None:
        return ""
    return f", blocks of {block}" if isinstance(block, int) else ", a block a tensor"


def known_block(block: BlockOption, size: int) -> Block:
    """Return the blocks of so many numbers.

    Raises:
        ValueError: if they are tensors, and these are not known, or others.
    """
    if block == "tensor":
        raise ValueError("blocks of a tensor each: say their shapes")
    if isinstance(block, tuple) and sum(block) != size:
        raise ValueError(
            f"blocks of a tensor each make {sum(block)} numbers, got {size}: use blocks of a fixed "
            "size after what leaves numbers out"
        )
    return block


def over_blocks(
    values: Tensor, block: Block, measure: Callable[[Tensor], Tensor], pad: float | Tensor = 0.0
) -> Tensor:
    """Apply a function to each block of values; returns shape (number of blocks, …).

    Args:
        values: shape (n,).
        block: see `Quantised`.
        measure: of rows of one block each.
        pad: what the last row is filled up with.
    """
    if isinstance(block, tuple):
        parts = [measure(part[None]) for part in values.split(list(block))]
        return torch.cat(parts) if parts else measure(values.view(0, 1))
    size = block or max(values.numel(), 1)
    rows = num_blocks(values.numel(), block)
    if values.numel() == rows * size:
        return measure(values.view(rows, size))
    padded = torch.empty(rows * size, dtype=values.dtype, device=values.device)
    padded[values.numel() :] = pad
    padded[: values.numel()] = values
    return measure(padded.view(rows, size))


def in_pieces(
    values: Tensor, dtype: torch.dtype, code: Callable[..., Tensor], *of_members: Tensor
) -> Tensor:
    """Return the codes of numbers, shape (n,), computed piece by piece.

    Args:
        values: shape (n,).
        dtype: of codes.
        code: of a piece, given also its numbers of ``of_members``.
        of_members: shape (n,), or (1,) for all.
    """
    count = values.numel()
    codes = torch.empty(count, dtype=dtype, device=values.device)
    size = _PIECE if values.device.type == "cpu" else max(1, count)
    for start in range(0, count, size):
        part = slice(start, start + size)
        codes[part] = code(values[part], *(m if m.numel() == 1 else m[part] for m in of_members))
    return codes


@final
@dataclass(frozen=True)
class Cast(Transform):
    """Sends numbers in half precision; after a choice like `TopK` or `PowerSGD`, those chosen.

    Args:
        dtype: ``bfloat16``, which has float32's range, or ``float16``, which is finer between
            6e-8 and 65,504.

    Raises:
        ConfigurationError: for another dtype.

    Example:
        >>> payload = Cast("float16").on_client(Dense(torch.tensor([0.1, 1e9])), seed=0)
        >>> payload.to_dense()
        tensor([9.9976e-02, 6.5504e+04])
    """

    dtype: Literal["bfloat16", "float16"] = "bfloat16"

    @property
    def name(self) -> str:
        """Name and options, as in the message's header."""
        return self.dtype

    def on_client(self, payload: Payload, seed: int) -> Payload:
        """Round the numbers to half precision."""
        if isinstance(payload, Dense):
            dtype: torch.dtype = getattr(torch, self.dtype)
            largest = torch.finfo(dtype).max
            return Dense(payload.to_dense().clamp(-largest, largest).to(dtype))
        if isinstance(payload, Sparse) and isinstance(payload.values, Dense):
            values = self.on_client(payload.values, seed)
            assert isinstance(values, Dense)
            return replace(payload, values=values)
        raise ValueError(f"{self.name}: the numbers are quantised already, quantise once")


@final
@dataclass(frozen=True)
class Affine(InBlocks):
    """Rounds to the nearest of 2^bits levels. Biased: use it with `ErrorFeedback`.

    Args:
        bits: of a number, from 1 to 8.
        block: neighbours that share their levels, ``tensor`` for those of each tensor, None for all.

    Raises:
        ConfigurationError: if an option is outside its range.

    Example:
        >>> from fl_lightning.updates.payload import Dense
        >>> Affine(bits=2).on_client(Dense(torch.tensor([0.0, 1.4, 3.0])), seed=0).to_dense()
        tensor([0., 1., 3.])
    """

    bits: int = 8
    block: BlockOption = None

    @property
    def name(self) -> str:
        """Name and options, as in the message's header."""
        return f"affine {self.bits} bits{block_name(self.block)}"

    def on_client(self, payload: Payload, seed: int) -> Payload:
        """Round the numbers to levels."""
        return with_values(payload, self._quantised, self.name)

    def _quantised(self, values: Tensor) -> Quantised:
        # the last block is filled with a member of its own
        block = known_block(self.block, values.numel())
        low, high = over_blocks(values, block, _range, pad=values[-1:].sum()).unbind(1)
        levels = 2**self.bits - 1
        steps = (high / 2 - low / 2) * (2 / levels)  # halves, whose difference is in range
        safe = torch.where(steps > 0, steps, 1.0)
        members = [per_member(each, values.numel(), block) for each in (low, safe)]

        def code(part: Tensor, offsets: Tensor, steps: Tensor) -> Tensor:
            return ((part - offsets) / steps).round_().clamp_(0, levels)

        codes = in_pieces(values, torch.uint8, code, *members)
        return Quantised(codes, self.bits, steps, low, block)


def _range(rows: Tensor) -> Tensor:
    """Return the least and the largest number of each row, shape (rows, 2)."""
    if len(rows) == 1:  # vectors of the processor are used only without an axis
        return torch.stack(rows.aminmax()).unsqueeze(0)
    return torch.stack(rows.aminmax(dim=1), 1)


@final
@dataclass(frozen=True)
class QSGD(InBlocks):
    """Rounds at random to one of 2^bits - 1 levels (of 2, for one bit).

    Args:
        bits: of a number, from 1 to 8.
        norm: which norm of a block its outermost level is: its largest magnitude or its length.
        block: neighbours that share a norm, ``tensor`` for those of each tensor, None for all.

    Raises:
        ConfigurationError: if an option is outside its range.

    Example:
        >>> from fl_lightning.updates.payload import Dense
        >>> payload = QSGD(bits=2).on_client(Dense(torch.tensor([2.0, -2.0, 0.0])), seed=0)
        >>> payload.to_dense()
        tensor([ 2., -2.,  0.])
    """

    bits: int = 8
    norm: Literal["max", "l2"] = "max"
    block: BlockOption = None

    @property
    def name(self) -> str:
        """Name and options, as in the message's header."""
        return f"qsgd {self.bits} bits, {self.norm}{block_name(self.block)}"

    def on_client(self, payload: Payload, seed: int) -> Payload:
        """Round the numbers to levels."""
        return with_values(payload, lambda values: self._quantised(values, seed), self.name)

    def _quantised(self, values: Tensor, seed: int) -> Quantised:
        block = known_block(self.block, values.numel())
        if self.norm == "l2":
            norms = over_blocks(values, block, lambda rows: torch.linalg.vector_norm(rows, dim=1))
        else:
            norms = over_blocks(values, block, _range).abs().amax(1)
        if self.bits == 1:
            codes = _rounded(values, 2 * norms, seed, block, (0, 1), shift=0.5)
            return Quantised(codes.to(torch.uint8), 1, 2 * norms, -norms, block)
        levels = 2 ** (self.bits - 1) - 1
        steps = norms / torch.full_like(norms, levels)  # GPUs take 1 / levels of a Python number
        codes = _rounded(values, steps, seed, block, (-levels, levels))
        return Quantised(codes, self.bits, steps, None, block)


def _rounded(
    values: Tensor,
    steps: Tensor,
    seed: int,
    block: Block,
    limits: tuple[int, int],
    shift: float = 0.0,
) -> Tensor:
    """Return values / steps + shift, rounded at random; where a step is 0 so are the values."""
    safe = per_member(torch.where(steps > 0, steps, 1.0), values.numel(), block)
    if rounds_in_one_pass(values):
        return rounded_at_random(values, safe, seed, limits, shift)
    generator = torch.Generator().manual_seed(seed)

    def code(part: Tensor, steps: Tensor) -> Tensor:
        exact = (part / steps).add_(shift)
        low = exact.floor()
        draws = torch.rand(len(part), generator=generator).to(part.device)
        return low.add_(draws < exact.sub_(low)).clamp_(*limits)

    return in_pieces(values, torch.int8, code, safe)


@final
@dataclass(frozen=True)
class Sign(InBlocks):
    """Sends signs. Biased: use it with `ErrorFeedback`.

    Args:
        block: neighbours that share a scale, ``tensor`` for those of each tensor, None for all.

    Raises:
        ConfigurationError: if ``block`` is below 1.

    Example:
        >>> from fl_lightning.updates.payload import Dense
        >>> Sign().on_client(Dense(torch.tensor([1.0, -4.0, 0.0, -3.0])), seed=0).to_dense()
        tensor([ 2., -2.,  2., -2.])
    """

    block: BlockOption = None

    @property
    def name(self) -> str:
        """Name and options, as in the message's header."""
        return f"sign{block_name(self.block)}"

    def on_client(self, payload: Payload, seed: int) -> Payload:
        """Return the sign of each number, and the mean magnitude of each block."""
        return with_values(payload, self._quantised, self.name)

    def _quantised(self, values: Tensor) -> Quantised:
        block = known_block(self.block, values.numel())
        members, sums = (
            over_blocks(each, block, lambda rows: rows.sum(1))
            for each in (torch.ones_like(values), values.abs())
        )
        scales = sums / members
        codes = (values >= 0).to(torch.uint8)
        return Quantised(codes, 1, 2 * scales, -scales, block)


def ternary(fraction: float) -> Chain:
    """Return sparse ternary compression: the largest numbers, each as ± their mean magnitude.

    Args:
        fraction: of numbers that are kept.

    Example:
        >>> from fl_lightning.updates.payload import Dense
        >>> values = Dense(torch.tensor([1.0, -4.0, 0.0, 2.0]))
        >>> ternary(0.5).on_client(values, seed=0).to_dense()
        tensor([ 0., -3.,  0.,  3.])
    """
    return Chain((TopK(fraction), Sign()))
