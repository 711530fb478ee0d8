"""Which numbers travel, and in which form: what transforms hand over and the codec writes.

    Dense       x_i                           the numbers themselves, in their dtype
    Quantised   x_i = o_b + s_b c_i           integers c_i of 1 to 8 bits, a scale (and offset) a block
    Sparse      x_i = v_j if i = i_j, else 0  some of k numbers, and where they stand

`Sparse` holds either of the other two.

In a container, the params' payload for instance, a payload is up to three tensors and what its fields say:

    Dense       params (unless it is empty)   nothing
    Quantised   params.codes (packed),        bits, count (of codes), block (a number, a list of
                params.scales and .offsets    the blocks' sizes, or nothing for one block)
    Sparse      params.gaps (a Rice code,     low_bits (of the Rice code), size, and those of the
                see `coding`), and values     values

Every size follows from numbers that were checked before, so that nothing is allocated which the bytes
at hand or the agreed number of coordinates do not justify. A payload has one encoding only.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fl_lightning.core.container import DTYPE_NAMES, Form
from fl_lightning.core.plain_json import MessageError, check_whole, fields_of
from fl_lightning.core.seeds import Integers
from fl_lightning.updates.coding import (
    Bytes,
    RiceCode,
    best_code,
    gaps_of,
    low_size,
    pack,
    packed_size,
    read_indices,
    unpack,
    write_gaps,
)

# How many neighbours share a scale: so many each, each group its own number, or all of them.
Block = int | tuple[int, ...] | None

FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
# half of float32's range, so that no rounding of offset + scale * code leaves it
_LARGEST = float(np.finfo(np.float32).max) / 2


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
        """True if the values are rounded to half precision."""
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
        """True if the values are rounded to half precision."""
        return isinstance(self.values, Dense) and self.values.is_half

    @cached_property
    def gaps(self) -> tuple[Integers, RiceCode]:
        """How many coordinates are skipped before each index, and their shortest code.

        Raises:
            MessageError: for indices that do not increase or are too large.
        """
        indices = self.indices.cpu().numpy()
        gaps = gaps_of(indices)
        if len(gaps) and (int(gaps.min()) < 0 or indices[-1] >= self.size):
            raise MessageError(f"indices must increase strictly, from 0 to {self.size - 1}")
        return gaps, best_code(gaps)

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


Fields = dict[str, Any]


def layout_of(name: str, payload: Payload) -> tuple[Fields, dict[str, Form]]:
    """Return a payload's fields, and the forms of the tensors that it travels as.

    Of `Dense` and `Quantised` only shapes and dtypes are looked at, of `Sparse` also the indices.

    Args:
        name: of the payload in its container.
        payload: that will be sent.
    """
    if isinstance(payload, Dense):
        form = DTYPE_NAMES[payload.values.dtype], (payload.size,)
        return {}, {name: form} if payload.size else {}
    if isinstance(payload, Quantised):
        block = list(payload.block) if isinstance(payload.block, tuple) else payload.block
        scales = ("F32", (payload.num_blocks,))
        codes: Form = ("U8", (packed_size(payload.size, payload.bits),))
        forms = {f"{name}.codes": codes, f"{name}.scales": scales}
        if payload.offsets is not None:
            forms[f"{name}.offsets"] = scales
        fields: Fields = {"bits": payload.bits, "count": payload.size}
        return fields if block is None else {**fields, "block": block}, forms
    _, code = payload.gaps
    about, forms = layout_of(name, payload.values)
    forms[f"{name}.gaps"] = ("U8", (code.size,))
    return {"low_bits": code.num_low_bits, "size": payload.size, **about}, forms


def tensors_of(name: str, payload: Payload) -> dict[str, Tensor]:
    """Return the tensors that a payload travels as, in the forms that `layout_of` says.

    Raises:
        MessageError: for numbers that are not finite, codes that do not fit into their bits, scales
            that are negative or too large, indices that do not increase or are too large.
    """
    if isinstance(payload, Dense):
        if not _is_finite(payload.values):
            raise MessageError("values must be finite to be sent: leave this client out")
        return {name: payload.values} if payload.size else {}
    if isinstance(payload, Quantised):
        return _written_quantised(name, payload)
    parts = np.concatenate(write_gaps(*payload.gaps))
    return {f"{name}.gaps": torch.from_numpy(parts), **tensors_of(name, payload.values)}


def read_payload(name: str, fields: Any, tensors: dict[str, Tensor], size: int) -> Payload:
    """Return the payload of a container, which must stand for ``size`` numbers.

    Args:
        name: of the payload in its container.
        fields: what is said of it there.
        tensors: of the container; the payload's own are taken out.
        size: that is agreed on.

    Raises:
        MessageError: if it is anything else than what `layout_of` and `tensors_of` return for one.
    """
    if not isinstance(fields, Mapping) or "size" not in fields:
        return _read_values(name, fields, tensors, size)
    values = dict(fields)
    low_bits, of_size = values.pop("low_bits", None), values.pop("size")
    check_whole("low_bits", low_bits, 0, 63)
    if of_size != size:
        raise MessageError(f"payload of {of_size!r} numbers, {size} expected")
    gaps = _bytes_of(_take(tensors, f"{name}.gaps", torch.uint8))
    payload = _read_values(name, values, tensors, None)
    return _read_sparse(gaps, low_bits, payload, size)


def _read_values(
    name: str, fields: Any, tensors: dict[str, Tensor], size: int | None
) -> Dense | Quantised:
    if fields:
        return _read_quantised(name, fields, tensors, size)
    values = _take(tensors, name, *FLOATS) if name in tensors else None
    _check_count(0 if values is None else len(values), size)
    if values is None:
        return Dense(torch.empty(0))
    if not len(values):
        raise MessageError(f"{name} is empty: then it does not travel")
    if not _is_finite(values):
        raise MessageError("values are not finite")
    return Dense(values)


def _take(tensors: dict[str, Tensor], name: str, *dtypes: torch.dtype) -> Tensor:
    """Return a vector of one of these dtypes, and take it out of the mapping."""
    tensor = tensors.pop(name, None)
    if tensor is None or tensor.ndim != 1 or tensor.dtype not in dtypes:
        found = "is not there" if tensor is None else f"is {tensor.dtype}, {tuple(tensor.shape)}"
        raise MessageError(f"{name} must be a vector of {', '.join(map(str, dtypes))}: it {found}")
    return tensor


def _bytes_of(tensor: Tensor) -> Bytes:
    return tensor.detach().cpu().contiguous().numpy().view(np.uint8)


def _is_finite(values: Tensor) -> bool:
    return bool(torch.isfinite(values).all())


def _check_count(count: int, size: int | None) -> None:
    if size is not None and count != size:
        raise MessageError(f"payload of {count} numbers, {size} expected")


def _bad_scales(scales: Tensor, offsets: Tensor | None, bits: int) -> str | None:
    if not bool((scales >= 0).all()):
        return "scales must be numbers of at least 0"
    largest = scales.double() * (2 ** (bits - 1) if offsets is None else 2**bits - 1)
    if offsets is not None:
        largest = largest + offsets.double().abs()
    if not bool((largest <= _LARGEST).all()):
        return f"scales and offsets must not make numbers beyond {_LARGEST:.1e}"
    return None


def _written_quantised(name: str, payload: Quantised) -> dict[str, Tensor]:
    if problem := _bad_scales(payload.scales, payload.offsets, payload.bits):
        raise MessageError(problem)
    codes = _bytes_of(payload.codes)
    if payload.offsets is None:
        codes = codes + np.uint8(2 ** (payload.bits - 1))  # modulo 256: no code is negative
    if len(codes) and int(codes.max()) >> payload.bits:
        raise MessageError(f"codes do not fit into {payload.bits} bits")
    packed = torch.from_numpy(pack(codes, payload.bits))
    tensors = {f"{name}.codes": packed, f"{name}.scales": payload.scales}
    return tensors if payload.offsets is None else {**tensors, f"{name}.offsets": payload.offsets}


def _read_quantised(
    name: str, fields: Any, tensors: dict[str, Tensor], size: int | None
) -> Quantised:
    has_block = isinstance(fields, Mapping) and "block" in fields
    names = ("bits", "count", "block") if has_block else ("bits", "count")
    given = fields_of(fields, names, f"the payload {name}")
    bits, count = given["bits"], given["count"]
    has_offsets = f"{name}.offsets" in tensors
    check_whole("bits", bits, 1 if has_offsets else 2, 8)
    check_whole("count", count)
    _check_count(count, size)
    packed = _bytes_of(_take(tensors, f"{name}.codes", torch.uint8))
    if len(packed) != packed_size(count, bits):
        raise MessageError(f"{count} codes of {bits} bits do not fill {len(packed)} bytes")
    if count * bits % 8 and packed[-1] >> count * bits % 8:
        raise MessageError("bits are set behind the last code")
    block = _read_block(given.get("block"), count)
    scales = _take(tensors, f"{name}.scales", torch.float32)
    offsets = _take(tensors, f"{name}.offsets", torch.float32) if has_offsets else None
    blocks = num_blocks(count, block)
    if len(scales) != blocks or (offsets is not None and len(offsets) != blocks):
        raise MessageError(f"scales and offsets must be {blocks}, one a block")
    if problem := _bad_scales(scales, offsets, bits):
        raise MessageError(problem)
    codes = unpack(packed, count, bits)
    if not has_offsets:
        codes -= np.uint8(2 ** (bits - 1))
        codes = codes.view(np.int8)
    return Quantised(torch.from_numpy(codes), bits, scales, offsets, block)


def _read_block(block: Any, count: int) -> Block:
    if isinstance(block, list):
        for size in block:
            check_whole("block: each", size, 1)
        if sum(block) != count:
            raise MessageError(f"the sizes of blocks do not make {count} numbers")
        return tuple(block)
    if block is None:
        return None
    check_whole("block", block, 1)
    return int(block)


def _read_sparse(gaps: Bytes, low_bits: int, values: Dense | Quantised, size: int) -> Sparse:
    count = values.size
    if count > size:
        raise MessageError(f"{count} indices into {size} numbers")
    # the shortest code never has more; the remainders then add up to less than 2 size
    if low_bits and max(1, count) << low_bits > 2 * size:
        raise MessageError(f"indices with remainders of {low_bits} bits are not the shortest")
    unary_size = len(gaps) - low_size(count, low_bits)
    # each quotient is a one and zeros, no more zeros than the gaps have room for
    if not 0 <= unary_size <= (count + (size >> low_bits) + 7) // 8:
        raise MessageError(f"{len(gaps)} bytes are too few or too many for {count} indices")
    low = gaps[unary_size:]
    indices = read_indices(gaps[:unary_size], low, count, low_bits)
    if indices is None:
        raise MessageError(f"the quotients are not those of {count} indices")
    if count and indices[-1] >= size:
        raise MessageError(f"index {indices[-1]} is not below {size}")
    payload = Sparse(torch.from_numpy(indices), values, size)
    _, code = payload.gaps
    used = count * (low_bits % 8) % 8
    if (code.num_low_bits, code.unary_size) != (low_bits, unary_size) or (used and low[-1] >> used):
        raise MessageError("the indices are not in their shortest form")
    return payload
