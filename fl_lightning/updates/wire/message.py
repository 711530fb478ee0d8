"""Messages: a payload, its header, its bytes.

Up goes a client's update, down the global model. Both say of which space (and mask) and of which
round they are; the receiver knows what it waits for and refuses everything else.

The one binary format of an update or a model on its way, version 1, little-endian.

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

Bytes up and down of one client, counted without encoding: those of the real encoding.

A dense message's length depends on sizes, dtypes and metrics' names alone, which clients share, so
that a run computes it once.
"""

from __future__ import annotations

import re
import struct
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Literal

import torch
from torch import Tensor

from fl_lightning.core.update import ClientUpdate, LazyDeltas, Updates
from fl_lightning.updates.payload import Dense, Payload
from fl_lightning.updates.wire.coding import DecodeError, Reader
from fl_lightning.updates.wire.payload_codec import Part, payload_size, read_payload, write_payload

MessageKind = Literal["update", "model"]
LARGEST_NUMBER = 2**63 - 1


@dataclass(frozen=True, eq=False)
class Message:
    """An update on its way up, or a model on its way down.

    Args:
        kind: which of the two.
        space: fingerprint of the space and its mask, 32 hexadecimal digits.
        round_index: the round, ≥ 0.
        client_id: from whom, or to whom, ≥ 0.
        params: the delta, or the model's parameters.
        buffers: floating-point buffers.
        num_examples: the aggregation weight; ≥ 1 of an update, 0 of a model.
        num_steps: local steps taken; 0 of a model.
        metrics: by name. A metric may be NaN or infinite, unlike everything else: it is only shown.
        transforms: what has been done to the delta, in order.

    Raises:
        ValueError: if a field is outside its range.
    """

    kind: MessageKind
    space: str
    round_index: int
    client_id: int
    params: Payload
    buffers: Payload
    num_examples: int = 0
    num_steps: int = 0
    metrics: Mapping[str, Tensor | float] = field(default_factory=dict)
    transforms: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if not re.fullmatch("[0-9a-f]{32}", self.space):
            raise ValueError(f"space must be 32 hexadecimal digits, got {self.space!r}")
        for name in ("round_index", "client_id", "num_examples", "num_steps"):
            if not 0 <= getattr(self, name) <= LARGEST_NUMBER:
                raise ValueError(f"{name} must be from 0 to 2^63 - 1, got {getattr(self, name)}")
        if self.kind == "update" and not self.num_examples:
            raise ValueError("num_examples of an update must be at least 1, got 0")
        if self.kind == "model" and (self.num_examples or self.num_steps):
            raise ValueError("num_examples and num_steps of a model must be 0")
        _check_names("metrics", tuple(self.metrics), at_most=2**16 - 1)
        _check_names("transforms", self.transforms, at_most=2**8 - 1)

    @classmethod
    def of_update(
        cls,
        update: ClientUpdate,
        *,
        space: str,
        round_index: int,
        params: Payload | None = None,
        transforms: tuple[str, ...] = (),
    ) -> Message:
        """Return the message that carries a client's update.

        Args:
            update: what the client has.
            space: fingerprint of the space and its mask.
            round_index: the round.
            params: what ``transforms`` made of the delta; the delta as it is if None.
            transforms: their names, in order.
        """
        return cls(
            kind="update",
            space=space,
            round_index=round_index,
            client_id=update.client_id,
            params=Dense(update.delta) if params is None else params,
            buffers=Dense(update.buffers),
            num_examples=update.num_examples,
            num_steps=update.num_steps,
            metrics=update.metrics,
            transforms=transforms,
        )

    def to_update(self) -> ClientUpdate:
        """Return the update, its delta dense.

        Raises:
            ValueError: if this is a model.
        """
        if self.kind != "update":
            raise ValueError("the message holds a model, not an update")
        return ClientUpdate(
            self.client_id,
            self.params.to_dense(),
            self.buffers.to_dense(),
            self.num_examples,
            self.num_steps,
            {n: torch.as_tensor(v, dtype=torch.float64) for n, v in self.metrics.items()},
        )


def _check_names(what: str, names: tuple[str, ...], at_most: int) -> None:
    if len(names) > at_most:
        raise ValueError(f"at most {at_most} {what} can be sent, got {len(names)}")
    for name in names:
        if len(name.encode()) >= 2**16:
            raise ValueError(f"names of {what} must be below 65536 bytes, got {name[:50]}…")


@dataclass(frozen=True, kw_only=True)
class Agreement:
    """What the receiver of a message knows beforehand; a message that differs is refused.

    Attributes:
        kind: whether an update or a model is waited for.
        space: fingerprint of the space and its mask.
        round_index: the round.
        num_params: numbers that the params' payload stands for: `Chain.sent_size` of k, which is k
            itself for all transforms but `RandomK`.
        num_buffers: of the floating-point buffers.
        transforms: what is done to a delta, in order.
    """

    kind: MessageKind
    space: str
    round_index: int
    num_params: int
    num_buffers: int = 0
    transforms: tuple[str, ...] = ()


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
        fl_lightning.updates.wire.coding.DecodeError: the message has 96 bytes and says it has 97
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


Shape = tuple[int, torch.dtype]


def bytes_up(updates: ClientUpdate | Updates) -> int:
    """Return the length of a client's update as a message; of several, which are alike, of each.

    Of an update with coordinates that its client may not move, the others travel.

    Example:
        >>> update = ClientUpdate(0, torch.zeros(100), torch.zeros(0), 5, 1, {"train/loss": 0.5})
        >>> bytes_up(update)  # 4 bytes a number and 109 for everything else
        509
    """
    updates = Updates.of(updates)
    active = None if updates.active is None else updates.active[0]
    delta = _shape(updates.deltas, active)
    return _dense_size("update", delta, _shape(updates.buffers), tuple(updates.metrics))


def bytes_down(params: Tensor, buffers: Tensor, active: Tensor | None = None) -> int:
    """Return the length of the global model as a message to one client.

    Args:
        params: shape (k,).
        buffers: shape (b,).
        active: which coordinates the client needs, bool, shape (k,); None for all.
    """
    return _dense_size("model", _shape(params, active), _shape(buffers), ())


def _shape(vector: Tensor | LazyDeltas, active: Tensor | None = None) -> Shape:
    size = vector.shape[-1] if active is None else int(active.count_nonzero())
    return size, vector.dtype


@lru_cache(maxsize=256)
def _dense_size(kind: MessageKind, params: Shape, buffers: Shape, metrics: tuple[str, ...]) -> int:
    """Return the size of a message whose vectors have no storage, because none is looked at."""

    def payload(shape: Shape) -> Dense:
        return Dense(torch.empty(shape[0], dtype=shape[1], device="meta"))

    return encoded_size(
        Message(
            kind,
            space="0" * 32,
            round_index=0,
            client_id=0,
            params=payload(params),
            buffers=payload(buffers),
            num_examples=1 if kind == "update" else 0,
            metrics=dict.fromkeys(metrics, 0.0),
        )
    )
