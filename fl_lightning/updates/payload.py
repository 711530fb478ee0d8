"""Payloads: the forms of a vector between two transforms, and their encoding in a message.

    Dense       x_i                           the numbers themselves, in their dtype
    Quantised   x_i = o_b + s_b c_i           integers c_i of 1 to 8 bits, a scale (and offset) per block
    Sparse      x_i = v_j if i = i_j, else 0  some of k numbers, and their indices

The values of `Sparse` are `Dense` or `Quantised`.

In a message a payload is up to three tensors and some fields. For the payload ``params``:

                tensors                       fields
    Dense       params (unless it is empty)   none
    Quantised   params.codes (packed),        bits, count (of codes), block (a number, a list of
                params.scales and .offsets    the blocks' sizes, or absent for one block)
    Sparse      params.gaps (a Rice code,     low_bits (of the Rice code), size, and the fields of
                see `coding`), and values     the values

Every size is checked before memory is allocated, so a payload needs no more memory than its bytes or the
expected number of coordinates. A payload has exactly one encoding.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fl_lightning.core.plain_json import MessageError, check_whole, fields_of
from fl_lightning.updates.coding import (
    Bytes,
    best_code,
    gaps_of,
    low_size,
    pack,
    packed_size,
    read_indices,
    unpack,
    write_gaps,
)

# Blocks that share a scale: a fixed number of neighbours, the size of each block, or None for one block.
Block = int | tuple[int, ...] | None

FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
# half of float32's range, so that offset + scale * code stays in the range after rounding
_LARGEST = float(np.finfo(np.float32).max) / 2


@dataclass(frozen=True, eq=False)
class Dense:
    """An uncompressed vector of floating-point numbers.

    Args:
        values: numbers of dtype float64, float32, float16 or bfloat16, shape (n,).

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
        """Number of values."""
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
    """A vector rounded to integers of a few bits, with a scale for each block of neighbouring numbers.

    Args:
        codes: integers, shape (n,): without offsets int8, from -2^(bits-1) to 2^(bits-1) - 1; with
            offsets uint8, from 0 to 2^bits - 1.
        bits: bits of a code, from 1 to 8; without offsets from 2, because one bit is the sign.
        scales: difference between neighbouring codes' values, ≥ 0, float32, shape (number of blocks,).
        offsets: value of the code 0, float32, shape (number of blocks,); None for 0.
        block: size of a block, where the last may be smaller; the size of each block if they differ;
            None for one block.

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
        """Number of values."""
        return self.codes.numel()

    @property
    def num_blocks(self) -> int:
        """Number of blocks, each with a scale of its own."""
        return num_blocks(self.size, self.block)

    def to_dense(self) -> Tensor:
        """Return the numbers in float32, shape (n,)."""
        values = self.codes.float() * per_member(self.scales, self.size, self.block)
        if self.offsets is None:
            return values
        return values.add_(per_member(self.offsets, self.size, self.block))


@dataclass(frozen=True, eq=False)
class Sparse:
    """A vector of ``size`` numbers that are zero except at some indices.

    Args:
        indices: indices of the values, int64, strictly increasing in [0, size), shape (n,).
        values: payload of the n values.
        size: length of the whole vector.

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
                f"indices must be an int64 vector with one index per value, {self.values.size}, got shape "
                f"{tuple(self.indices.shape)} and {self.indices.dtype}"
            )
        if self.values.size > self.size:
            raise ValueError(f"{self.values.size} values do not fit into size={self.size}")

    @property
    def is_half(self) -> bool:
        """True if the values are rounded to half precision."""
        return isinstance(self.values, Dense) and self.values.is_half

    def to_dense(self) -> Tensor:
        """Return all numbers in float32 or wider, shape (size,)."""
        values = self.values.to_dense()
        return values.new_zeros(self.size).scatter_(0, self.indices, values)


Payload = Dense | Quantised | Sparse


def num_blocks(size: int, block: Block) -> int:
    """Return the number of blocks into which ``size`` numbers are divided; 0 if ``size`` is 0."""
    if isinstance(block, tuple):
        return len(block)
    return -(-size // (block or max(size, 1)))


def per_member(per_block: Tensor, size: int, block: Block) -> Tensor:
    """Repeat each block's value for all numbers in the block, shape (size,); a single value is not repeated."""
    if isinstance(block, tuple):
        sizes = torch.tensor(block, dtype=torch.int64, device=per_block.device)
        return per_block.repeat_interleave(sizes)
    if block is None or len(per_block) == 1:
        return per_block
    return per_block.repeat_interleave(block)[:size]


Fields = dict[str, Any]


def content_of(name: str, payload: Payload) -> tuple[Fields, dict[str, Tensor]]:
    """Encode a payload as JSON fields and tensors of a message.

    Args:
        name: name of the payload in the container.
        payload: payload to encode; values on the meta device are not checked.

    Raises:
        MessageError: for numbers that are not finite, codes that do not fit into their bits, scales
            that are negative or too large, indices that do not increase or are too large.
    """
    if isinstance(payload, Dense):
        values = payload.values
        if not (values.is_meta or bool(torch.isfinite(values).all())):
            raise MessageError(
                "values to send must be finite, got NaN or an infinite one: leave this client out"
            )
        return {}, {name: values} if payload.size else {}
    if isinstance(payload, Quantised):
        block = list(payload.block) if isinstance(payload.block, tuple) else payload.block
        fields: Fields = {"bits": payload.bits, "count": payload.size}
        return fields if block is None else {**fields, "block": block}, _packed(name, payload)
    gaps = gaps_of(_checked_indices(payload))
    code = best_code(gaps)
    written = torch.from_numpy(np.concatenate(write_gaps(gaps, code)))
    about, tensors = content_of(name, payload.values)
    fields = {"low_bits": code.num_low_bits, "size": payload.size, **about}
    return fields, {f"{name}.gaps": written, **tensors}


def read_payload(name: str, fields: Any, tensors: Mapping[str, Tensor], size: int) -> Payload:
    """Decode a payload of ``size`` numbers from fields and tensors of a message.

    Args:
        name: name of the payload in the container.
        fields: fields of the payload.
        tensors: tensors of the container.
        size: expected number of values.

    Raises:
        MessageError: if the payload cannot be read. To refuse other encodings of the same payload, the
            caller must encode the result again and compare.
    """
    try:
        return _read(name, fields or {}, tensors, size)
    except MessageError:
        raise
    except ValueError as error:  # of a constructor
        raise MessageError(f"{name}: {error}") from None


def _read(name: str, fields: Any, tensors: Mapping[str, Tensor], size: int) -> Payload:
    if not isinstance(fields, Mapping) or "size" not in fields:
        payload = _read_values(name, fields, tensors)
        _check_size(payload.size, size)
        return payload
    about = dict(fields)
    low_bits = about.pop("low_bits", None)
    check_whole("low_bits", low_bits, 0, 63)
    _check_size(about.pop("size"), size)
    gaps = _bytes_of(vector_in(tensors, f"{name}.gaps", torch.uint8))
    values = _read_values(name, about, tensors)
    return Sparse(_read_gaps(gaps, low_bits, values.size, size), values, size)


def _read_values(name: str, fields: Any, tensors: Mapping[str, Tensor]) -> Dense | Quantised:
    if not fields:
        return Dense(vector_in(tensors, name, *FLOATS) if name in tensors else torch.empty(0))
    has_block = isinstance(fields, Mapping) and "block" in fields
    names = ("bits", "count", "block") if has_block else ("bits", "count")
    given = fields_of(fields, names, f"the payload {name}")
    bits, count, block = given["bits"], given["count"], given.get("block")
    check_whole("bits", bits, 1, 8)
    check_whole("count", count)
    for each in (block if isinstance(block, list) else [block]) if has_block else ():
        check_whole("block", each, 1)
    packed = _bytes_of(vector_in(tensors, f"{name}.codes", torch.uint8))
    if len(packed) != packed_size(count, bits):
        raise MessageError(f"{count} codes of {bits} bits do not fill {len(packed)} bytes")
    codes = unpack(packed, count, bits)
    offsets = tensors.get(f"{name}.offsets")
    if offsets is None:
        codes = (codes - np.uint8(2 ** (bits - 1))).view(np.int8)
    scales = vector_in(tensors, f"{name}.scales", torch.float32)
    blocks = tuple(block) if isinstance(block, list) else block
    return Quantised(torch.from_numpy(codes), bits, scales, offsets, blocks)


def _read_gaps(gaps: Bytes, low_bits: int, count: int, size: int) -> Tensor:
    unary_size = len(gaps) - low_size(count, low_bits)
    # a quotient is a one after zeros; there are at most size >> low_bits zeros in all
    if count > size or not 0 <= unary_size <= (count + (size >> low_bits) + 7) // 8:
        raise MessageError(f"{len(gaps)} bytes are too few or too many for {count} indices")
    indices = read_indices(gaps[:unary_size], gaps[unary_size:], count, low_bits)
    if indices is None:
        raise MessageError(f"the quotients are not those of {count} indices")
    return torch.from_numpy(indices)


def vector_in(tensors: Mapping[str, Tensor], name: str, *dtypes: torch.dtype) -> Tensor:
    """Return a vector by its name from a message's tensors; its dtype must be one of ``dtypes``.

    Raises:
        MessageError: if the tensor is missing, no vector, or of another dtype.
    """
    tensor = tensors.get(name)
    if tensor is None or tensor.ndim != 1 or tensor.dtype not in dtypes:
        found = "is not there" if tensor is None else f"is {tensor.dtype}, {tuple(tensor.shape)}"
        raise MessageError(f"{name} must be a vector of {', '.join(map(str, dtypes))}: it {found}")
    return tensor


def _check_size(found: Any, size: int) -> None:
    if found != size:
        raise MessageError(f"payload of {found!r} numbers, {size} expected")


def _bytes_of(tensor: Tensor) -> Bytes:
    return tensor.detach().cpu().contiguous().numpy().view(np.uint8)


def _bad_scales(scales: Tensor, offsets: Tensor | None, bits: int) -> str | None:
    if not bool((scales >= 0).all()):
        return "scales must be numbers of at least 0"
    largest = scales.double() * (2 ** (bits - 1) if offsets is None else 2**bits - 1)
    if offsets is not None:
        largest = largest + offsets.double().abs()
    if not bool((largest <= _LARGEST).all()):
        return f"scales and offsets must not encode numbers beyond {_LARGEST:.1e}"
    return None


def _packed(name: str, payload: Quantised) -> dict[str, Tensor]:
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


def _checked_indices(payload: Sparse) -> np.ndarray:
    indices: np.ndarray = payload.indices.cpu().numpy()
    if len(indices) and (
        int(np.diff(indices, prepend=-1).min()) < 1 or indices[-1] >= payload.size
    ):
        raise MessageError(f"indices must increase strictly, from 0 to {payload.size - 1}")
    return indices
