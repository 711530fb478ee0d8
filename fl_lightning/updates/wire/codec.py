"""The one binary format of an update or a model on its way, version 1, little-endian.

    "FLLU", u8 version, u8 kind (0 update, 1 model), u8 number of transforms, u16 of metrics,
    u64 length of the whole message, 16 bytes fingerprint of space and mask,
    u64 round, u64 client, u64 examples, u64 local steps,
    transforms and metrics' names (u16 length, UTF-8), f64 metrics, params, buffers, u32 CRC-32

Decoding trusts nothing: every length is checked before it is used, every number must be finite,
nothing may follow. A message has one encoding only: what decodes, encodes to the same bytes.

The checksum is for accidents. CRC-32 finds every burst of up to 32 wrong bits and misses one of
2^32 other accidents; it is in Python's library and runs at several times the speed of BLAKE2b or of
SHA-256. Against forgers no checksum without a key helps: for these there are signatures and
authenticated channels.
"""

from __future__ import annotations

import struct
import zlib

from torch import Tensor

from fl_lightning.updates.wire.message import LARGEST_NUMBER, Agreement, Message, MessageKind
from fl_lightning.updates.wire.payload_codec import Part, payload_size, read_payload, write_payload
from fl_lightning.updates.wire.reader import DecodeError, Reader

MAGIC = b"FLLU"
VERSION = 1
_HEADER = struct.Struct("<4sBBBHQ16s4Q")
_TEXT = struct.Struct("<H")
_METRIC = struct.Struct("<d")
_CHECKSUM = struct.Struct("<I")
_KINDS: tuple[MessageKind, ...] = ("update", "model")


def encoded_size(message: Message) -> int:
    """Return the length of `encode`'s result in bytes, without encoding.

    It does not look at values, only at shapes, dtypes, names and the indices of sparse payloads.
    """
    names = (*message.transforms, *message.metrics)
    texts = sum(_TEXT.size + len(name.encode()) for name in names)
    payloads = payload_size(message.params) + payload_size(message.buffers)
    metrics = _METRIC.size * len(message.metrics)
    return _HEADER.size + texts + metrics + payloads + _CHECKSUM.size


def encode(message: Message) -> bytes:
    """Return the message as bytes.

    Raises:
        ValueError: if a payload cannot be sent, e.g. because a number is not finite.

    Example:
        >>> import torch
        >>> from fl_lightning.updates.payload import Dense
        >>> params, buffers = Dense(torch.tensor([0.5, -1.0])), Dense(torch.empty(0))
        >>> message = Message("model", "0" * 32, 3, 7, params, buffers)
        >>> data = encode(message)
        >>> len(data) == encoded_size(message)
        True
        >>> agreement = Agreement(kind="model", space="0" * 32, round_index=3, num_params=2)
        >>> decode(data, agreement).params.to_dense()
        tensor([ 0.5000, -1.0000])
        >>> decode(data[:-1], agreement)
        Traceback (most recent call last):
        ...
        fl_lightning.updates.wire.reader.DecodeError: the message has 96 bytes and says it has 97
    """
    parts: list[Part] = [_text(name) for name in message.transforms]
    parts += [_text(name) for name in message.metrics]
    parts += [_METRIC.pack(float(value)) for value in message.metrics.values()]
    parts += write_payload(message.params) + write_payload(message.buffers)
    length = _HEADER.size + sum(map(len, parts)) + _CHECKSUM.size
    parts.insert(0, _header(message, length))
    checksum = 0
    for part in parts:
        checksum = zlib.crc32(part, checksum)
    return b"".join([*parts, _CHECKSUM.pack(checksum)])


def decode(data: bytes | bytearray | memoryview, agreement: Agreement) -> Message:
    """Return the message that was encoded.

    Args:
        data: from a stranger.
        agreement: what the message must be.

    Raises:
        DecodeError: if the bytes are not exactly what `encode` returns for some message, or if
            that message is not of the kind, space, round, sizes and transforms agreed on.
    """
    _check_frame(data)
    reader = Reader(memoryview(data)[: -_CHECKSUM.size])
    _, _, kind, num_transforms, num_metrics, _, space, *numbers = reader.fields(_HEADER, "header")
    if kind >= len(_KINDS):
        raise DecodeError(f"unknown kind of message: {kind}")
    _check_header(_KINDS[kind], space.hex(), numbers, agreement)
    transforms = tuple(reader.text(_TEXT, "transforms") for _ in range(num_transforms))
    _check("transforms", transforms, agreement.transforms)
    metrics = _read_metrics(reader, num_metrics)
    params = read_payload(reader, agreement.num_params)
    buffers = read_payload(reader, agreement.num_buffers)
    if reader.left:
        raise DecodeError(f"{reader.left} bytes follow the message")
    round_index, client_id, num_examples, num_steps = numbers
    try:
        return Message(
            kind=agreement.kind,
            space=agreement.space,
            round_index=round_index,
            client_id=client_id,
            params=params,
            buffers=buffers,
            num_examples=num_examples,
            num_steps=num_steps,
            metrics=metrics,
            transforms=transforms,
        )
    except ValueError as error:
        raise DecodeError(str(error)) from None


def _text(name: str) -> bytes:
    data = name.encode()
    return _TEXT.pack(len(data)) + data


def _header(message: Message, length: int) -> bytes:
    return _HEADER.pack(
        MAGIC,
        VERSION,
        _KINDS.index(message.kind),
        len(message.transforms),
        len(message.metrics),
        length,
        bytes.fromhex(message.space),
        message.round_index,
        message.client_id,
        message.num_examples,
        message.num_steps,
    )


def _check_frame(data: bytes | bytearray | memoryview) -> None:
    reader = Reader(data)
    size = reader.left
    magic, version, _, _, _, length, *_ = reader.fields(_HEADER, "header")
    if magic != MAGIC:
        raise DecodeError(f"not a message: it starts with {magic!r} instead of {MAGIC!r}")
    if version != VERSION:
        raise DecodeError(
            f"the message has version {version}, this program reads version {VERSION}: "
            "use the same fl_lightning on both sides"
        )
    if length != size:
        raise DecodeError(f"the message has {size} bytes and says it has {length}")
    body = reader.take(reader.left - _CHECKSUM.size, "body") if reader.left >= 4 else b""
    (checksum,) = reader.fields(_CHECKSUM, "checksum")
    if checksum != zlib.crc32(body, zlib.crc32(memoryview(data)[: _HEADER.size])):
        raise DecodeError("the checksum differs: bytes changed on the way")


def _check_header(kind: MessageKind, space: str, numbers: list[int], agreement: Agreement) -> None:
    _check("kind", kind, agreement.kind)
    _check("space", space, agreement.space)
    _check("round", numbers[0], agreement.round_index)
    if max(numbers) > LARGEST_NUMBER:
        raise DecodeError(f"a number is beyond {LARGEST_NUMBER}")


def _check(what: str, found: object, agreed: object) -> None:
    if found != agreed:
        raise DecodeError(f"{what} {found!r} instead of {agreed!r}")


def _read_metrics(reader: Reader, count: int) -> dict[str, Tensor | float]:
    names = [reader.text(_TEXT, "names of metrics") for _ in range(count)]
    if len(set(names)) < count:
        raise DecodeError("two metrics have the same name")
    return {name: reader.fields(_METRIC, "metrics")[0] for name in names}
