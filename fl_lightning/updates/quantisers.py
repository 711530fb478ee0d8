"""Quantisers: numbers with fewer bits, and a scale for each block of neighbours.

A block is a fixed number of neighbours, a tensor of the model, or the whole vector.

`Cast`: half precision, two bytes for each number.

    T(x)_i = x_i rounded to the nearest number of bfloat16 (8 bits of precision) or float16 (11 bits)

Numbers beyond the format's range become its largest number, so that all stay finite.

`Affine`: evenly spaced levels between the smallest and the largest number of a block.

    c_i = round((x_i - o_b) / s_b),   o_b = min x,   s_b = (max x - min x) / (2^bits - 1)

The error is at most half a step. A block whose numbers are equal has s_b = 0 and comes out exactly.
Source: Jacob et al. 2018 (1712.05877), section 2.1, with the minimum itself in place of an integer
zero point, so that blocks far from zero lose nothing.

`QSGD`: stochastic uniform quantisation to a few bits, unbiased.

    T(x)_i = (N_b / s) ξ_i        ξ_i = ⌊y⌋ + 1 with probability y - ⌊y⌋, else ⌊y⌋;  y = s x_i / N_b

N_b is the norm of the block that holds x_i, s = 2^(bits-1) - 1 the number of levels on each side of
zero. One bit has the two levels ±N_b. Source: Alistarh et al. 2017 (1610.02132), section 3.1 with
the L2 norm; its experiments use the largest magnitude in blocks, which is the default here. Levels
are of fixed width: the paper's Elias code pays off for few large numbers, for which top-k is better.

`Sign`: one bit for each number.

    T(x)_i = s_b sign(x_i)        s_b = mean |x| over the block b

Source: Karimireddy et al. 2019 (1901.09847), ‖x‖₁/d · sign(x), with error feedback; after top-k it
is sparse ternary compression, Sattler et al. 2019 (1903.02891), Algorithm 1. The sign of 0 is +1.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import ClassVar, Literal, Self, final

import torch
from torch import Tensor

from fl_lightning.core.errors import ConfigurationError
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

# The option ``block``; ``tensor`` is replaced by the tensors' sizes once they are known.
BlockOption = Block | Literal["tensor"]

# Numbers that are rounded at a time on a CPU, so that intermediate results stay in its cache.
_PIECE = 1 << 15


class InBlocks(Transform):
    """Base of quantisers, which round numbers in blocks with a scale each; subclasses are dataclasses.

    Attributes:
        block: number of neighbours that share a scale; ``tensor`` for each tensor, None for one block.
    """

    block: BlockOption

    def __post_init__(self) -> None:
        super().__post_init__()
        block = self.block
        is_wrong = block < 1 if isinstance(block, int) else isinstance(block, str)
        if is_wrong and block != "tensor":
            raise ConfigurationError(
                f"{type(self).__name__}: block must be a number of entries, at least 1, or 'tensor' (a block per tensor), or null (the whole update is one block), got {block!r}"
            )

    @property
    def needs_shapes(self) -> bool:
        """True if each tensor is a block of its own, and the tensors' shapes are not set yet."""
        return self.block == "tensor"

    def with_shapes(self, shapes: Shapes) -> Self:
        """Return a copy whose blocks are the tensors of these shapes."""
        sizes = tuple(size for size in map(math.prod, shapes) if size)
        return replace(self, block=sizes) if self.needs_shapes else self  # type: ignore[type-var]


def block_name(block: BlockOption) -> str:
    """Return the words about blocks in a quantiser's name, e.g. ``, blocks of 128``; empty for one block."""
    if block is None:
        return ""
    return f", blocks of {block}" if isinstance(block, int) else ", a block a tensor"


def known_block(block: BlockOption, size: int) -> Block:
    """Check that the option ``block`` can divide ``size`` numbers into blocks, and return it.

    Raises:
        ValueError: if blocks are tensors whose shapes are not set, or have another total size.
    """
    if block == "tensor":
        raise ValueError(
            "block is 'tensor', but the shapes of the tensors are not known: set block to a number"
        )
    if isinstance(block, tuple) and sum(block) != size:
        raise ValueError(
            f"block is 'tensor', and the tensors have {sum(block)} numbers, got {size}: set block to a number "
            "after a transform that drops numbers"
        )
    return block


def over_blocks(
    values: Tensor, block: Block, measure: Callable[[Tensor], Tensor], pad: float | Tensor = 0.0
) -> Tensor:
    """Apply a function to each block of numbers; return its results, shape (number of blocks, …).

    Args:
        values: numbers, shape (n,).
        block: blocks, see `Quantised`.
        measure: function of a matrix with one block per row.
        pad: value that fills the last row.
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
    """Quantise numbers by a function, piece by piece to limit memory; return codes of shape (n,).

    Args:
        values: numbers, shape (n,).
        dtype: dtype of the codes.
        code: function of a piece of values and the same piece of each of ``of_members``.
        of_members: further tensors of shape (n,), or (1,) for one number.
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
    """Sends numbers in half precision; it may follow `TopK`, `RandomK` or `PowerSGD`.

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
        """Name of the transform with its options, as in the message's header."""
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
        raise ValueError(
            f"{self.name}: an earlier transform has quantised the numbers already: use one quantiser"
        )


@final
@dataclass(frozen=True)
class Affine(InBlocks):
    """Rounds numbers to the nearest of 2^bits levels. Biased: use it with `ErrorFeedback`.

    Args:
        bits: bits of a number, from 1 to 8.
        block: number of neighbours that share their levels; ``tensor`` for each tensor, None for all
            numbers.

    Raises:
        ConfigurationError: if an option is out of range.

    Example:
        >>> from fl_lightning.updates.payload import Dense
        >>> Affine(bits=2).on_client(Dense(torch.tensor([0.0, 1.4, 3.0])), seed=0).to_dense()
        tensor([0., 1., 3.])
    """

    bits: int = 8
    block: BlockOption = None

    ranges: ClassVar[dict[str, str]] = {"bits": "from 1 to 8"}

    @property
    def name(self) -> str:
        """Name of the transform with its options, as in the message's header."""
        return f"affine {self.bits} bits{block_name(self.block)}"

    def on_client(self, payload: Payload, seed: int) -> Payload:
        """Round a payload's numbers to the nearest levels."""
        return with_values(payload, self._quantised, self.name)

    def _quantised(self, values: Tensor) -> Quantised:
        # the last block is padded with one of its own numbers
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
    """Return the smallest and the largest number of each block (a row), shape (rows, 2)."""
    if len(rows) == 1:  # torch vectorises `aminmax` only without an axis
        return torch.stack(rows.aminmax()).unsqueeze(0)
    return torch.stack(rows.aminmax(dim=1), 1)


@final
@dataclass(frozen=True)
class QSGD(InBlocks):
    """Rounds numbers stochastically to 2^bits - 1 levels (to 2, for one bit).

    Args:
        bits: bits of a number, from 1 to 8.
        norm: norm of a block that is the outermost level: ``max`` for the largest magnitude, or ``l2``.
        block: number of neighbours that share a norm; ``tensor`` for each tensor, None for all numbers.

    Raises:
        ConfigurationError: if an option is out of range.

    Example:
        >>> from fl_lightning.updates.payload import Dense
        >>> payload = QSGD(bits=2).on_client(Dense(torch.tensor([2.0, -2.0, 0.0])), seed=0)
        >>> payload.to_dense()
        tensor([ 2., -2.,  0.])
    """

    bits: int = 8
    norm: Literal["max", "l2"] = "max"
    block: BlockOption = None

    ranges: ClassVar[dict[str, str]] = {"bits": "from 1 to 8"}

    @property
    def name(self) -> str:
        """Name of the transform with its options, as in the message's header."""
        return f"qsgd {self.bits} bits, {self.norm}{block_name(self.block)}"

    @property
    def remedy(self) -> str:
        """Advice to the user if rounding errors may grow without bound under error feedback; else empty.

        Every number's error is below one step, norm / L, with L levels above 0. By the l2 norm the error of a
        block of B numbers is at most √B / L times the block's norm: below 1 if B ≤ L². By the largest
        magnitude, errors are below it if there is a level (2 bits or more).
        """
        if self.norm == "max":
            converges = self.bits > 1
        else:
            levels = 2 ** (self.bits - 1) - 1
            converges = isinstance(self.block, int) and self.block <= levels**2
        return "" if converges else "use Sign for one bit, and else norm: max"

    def on_client(self, payload: Payload, seed: int) -> Payload:
        """Round a payload's numbers stochastically to levels."""
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
    """Return values / steps + shift, stochastically rounded to int8; values with step 0 must be 0."""
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
    """Sends signs and a scale for each block. Biased: use it with `ErrorFeedback`.

    Args:
        block: number of neighbours that share a scale; ``tensor`` for each tensor, None for all numbers.

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
        """Name of the transform with its options, as in the message's header."""
        return f"sign{block_name(self.block)}"

    def on_client(self, payload: Payload, seed: int) -> Payload:
        """Replace each number by its sign times the mean magnitude of its block."""
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
    """Return sparse ternary compression: top-k, then the kept numbers' signs times their mean magnitude.

    Args:
        fraction: fraction of numbers to keep, in (0, 1].

    Example:
        >>> from fl_lightning.updates.payload import Dense
        >>> values = Dense(torch.tensor([1.0, -4.0, 0.0, 2.0]))
        >>> ternary(0.5).on_client(values, seed=0).to_dense()
        tensor([ 0., -3.,  0.,  3.])
    """
    return Chain((TopK(fraction), Sign()))
