"""A payload as bytes, little-endian throughout.

    u8 kind, u8 variant, u64 how many numbers, and then of
    1 Dense       (variant: dtype)              the numbers
    2 Quantised   (variant: bits, +128 with offsets, +64 with blocks that differ)
                  u64 block (0: all in one; of blocks that differ their number, and u64 each size),
                  f32 scales, f32 offsets if any, packed codes
    3 Sparse      (variant: r of the Rice code) of how many numbers (u64), u64 bytes of the
                  quotients, quotients, remainders, and the values: a payload of kind 1 or 2

Every size follows from numbers that were checked before, so that nothing is allocated which the
bytes at hand or the agreed number of coordinates do not justify. A payload has one encoding only.
"""

from __future__ import annotations

import struct

import numpy as np
import torch
from torch import Tensor

from fl_lightning.updates.payload import (
    FLOATS,
    Block,
    Dense,
    Payload,
    Quantised,
    Sparse,
    num_blocks,
)
from fl_lightning.updates.wire.coding import (
    Bytes,
    DecodeError,
    Reader,
    best_code,
    gaps_of,
    low_size,
    pack,
    packed_size,
    read_indices,
    unpack,
    write_gaps,
)

Part = bytes | memoryview

_HEAD = struct.Struct("<BBQ")
_COUNT = struct.Struct("<Q")
_DENSE, _QUANTISED, _SPARSE = 1, 2, 3
_HAS_OFFSETS, _HAS_SIZES = 128, 64
# those that have no NumPy type travel as integers of the same width
_WIRE = dict(zip(FLOATS, ("<f8", "<f4", "<u2", "<u2"), strict=True))
_EXPONENT = {torch.float16: 0x7C00, torch.bfloat16: 0x7F80}
# half of float32's range, so that no rounding of offset + scale * code leaves it
_LARGEST = float(np.finfo(np.float32).max) / 2


def payload_size(payload: Payload) -> int:
    """Return the bytes that `write_payload` would write, without writing them.

    Of `Dense` and `Quantised` only shapes and dtypes are looked at, of `Sparse` also the indices.
    """
    if isinstance(payload, Dense):
        return _HEAD.size + payload.size * payload.values.element_size()
    if isinstance(payload, Quantised):
        floats = payload.num_blocks * (1 if payload.offsets is None else 2)
        codes = packed_size(payload.size, payload.bits)
        return _HEAD.size + len(_block_bytes(payload.block)) + 4 * floats + codes
    code = best_code(gaps_of(_checked_indices(payload)))
    return _HEAD.size + 2 * _COUNT.size + code.size + payload_size(payload.values)


def write_payload(payload: Payload) -> list[Part]:
    """Return the parts that make the payload's bytes.

    Raises:
        ValueError: for numbers that are not finite, codes that do not fit into their bits, scales
            that are negative or too large, indices that do not increase or are too large.
    """
    if isinstance(payload, Dense):
        return _write_dense(payload)
    if isinstance(payload, Quantised):
        return _write_quantised(payload)
    indices = _checked_indices(payload)
    gaps = gaps_of(indices)
    code = best_code(gaps)
    head = _HEAD.pack(_SPARSE, code.num_low_bits, len(indices))
    sizes = _COUNT.pack(payload.size) + _COUNT.pack(code.unary_size)
    parts = [part.data for part in write_gaps(gaps, code)]
    return [head + sizes, *parts, *write_payload(payload.values)]


def read_payload(reader: Reader, size: int) -> Payload:
    """Return the payload that comes next and must stand for ``size`` numbers.

    Raises:
        DecodeError: if it is anything else than what `write_payload` writes for one.
    """
    kind, variant, count = reader.fields(_HEAD, "payload")
    if kind == _DENSE:
        return _read_dense(reader, variant, count, size)
    if kind == _QUANTISED:
        return _read_quantised(reader, variant, count, size)
    if kind == _SPARSE:
        return _read_sparse(reader, variant, count, size)
    raise DecodeError(f"unknown kind of payload: {kind}")


def _bytes_of(tensor: Tensor) -> Bytes:
    tensor = tensor.detach().cpu().contiguous()
    if tensor.dtype in _EXPONENT:
        tensor = tensor.view(torch.int16)
    array = tensor.numpy()
    return np.ascontiguousarray(array, array.dtype.newbyteorder("<")).view(np.uint8)


def _tensor_of(data: Bytes, dtype: torch.dtype) -> Tensor:
    wire = np.dtype(_WIRE[dtype])
    array = data.view(wire).astype(wire.newbyteorder("="))  # a copy: the bytes are not ours
    if dtype in _EXPONENT:
        return torch.from_numpy(array.view(np.int16)).view(dtype)
    return torch.from_numpy(array)


def _is_finite(data: Bytes, dtype: torch.dtype) -> bool:
    numbers = data.view(_WIRE[dtype])
    if dtype not in _EXPONENT:
        return bool(np.isfinite(numbers).all())
    exponent = _EXPONENT[dtype]
    return int((numbers & exponent).max(initial=0)) < exponent


def _check_count(count: int, size: int) -> None:
    if count != size:
        raise DecodeError(f"payload of {count} numbers, {size} expected")


def _write_dense(payload: Dense) -> list[Part]:
    dtype = payload.values.dtype
    data = _bytes_of(payload.values)
    if not _is_finite(data, dtype):
        raise ValueError("values must be finite to be sent: leave this client out")
    return [_HEAD.pack(_DENSE, FLOATS.index(dtype), payload.size), data.data]


def _read_dense(reader: Reader, variant: int, count: int, size: int) -> Dense:
    _check_count(count, size)
    if variant >= len(FLOATS):
        raise DecodeError(f"unknown dtype: {variant}")
    dtype = FLOATS[variant]
    data = reader.array(count * dtype.itemsize, "values")
    if not _is_finite(data, dtype):
        raise DecodeError("values are not finite")
    return Dense(_tensor_of(data, dtype))


def _bad_scales(scales: Tensor, offsets: Tensor | None, bits: int) -> str | None:
    if not bool((scales >= 0).all()):
        return "scales must be numbers of at least 0"
    largest = scales.double() * (2 ** (bits - 1) if offsets is None else 2**bits - 1)
    if offsets is not None:
        largest = largest + offsets.double().abs()
    if not bool((largest <= _LARGEST).all()):
        return f"scales and offsets must not make numbers beyond {_LARGEST:.1e}"
    return None


def _write_quantised(payload: Quantised) -> list[Part]:
    if problem := _bad_scales(payload.scales, payload.offsets, payload.bits):
        raise ValueError(problem)
    codes = _bytes_of(payload.codes)
    if payload.offsets is None:
        codes = codes + np.uint8(2 ** (payload.bits - 1))  # modulo 256: no code is negative
    if len(codes) and int(codes.max()) >> payload.bits:
        raise ValueError(f"codes do not fit into {payload.bits} bits")
    variant = payload.bits | (_HAS_SIZES if isinstance(payload.block, tuple) else 0)
    variant |= 0 if payload.offsets is None else _HAS_OFFSETS
    floats = [payload.scales] if payload.offsets is None else [payload.scales, payload.offsets]
    return [
        _HEAD.pack(_QUANTISED, variant, payload.size),
        _block_bytes(payload.block),
        *(_bytes_of(numbers).data for numbers in floats),
        pack(codes, payload.bits).data,
    ]


def _read_quantised(reader: Reader, variant: int, count: int, size: int) -> Quantised:
    _check_count(count, size)
    bits, has_offsets = variant % _HAS_SIZES, variant >= _HAS_OFFSETS
    if not (1 if has_offsets else 2) <= bits <= 8:
        raise DecodeError(f"codes of {bits} bits {'with' if has_offsets else 'without'} offsets")
    block = _read_block(reader, count, has_sizes=bool(variant & _HAS_SIZES))
    blocks = num_blocks(count, block)
    scales, *rest = (
        _tensor_of(reader.array(4 * blocks, name), torch.float32)
        for name in ("scales", "offsets")[: 1 + has_offsets]
    )
    offsets = rest[0] if rest else None
    if problem := _bad_scales(scales, offsets, bits):
        raise DecodeError(problem)
    packed = reader.array(packed_size(count, bits), "codes")
    if count * bits % 8 and packed[-1] >> count * bits % 8:
        raise DecodeError("bits are set behind the last code")
    codes = unpack(packed, count, bits)
    if not has_offsets:
        codes -= np.uint8(2 ** (bits - 1))
        codes = codes.view(np.int8)
    return Quantised(torch.from_numpy(codes), bits, scales, offsets, block)


def _block_bytes(block: Block) -> bytes:
    numbers = (len(block), *block) if isinstance(block, tuple) else (block or 0,)
    return b"".join(map(_COUNT.pack, numbers))


def _read_block(reader: Reader, count: int, *, has_sizes: bool) -> Block:
    (number,) = reader.fields(_COUNT, "block")
    if not has_sizes:
        return number or None
    if number > count:
        raise DecodeError(f"{number} blocks of {count} numbers")
    sizes = tuple(reader.array(8 * number, "sizes of blocks").view("<u8").tolist())
    if sum(sizes) != count or 0 in sizes:
        raise DecodeError(f"the sizes of blocks do not make {count} numbers")
    return sizes


def _checked_indices(payload: Sparse) -> np.ndarray:
    indices: np.ndarray = payload.indices.cpu().numpy()
    if len(indices) and (
        int(np.diff(indices, prepend=-1).min()) < 1 or indices[-1] >= payload.size
    ):
        raise ValueError(f"indices must increase strictly, from 0 to {payload.size - 1}")
    return indices


def _read_sparse(reader: Reader, num_low_bits: int, count: int, size: int) -> Sparse:
    (of_size,) = reader.fields(_COUNT, "sparse size")
    _check_count(of_size, size)
    if count > size:
        raise DecodeError(f"{count} indices into {size} numbers")
    # the shortest code never has more; the remainders then add up to less than 2 size
    if num_low_bits and max(1, count) << num_low_bits > 2 * size:
        raise DecodeError(f"indices with remainders of {num_low_bits} bits are not the shortest")
    (unary_size,) = reader.fields(_COUNT, "size of the indices")
    # each quotient is a one and zeros, no more zeros than the gaps have room for
    if unary_size > (count + (size >> num_low_bits) + 7) // 8:
        raise DecodeError(f"{unary_size} bytes of quotients are too many for {count} indices")
    unary = reader.array(unary_size, "quotients")
    low = reader.array(low_size(count, num_low_bits), "remainders")
    indices = read_indices(unary, low, count, num_low_bits)
    if indices is None:
        raise DecodeError(f"the quotients are not those of {count} indices")
    if count and indices[-1] >= size:
        raise DecodeError(f"index {indices[-1]} is not below {size}")
    code = best_code(gaps_of(indices))
    if (code.num_low_bits, code.unary_size) != (num_low_bits, unary_size):
        raise DecodeError("the indices are not in their shortest form")
    _check_padding(low, count, num_low_bits)
    values = read_payload(reader, count)
    if isinstance(values, Sparse):
        raise DecodeError("the values of a sparse payload are sparse again")
    return Sparse(torch.from_numpy(indices), values, size)


def _check_padding(low: Bytes, count: int, num_low_bits: int) -> None:
    used = count * (num_low_bits % 8) % 8
    if used and low[-1] >> used:
        raise DecodeError("bits are set behind the last remainder")
