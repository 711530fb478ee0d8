"""Messages between clients and server: an update or a model, encoded as bytes.

A client sends its update, the server sends the global model. Both messages contain the round and a
fingerprint of the space (with its mask); a receiver refuses a message with others than it expects.

As a container (`fl_lightning.core.container`) of the kind ``update`` or ``model``:

    fields     space (fingerprint of space and mask), transforms and metrics (names), and the fields of
               the payloads params and buffers; empty fields are left out
    tensors    numbers (int64: round, client, examples, local steps), metrics (float64), payloads

Every number of a payload must be finite; a metric may be NaN, because it is only displayed.

`bytes_up` and `bytes_down` return the length of the encoded messages without encoding them. For dense
messages it depends only on sizes, dtypes and metric names, which all clients share, so it is cached.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, Literal

import torch
from torch import Tensor

from fl_lightning.core.container import DTYPE_NAMES, read, size_of, write
from fl_lightning.core.plain_json import (
    MessageError,
    check_form,
    check_hex,
    check_whole,
    fields_of,
)
from fl_lightning.core.update import ClientUpdate, Updates
from fl_lightning.updates.payload import Dense, Payload, content_of, read_payload, vector_in

MessageKind = Literal["update", "model"]
_NUMBERS = ("round_index", "client_id", "num_examples", "num_steps")
_PAYLOADS = ("params", "buffers")
_FIELDS = ("space", "transforms", "metrics", *_PAYLOADS)


@dataclass(frozen=True, eq=False)
class Message:
    """A message between client and server: a client's update, or the global model.

    Args:
        kind: ``update`` or ``model``.
        space: fingerprint of the space and its mask, 32 hexadecimal digits.
        round_index: number of the round, ≥ 0.
        client_id: id of the client that sends or receives, ≥ 0.
        params: payload of the delta, or of the model's parameters.
        buffers: payload of the floating-point buffers.
        num_examples: aggregation weight; ≥ 1 in an update, 0 in a model.
        num_steps: number of local steps; 0 in a model.
        metrics: metrics by name, which may be NaN or infinite.
        transforms: names of the transforms of the delta, in order.

    Raises:
        MessageError: if a field is out of range.
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
        check_hex("space", self.space, 32)
        for name in _NUMBERS:
            check_whole(name, getattr(self, name))
        if self.kind == "update" and not self.num_examples:
            raise MessageError("num_examples of an update must be at least 1, got 0")
        if self.kind == "model" and (self.num_examples or self.num_steps):
            raise MessageError("num_examples and num_steps of a model must be 0")

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
        """Build the message that sends a client's update.

        Args:
            update: the client's update.
            space: fingerprint of the space and its mask.
            round_index: number of the round.
            params: payload of the transformed delta; the delta itself if None.
            transforms: names of the transforms, in order.
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
        """Return the client's update that the message holds, with an uncompressed delta.

        Raises:
            ValueError: if the message holds a model.
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


@dataclass(frozen=True, kw_only=True)
class Agreement:
    """Header fields that a receiver expects of a message; a message with other values is refused."""

    kind: MessageKind  # ``update`` or ``model``
    space: str  # fingerprint of the space and its mask
    round_index: int  # number of the round
    # number of values in the payload of the params: `Chain.sent_size` of k
    num_params: int
    num_buffers: int = 0  # number of values in the floating-point buffers
    transforms: tuple[str, ...] = ()  # names of the transforms of a delta, in order


def encoded_size(message: Message) -> int:
    """Return the length of the encoded message in bytes, without encoding it."""
    fields, tensors = _content(message)
    forms = {n: (DTYPE_NAMES[each.dtype], tuple(each.shape)) for n, each in tensors.items()}
    return size_of(message.kind, fields, forms)


def encode(message: Message) -> bytes:
    """Encode a message as bytes.

    Raises:
        MessageError: if a payload cannot be sent, e.g. because a number is not finite.

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
        fl_lightning.core.plain_json.MessageError: the checksum differs: bytes changed on the way
    """
    return write(message.kind, *_content(message))


def decode(data: bytes | bytearray | memoryview, agreement: Agreement) -> Message:
    """Decode a message.

    Args:
        data: bytes from an untrusted sender.
        agreement: expected properties of the message.

    Raises:
        MessageError: if `encode` cannot have returned these bytes, or if the message's kind, space,
            round, sizes or transforms differ from the expected ones.
    """
    fields, tensors = read(data, agreement.kind)
    given = fields_of(fields, tuple(n for n in _FIELDS if n == "space" or n in fields), "a message")
    _check("space", given["space"], agreement.space)
    _check("transforms", given.get("transforms", []), list(agreement.transforms))
    numbers = vector_in(tensors, "numbers", torch.int64).tolist()
    if len(numbers) != len(_NUMBERS):
        raise MessageError(f"numbers must be {len(_NUMBERS)}, got {len(numbers)}")
    about = dict(zip(_NUMBERS, numbers, strict=True))
    _check("round", about["round_index"], agreement.round_index)
    metrics: dict[str, Tensor | float] = {}
    if type(names := given.get("metrics", [])) is list and names:
        values = vector_in(tensors, "metrics", torch.float64).tolist()
        metrics = dict(zip(map(str, names), values, strict=False))
    message = Message(
        kind=agreement.kind,
        space=agreement.space,
        params=read_payload("params", given.get("params"), tensors, agreement.num_params),
        buffers=read_payload("buffers", given.get("buffers"), tensors, agreement.num_buffers),
        metrics=metrics,
        transforms=agreement.transforms,
        **about,
    )
    written = _content(message)
    check_form(written[0], fields)
    if not _are_equal(written[1], tensors):  # e.g. bits behind the last code, a tensor too many
        raise MessageError("the message's tensors are not in canonical form")
    return message


def _content(message: Message) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Return a message's non-empty header fields, and its tensors by name."""
    numbers = [getattr(message, name) for name in _NUMBERS]
    tensors = {"numbers": torch.tensor(numbers, dtype=torch.int64)}
    if message.metrics:
        metrics = [float(value) for value in message.metrics.values()]
        tensors["metrics"] = torch.tensor(metrics, dtype=torch.float64)
    fields: dict[str, Any] = {
        "space": message.space,
        "transforms": list(message.transforms),
        "metrics": list(message.metrics),
    }
    for name in _PAYLOADS:
        fields[name], own = content_of(name, getattr(message, name))
        tensors |= own
    return {name: value for name, value in fields.items() if value}, tensors


def _are_equal(some: Mapping[str, Tensor], others: Mapping[str, Tensor]) -> bool:
    """Return whether two dicts of tensors are bit-identical, also where values are NaN."""
    return some.keys() == others.keys() and all(
        tensor is others[name]
        or (
            (tensor.dtype, tensor.shape) == (others[name].dtype, others[name].shape)
            and torch.equal(tensor.view(torch.uint8), others[name].view(torch.uint8))
        )
        for name, tensor in some.items()
    )


def _check(what: str, found: object, agreed: object) -> None:
    if found != agreed:
        raise MessageError(f"{what} {found!r} instead of {agreed!r}")


Shape = tuple[int, torch.dtype]


def bytes_up(updates: ClientUpdate | Updates) -> int:
    """Return the length in bytes of one client's uncompressed update message; in `Updates` all have the same.

    Coordinates that a client's own mask freezes are not sent.

    Example:
        >>> update = ClientUpdate(0, torch.zeros(100), torch.zeros(0), 5, 1, {"train/loss": 0.5})
        >>> bytes_up(update)  # 4 bytes for each number and 424 for the rest
        824
    """
    if isinstance(updates, Updates):
        deltas, active = updates.deltas, updates.active[0] if updates.active else None
    else:
        deltas, active = updates.delta, updates.active
    size = deltas.shape[-1] if active is None else int(active.count_nonzero())
    buffers = updates.buffers.shape[-1], updates.buffers.dtype
    return _dense_size("update", (size, deltas.dtype), buffers, tuple(updates.metrics))


def bytes_down(params: Tensor, buffers: Tensor, active: Tensor | None = None) -> int:
    """Return the length in bytes of the uncompressed message that sends the global model to a client.

    Args:
        params: parameters, shape (k,).
        buffers: floating-point buffers, shape (b,).
        active: True for coordinates that are sent, bool, shape (k,); None for all.
    """
    size = params.shape[-1] if active is None else int(active.count_nonzero())
    return _dense_size("model", (size, params.dtype), (buffers.shape[-1], buffers.dtype), ())


@lru_cache(maxsize=256)
def _dense_size(kind: MessageKind, params: Shape, buffers: Shape, metrics: tuple[str, ...]) -> int:
    """Return the length of an uncompressed message in bytes, without allocating its vectors."""

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
