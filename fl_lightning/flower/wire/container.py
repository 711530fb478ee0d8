"""How orders and answers are written: a JSON document and tensors, in one piece of bytes.

    8 bytes "FLLFLOWR", u32 version of the format, 32 bytes SHA-256 of all that follows,
    a safetensors file: u64 length of the header, header (JSON), the tensors' bytes

All numbers are little-endian. The document is the header's only metadata. A message has one form:
names are sorted, tensors lie by size of an element and then by name, nothing is between or behind
them. What is read must be in this form, so that no part of it can say two things.

Nothing is trusted: sizes are checked before anything is allocated, and no code can travel. The
checksum finds accidents; who may send is a matter of TLS and of the sites' keys.

Source: the safetensors format, github.com/huggingface/safetensors. Its header is read here and not
by its library, which allows more than one form.
"""

from __future__ import annotations

import hashlib
import json
import math
import struct
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fl_lightning.flower.wire.plain_json import (
    MessageError,
    check_string,
    from_text,
    parse,
    to_text,
)

MAGIC = b"FLLFLOWR"
VERSION = 1
MOST_HEADER_BYTES = 8 << 20
MOST_DIMENSIONS = 32
DTYPES = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "I16": torch.int16,
    "U16": torch.uint16,
    "I32": torch.int32,
    "U32": torch.uint32,
    "I64": torch.int64,
    "U64": torch.uint64,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F32": torch.float32,
    "F64": torch.float64,
    "C64": torch.complex64,
}
_NAMES = {dtype: name for name, dtype in DTYPES.items()}
_FRAME = struct.Struct("<8sI32s")
_LENGTH = struct.Struct("<Q")
Form = tuple[str, tuple[int, ...]]


def pack(document: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> bytes:
    """Return the bytes of a document and its tensors.

    Raises:
        MessageError: if one of them cannot be sent.

    Example:
        >>> content = pack({"round": 3}, {"x": torch.tensor([1.0, -0.0])})
        >>> unpack(content, limit=1000)
        ({'round': 3}, {'x': tensor([1., -0.])})
        >>> unpack(content, limit=100)  # doctest: +ELLIPSIS
        Traceback (most recent call last):
        ...
        fl_lightning.flower.wire.plain_json.MessageError: the message has ... bytes, at most 100 are allowed
    """
    forms = {name: form_of(name, tensor) for name, tensor in tensors.items()}
    header = _header(to_text(dict(document)), forms)
    if len(header) > MOST_HEADER_BYTES:
        raise MessageError(
            f"the message's header has {len(header)} bytes, at most {MOST_HEADER_BYTES} are "
            "allowed: send fewer clients in one message"
        )
    parts: list[Any] = [_LENGTH.pack(len(header)), header]
    parts += [_bytes(tensors[name]).data for name in _order(forms)]
    checksum = hashlib.sha256()
    for part in parts:
        checksum.update(part)
    return b"".join([_FRAME.pack(MAGIC, VERSION, checksum.digest()), *parts])


def unpack(content: bytes, *, limit: int) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Return a message's document and tensors, which share no memory with it.

    Args:
        content: from a stranger.
        limit: of the message, in bytes.

    Raises:
        MessageError: if `pack` cannot have written it.
    """
    if len(content) > limit:
        raise MessageError(f"the message has {len(content)} bytes, at most {limit} are allowed")
    header, data = _header_and_data(memoryview(content))
    entries = parse(header)
    metadata = entries.pop("__metadata__", None) if isinstance(entries, dict) else None
    if not isinstance(metadata, dict) or not isinstance(metadata.get("message"), str):
        raise MessageError("the message's header has no document")
    document = from_text(metadata["message"])
    if not isinstance(document, dict):
        raise MessageError("the message's document is no mapping")
    forms = {name: _read_form(name, entry) for name, entry in entries.items()}
    if _header(metadata["message"], forms) != header.encode():
        raise MessageError("the message's header is not in its only form")
    if (total := sum(map(_num_bytes, forms.values()))) != len(data):
        raise MessageError(f"the tensors have {total} bytes, and {len(data)} are there")
    return document, dict(_tensors(forms, data))


def _header_and_data(content: memoryview) -> tuple[str, memoryview]:
    """Return the header's text and the tensors' bytes of a message with a right checksum."""
    if len(content) < _FRAME.size + _LENGTH.size:
        raise MessageError(f"no message: it has {len(content)} bytes only")
    magic, version, checksum = _FRAME.unpack(content[: _FRAME.size])
    if magic != MAGIC:
        raise MessageError(f"no message: it starts with {magic!r} instead of {MAGIC!r}")
    if version != VERSION:
        raise MessageError(
            f"the message has format {version}, this program reads format {VERSION}: install the "
            "same fl_lightning at the server and the sites"
        )
    file = content[_FRAME.size :]
    if hashlib.sha256(file).digest() != checksum:
        raise MessageError("the checksum differs: bytes changed on the way")
    (length,) = _LENGTH.unpack(file[: _LENGTH.size])
    body = file[_LENGTH.size :]
    if length > min(len(body), MOST_HEADER_BYTES):
        raise MessageError(
            f"the message's header has {length} bytes: {len(body)} are there, and at most "
            f"{MOST_HEADER_BYTES} are allowed"
        )
    try:
        return str(body[:length], "ascii"), body[length:]
    except UnicodeDecodeError:
        raise MessageError("the message's header is not ASCII") from None


def _header(document: str, forms: Mapping[str, Form]) -> bytes:
    """Return the one header of a document's text and tensors of these forms."""
    entries: dict[str, Any] = {"__metadata__": {"message": document}}
    at = 0
    for name in _order(forms):
        end = at + _num_bytes(forms[name])
        dtype, shape = forms[name]
        entries[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [at, end]}
        at = end
    text = json.dumps(entries, separators=(",", ":"))
    return (text + " " * (-len(text) % 8)).encode()


def _order(forms: Mapping[str, Form]) -> list[str]:
    """Return names as tensors lie: the largest elements first, as safetensors has it."""
    return sorted(forms, key=lambda name: (-DTYPES[forms[name][0]].itemsize, name))


def _num_bytes(form: Form) -> int:
    return math.prod(form[1]) * DTYPES[form[0]].itemsize


def form_of(name: str, tensor: Any) -> Form:
    """Return the name of a tensor's dtype, and its shape.

    Raises:
        MessageError: if it cannot be sent.
    """
    check_string(name, "a tensor's name")
    if name == "__metadata__":
        raise MessageError("a tensor cannot have the name '__metadata__': give it another")
    if not isinstance(tensor, Tensor) or tensor.layout != torch.strided or tensor.is_meta:
        raise MessageError(f"{name!r} must be a dense tensor, got {type(tensor).__name__}")
    if tensor.dtype not in _NAMES:
        raise MessageError(f"{name!r} is of {tensor.dtype}, which cannot be sent")
    if tensor.ndim > MOST_DIMENSIONS:
        raise MessageError(f"{name!r} has {tensor.ndim} dimensions, at most {MOST_DIMENSIONS}")
    return _NAMES[tensor.dtype], tuple(tensor.shape)


def _read_form(name: str, entry: Any) -> Form:
    """Return dtype and shape; the header is compared as a whole for what else there is."""
    check_string(name, "a tensor's name")
    dtype, shape = (entry.get("dtype"), entry.get("shape")) if isinstance(entry, dict) else (0, 0)
    if not isinstance(dtype, str) or dtype not in DTYPES:
        raise MessageError(f"the tensor {name[:99]!r} is of no known dtype")
    if not isinstance(shape, list) or len(shape) > MOST_DIMENSIONS:
        raise MessageError(f"the tensor {name[:99]!r} has no shape of at most {MOST_DIMENSIONS}")
    # of an empty tensor PyTorch still multiplies the other sizes
    if not all(type(n) is int and n >= 0 for n in shape) or (
        math.prod(max(n, 1) for n in shape) >= 2**60
    ):
        raise MessageError(f"the tensor {name[:99]!r} has an impossible shape")
    return dtype, tuple(shape)


def _tensors(forms: Mapping[str, Form], data: memoryview) -> Iterator[tuple[str, Tensor]]:
    at = 0
    for name in _order(forms):
        dtype, shape = forms[name]
        end = at + _num_bytes(forms[name])
        yield name, tensor_of(dtype, shape, data[at:end])
        at = end


def tensor_of(dtype: str, shape: tuple[int, ...], data: memoryview | bytes) -> Tensor:
    """Return a tensor of these bytes, of which there are as many as it needs."""
    found = np.frombuffer(data, np.uint8)
    if dtype == "BOOL" and (found > 1).any():
        raise MessageError("a tensor of bool has a byte that is neither 0 nor 1")
    tensor = torch.empty(shape, dtype=DTYPES[dtype], device="cpu")
    _bytes(tensor)[:] = found
    return tensor


def scalar_text(name: str, scalar: Any) -> str:
    """Return a 0-d tensor as text, bit for bit: its dtype and its bytes.

    Example:
        >>> scalar_text("loss", torch.tensor(0.5))
        'F32 0000003f'
    """
    dtype, shape = form_of(name, scalar)
    if shape:
        raise MessageError(f"{name!r} must be a number, a tensor without dimensions, got {shape}")
    return f"{dtype} {_bytes(scalar).tobytes().hex()}"


def scalar_of(text: Any) -> Tensor:
    """Return the 0-d tensor of `scalar_text`."""
    dtype, _, digits = text.partition(" ") if isinstance(text, str) else ("", "", "")
    try:
        data = bytes.fromhex(digits)
    except ValueError:
        data = b""
    if dtype not in DTYPES or len(data) != DTYPES[dtype].itemsize:
        raise MessageError("a metric is not a dtype and its bytes")
    return tensor_of(dtype, (), data)


def _bytes(tensor: Tensor) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """Return a tensor's bytes, its own memory if it is on the CPU and contiguous."""
    plain = tensor.detach().resolve_conj().resolve_neg().cpu().contiguous().reshape(-1)
    found: np.ndarray[Any, np.dtype[np.uint8]] = plain.view(torch.uint8).numpy()
    return found
