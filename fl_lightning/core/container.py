"""Containers: the byte format of messages between clients and server, and of our files.

A container is a safetensors file, so that other tools can read it:

    u64 length of the header, header (JSON, padded with spaces to 8 bytes), the tensors' bytes
    header = {"__metadata__": {"fl_lightning.1": SHA-256, kind: fields}, name: {dtype, shape, place}, …}

Numbers are little-endian. The kind is the type of the content (``update``, ``order``, ``mask``, …), and
its fields are a JSON text. The SHA-256, of all bytes except its own 64 digits, detects accidental
changes. Senders are authenticated by TLS, by the sites' keys, and by tags inside.

A container has exactly one form: names are sorted, tensors are ordered by element size and then by name,
without gaps. `read` accepts this form only, so that no bytes can be read in two ways. The content is not
trusted: sizes are checked before memory is allocated, and it contains no code.

Numbers that differ between clients (a round, an id) are tensors, not fields: so the length of a message
depends only on names, shapes and dtypes, and `size_of` returns it without writing.

Source: the safetensors format, github.com/huggingface/safetensors. The header is read here and not by
the safetensors library, which accepts more than one form.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
import struct
import sys
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fl_lightning.core.plain_json import (
    MessageError,
    check_string,
    from_text,
    parse,
    shown,
    to_text,
)

MAGIC = b'{"__metadata__":{"fl_lightning.1":"'
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
DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}
Form = tuple[str, tuple[int, ...]]  # the name of a dtype, and a shape
_LENGTH = struct.Struct("<Q")
_DIGEST = slice(_LENGTH.size + len(MAGIC), _LENGTH.size + len(MAGIC) + 64)
_OTHER_VERSION = re.compile(rb'\{"__metadata__":\{"fl_lightning\.(\d{1,9})":"')


def write(kind: str, fields: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> bytes:
    """Encode JSON fields and tensors as one message (a container), and return its bytes.

    Args:
        kind: type of the content.
        fields: fields of plain JSON values.
        tensors: tensors by name, on any device.

    Raises:
        MessageError: if a field or tensor cannot be written.

    Example:
        >>> content = write("order", {"round": 3}, {"x": torch.tensor([1.0, -0.0])})
        >>> read(content, "order")
        ({'round': 3}, {'x': tensor([1., -0.])})
        >>> read(content, "answer")
        Traceback (most recent call last):
        ...
        fl_lightning.core.plain_json.MessageError: the message must be of kind 'answer', got 'order'
        >>> read(content, "order", limit=100)  # doctest: +ELLIPSIS
        Traceback (most recent call last):
        ...
        fl_lightning.core.plain_json.MessageError: the message has ... bytes, at most 100 are allowed
    """
    forms = {name: form_of(name, tensor) for name, tensor in tensors.items()}
    header = _header(kind, to_text(dict(fields)), forms)
    if len(header) > MOST_HEADER_BYTES:
        raise MessageError(
            f"the message's header has {len(header)} bytes, at most {MOST_HEADER_BYTES} are "
            "allowed: send fewer clients in one message"
        )
    front = _LENGTH.pack(len(header)) + header
    parts: list[Any] = [front[: _DIGEST.start], front[_DIGEST.stop :]]
    parts += [_bytes(tensors[name]).data for name in _order(forms)]
    parts.insert(1, _checksum(parts))
    return b"".join(parts)


def size_of(kind: str, fields: Mapping[str, Any], forms: Mapping[str, Form]) -> int:
    """Return the length of a message (a container) in bytes, without encoding it.

    Args:
        kind: type of the content.
        fields: fields of plain JSON values.
        forms: dtypes and shapes of the tensors, by name.

    Example:
        >>> size_of("mask", {}, {"x": ("U8", (5,))}) == len(write("mask", {}, {"x": as_tensor(b"bytes")}))
        True
    """
    header = _header(kind, to_text(dict(fields)), forms)
    return _LENGTH.size + len(header) + sum(map(_num_bytes, forms.values()))


def read(
    content: bytes | bytearray | memoryview, kind: str, *, limit: int | None = None
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Decode a message: return its fields and its tensors, which share no memory with the bytes.

    Args:
        content: bytes from an untrusted sender.
        kind: expected type of the content.
        limit: largest allowed number of bytes.

    Raises:
        MessageError: if `write` cannot have written these bytes, or the kind differs.
    """
    if limit is not None and len(content) > limit:
        raise MessageError(f"the message has {len(content)} bytes, at most {limit} are allowed")
    header, data = _header_and_data(memoryview(content).cast("B"))
    entries = parse(header)
    found, text = list(entries.pop("__metadata__").items())[-1]  # the magic has made it a mapping
    if type(text) is not str:
        raise MessageError("the message's header has no fields")
    forms = {name: _read_form(name, entry) for name, entry in entries.items()}
    if _header(found, text, forms, digest=bytes(content[_DIGEST])) != header.encode():
        raise MessageError("the message's header is not in canonical form")
    if found != kind:
        raise MessageError(f"the message must be of kind {kind!r}, got {shown(found)}")
    if (total := sum(map(_num_bytes, forms.values()))) != len(data):
        raise MessageError(f"the tensors must have {total} bytes, got {len(data)}")
    fields = from_text(text)
    if not isinstance(fields, dict):
        raise MessageError("the message's fields must be a mapping")
    tensors, at = {}, 0
    for name in _order(forms):
        end = at + _num_bytes(forms[name])
        tensors[name] = tensor_of(*forms[name], data[at:end])
        at = end
    return fields, tensors


def _checksum(parts: list[Any]) -> bytes:
    checksum = hashlib.sha256()
    for part in parts:
        checksum.update(part)
    return checksum.hexdigest().encode()


def _header_and_data(content: memoryview) -> tuple[str, memoryview]:
    """Check a message's version and checksum; return the header's text and the tensors' bytes."""
    if len(content) < _DIGEST.stop:
        raise MessageError(f"not a message of fl_lightning: it has only {len(content)} bytes")
    magic = bytes(content[_LENGTH.size : _DIGEST.start])
    if magic != MAGIC:
        if other := _OTHER_VERSION.match(content[_LENGTH.size :]):
            raise MessageError(
                f"the message has format {int(other[1])}, this program reads format 1: install the "
                "same fl_lightning at the server and the sites"
            )
        raise MessageError(f"not a message of fl_lightning: its header starts with {magic[:16]!r}")
    if content[_DIGEST] != _checksum([content[: _DIGEST.start], content[_DIGEST.stop :]]):
        raise MessageError("the checksum differs: bytes changed on the way")
    (length,) = _LENGTH.unpack(content[: _LENGTH.size])
    body = content[_LENGTH.size :]
    if length > min(len(body), MOST_HEADER_BYTES):
        raise MessageError(
            f"the message's header must have at most {min(len(body), MOST_HEADER_BYTES)} bytes, it claims "
            f"{length}"
        )
    try:
        return str(body[:length], "ascii"), body[length:]
    except UnicodeDecodeError:
        raise MessageError("the message's header is not ASCII") from None


def _header(kind: str, fields: str, forms: Mapping[str, Form], digest: bytes = b"0" * 64) -> bytes:
    """Return a message's header, given its fields and the dtypes and shapes of its tensors."""
    entries: dict[str, Any] = {}
    at = 0
    for name in _order(forms):
        end = at + _num_bytes(forms[name])
        dtype, shape = forms[name]
        entries[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [at, end]}
        at = end
    metadata, rest = (json.dumps(each, separators=(",", ":")) for each in ({kind: fields}, entries))
    text = f'",{metadata[1:]}' + (f",{rest[1:]}" if entries else "}")
    header = MAGIC + digest + text.encode()
    return header + b" " * (-len(header) % 8)


def _order(forms: Mapping[str, Form]) -> list[str]:
    """Return the tensors' names in their order in the message: largest elements first, as in safetensors."""
    return sorted(forms, key=lambda name: (-DTYPES[forms[name][0]].itemsize, name))


def _num_bytes(form: Form) -> int:
    return math.prod(form[1]) * DTYPES[form[0]].itemsize


def form_of(name: str, tensor: Any) -> Form:
    """Return a tensor's dtype (its name in messages) and shape; raise MessageError if it cannot be sent.

    Raises:
        MessageError: if the tensor cannot be sent.
    """
    check_string(name, "a tensor's name")
    if name == "__metadata__":
        raise MessageError("a tensor cannot have the name '__metadata__': give it another")
    if not isinstance(tensor, Tensor) or tensor.layout != torch.strided or tensor.is_meta:
        raise MessageError(f"{name!r} must be a dense tensor, got {type(tensor).__name__}")
    if tensor.dtype not in DTYPE_NAMES:
        raise MessageError(f"{name!r} has the dtype {tensor.dtype}, which cannot be sent")
    if tensor.ndim > MOST_DIMENSIONS:
        raise MessageError(f"{name!r} must have at most {MOST_DIMENSIONS} dimensions")
    return DTYPE_NAMES[tensor.dtype], tuple(tensor.shape)


def _read_form(name: str, entry: Any) -> Form:
    """Return a tensor's dtype and shape from its entry in a message's header."""
    check_string(name, "a tensor's name")
    dtype, shape = (entry.get("dtype"), entry.get("shape")) if isinstance(entry, dict) else (0, 0)
    if not isinstance(dtype, str) or dtype not in DTYPES:
        raise MessageError(f"the tensor {name[:99]!r} has an unknown dtype")
    if not isinstance(shape, list) or len(shape) > MOST_DIMENSIONS:
        raise MessageError(
            f"the tensor {name[:99]!r} must have at most {MOST_DIMENSIONS} dimensions"
        )
    # PyTorch multiplies the other sizes of an empty tensor as well
    if not all(type(n) is int and n >= 0 for n in shape) or (
        math.prod(max(n, 1) for n in shape) >= 2**60
    ):
        raise MessageError(f"the tensor {name[:99]!r} has an impossible shape")
    return dtype, tuple(shape)


def tensor_of(dtype: str, shape: tuple[int, ...], data: memoryview | bytes) -> Tensor:
    """Decode a tensor of this dtype and shape from its bytes, whose number must match."""
    found = np.frombuffer(data, np.uint8)
    if dtype == "BOOL" and (found > 1).any():
        raise MessageError("a tensor of booleans has a byte that is neither 0 nor 1")
    tensor = torch.empty(shape, dtype=DTYPES[dtype], device="cpu")
    _bytes(tensor)[:] = found
    return tensor


def scalar_text(name: str, scalar: Any) -> str:
    """Encode a 0-d tensor as text, bit-exactly: its dtype and its bytes.

    Example:
        >>> scalar_text("loss", torch.tensor(0.5))
        'F32 0000003f'
    """
    dtype, shape = form_of(name, scalar)
    if shape:
        raise MessageError(f"{name!r} must be a number, a tensor without dimensions, got {shape}")
    return f"{dtype} {_bytes(scalar).tobytes().hex()}"


def scalar_of(text: Any) -> Tensor:
    """Decode a 0-d tensor from its text, the inverse of `scalar_text`."""
    dtype, _, digits = text.partition(" ") if isinstance(text, str) else ("", "", "")
    try:
        data = bytes.fromhex(digits)
    except ValueError:
        data = b""
    if dtype not in DTYPES or len(data) != DTYPES[dtype].itemsize:
        raise MessageError("a metric must be a text like 'F32 0000003f', its dtype and its bytes")
    return tensor_of(dtype, (), data)


def _bytes(tensor: Tensor) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """Return a tensor's bytes, as a view of its memory if that is contiguous on the CPU."""
    if sys.byteorder == "big":
        raise MessageError("this machine is big-endian: its tensors cannot be written or read")
    plain = tensor.detach().resolve_conj().resolve_neg().cpu().contiguous().reshape(-1)
    if plain.stride() != (1,):  # a single number that was cut out of others
        plain = plain.clone(memory_format=torch.contiguous_format)
    found: np.ndarray[Any, np.dtype[np.uint8]] = plain.view(torch.uint8).numpy()
    return found


def as_tensor(content: bytes) -> Tensor:
    """Convert bytes to a tensor that a message can hold: uint8, shape (n,).

    Example:
        >>> as_tensor(b"ab"), bytes_of(as_tensor(b"ab"))
        (tensor([97, 98], dtype=torch.uint8), b'ab')
    """
    if not content:  # PyTorch cannot make a tensor from an empty buffer
        return torch.empty(0, dtype=torch.uint8)
    return torch.frombuffer(bytearray(content), dtype=torch.uint8)


def bytes_of(tensor: Tensor | None) -> bytes:
    """Return the bytes in a tensor of a message, the inverse of `as_tensor`.

    Raises:
        MessageError: if the tensor is missing, no vector, or of another dtype.

    Example:
        >>> bytes_of(torch.ones(2, dtype=torch.bfloat16))
        Traceback (most recent call last):
        ...
        fl_lightning.core.plain_json.MessageError: the message must have bytes here, got torch.bfloat16 of \
shape (2,)
    """
    if tensor is None:
        raise MessageError("the message must have bytes here, got nothing")
    if tensor.dtype != torch.uint8 or tensor.ndim != 1:
        raise MessageError(
            f"the message must have bytes here, got {tensor.dtype} of shape {tuple(tensor.shape)}"
        )
    return tensor.contiguous().numpy().tobytes()
