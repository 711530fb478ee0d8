"""What clients and the server tell each other in a secure sum.

    stage      up                    down, to each client that has answered so far
    ADVERTISE  `Advertisement`       `Roster`         public keys
    SHARE      `SealedShares`        `Mailbox`        shares that only their holder can read
    MASK       `MaskedVector`        `Survivors`      only against an active server
    AGREE      `SignedSurvivors`
    REVEAL     `RevealedShares`      `RevealRequest`  before it

Sets are of places, tables go from a place to bytes of a fixed length.

The one binary format of a secure sum's messages, version 2, little-endian.

    "FLSS", u8 version, u8 kind, u32 client (from or to whom), u64 length of the whole message,
    32 bytes identity of the session, fields, u32 CRC-32

A set of places is a map of n bits; a table such a map and the entries in order, each as long as the
session says; a vector is packed. So a message has one encoding only, and its length follows from
how many entries its tables have. Decoding trusts nothing; the checksum is for accidents.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np

from fl_lightning.secure.protocol.keys import KEY_SIZE, SIGNATURE_SIZE, TAG_SIZE
from fl_lightning.secure.protocol.session import Session
from fl_lightning.secure.protocol.shamir import COMMITMENT_SIZE, HASHES_SIZE, SHARE_SIZE
from fl_lightning.secure.ring import RingIntegers
from fl_lightning.updates.wire.coding import DecodeError, Reader, packed_size

Places = frozenset[int]
Table = Mapping[int, bytes]


@dataclass(frozen=True)
class Advertisement:
    """A client's public keys of this round.

    Attributes:
        keys: the key for sealed shares, then the one for pads.
        signature: of them; empty, if the server is trusted to follow the rules.
    """

    keys: bytes
    signature: bytes


@dataclass(frozen=True)
class Roster:
    """Who takes part, and the keys of one's neighbours and oneself.

    Attributes:
        participants: all who advertised.
        keys: as advertised, each with its signature behind it.
    """

    participants: Places
    keys: Table


@dataclass(frozen=True)
class SealedShares:
    """The shares of a client's two secrets, and what binds it to them: see `commitments`.

    Attributes:
        commitment: to its seed.
        boxes: for each neighbour, with the two shares that it holds.
        hashes: of these shares, by holder, oneself among them.
    """

    commitment: bytes
    boxes: Table
    hashes: Table


@dataclass(frozen=True)
class Mailbox:
    """The boxes for one client.

    Attributes:
        sharers: all who have sent shares: whose pads belong into the vectors.
        boxes: by sender.
        hashes: of the shares in the boxes, by sender.
    """

    sharers: Places
    boxes: Table
    hashes: Table


@dataclass(frozen=True, eq=False)
class MaskedVector:
    """A client's vector and its checksum under its pads, integers of the session's ring."""

    values: RingIntegers


@dataclass(frozen=True)
class Survivors:
    """Whose vectors have arrived, to be signed."""

    survivors: Places


@dataclass(frozen=True)
class SignedSurvivors:
    """A client's signature of the survivors that it was told."""

    signature: bytes


@dataclass(frozen=True)
class RevealRequest:
    """Of whom which secret is needed: of none both.

    Attributes:
        survivors: whose own pads must be taken away, for which their seeds are needed.
        dropped: whose pads with others must be taken away, for which their keys are needed.
        signatures: of the survivors, against an active server.
    """

    survivors: Places
    dropped: Places
    signatures: Table


@dataclass(frozen=True)
class RevealedShares:
    """One client's shares of the secrets asked for.

    Attributes:
        seeds: of survivors among its neighbours and itself.
        keys: of neighbours that fell silent.
    """

    seeds: Table
    keys: Table


Upward = Advertisement | SealedShares | MaskedVector | SignedSurvivors | RevealedShares
Downward = Roster | Mailbox | Survivors | RevealRequest
AnyMessage = Upward | Downward


MAGIC = b"FLSS"
VERSION = 2
_HEADER = struct.Struct("<4sBBIQ32s")
_CHECKSUM = struct.Struct("<I")
# fields in order: a set, a vector, or bytes and tables of entries of so many bytes
_SET, _VECTOR, _BYTES, _TABLE = range(4)
_KEYS, _SIGNATURE, _BOX, _SHARE = "keys", "signature", "box", "share"
_COMMITMENT, _HASHES = "commitment", "hashes"
_FORMS: dict[type[Any], tuple[tuple[str, int, str], ...]] = {
    Advertisement: (("keys", _BYTES, _KEYS), ("signature", _BYTES, _SIGNATURE)),
    Roster: (("participants", _SET, ""), ("keys", _TABLE, _KEYS + _SIGNATURE)),
    SealedShares: (
        ("commitment", _BYTES, _COMMITMENT),
        ("boxes", _TABLE, _BOX),
        ("hashes", _TABLE, _HASHES),
    ),
    Mailbox: (("sharers", _SET, ""), ("boxes", _TABLE, _BOX), ("hashes", _TABLE, _HASHES)),
    MaskedVector: (("values", _VECTOR, ""),),
    Survivors: (("survivors", _SET, ""),),
    SignedSurvivors: (("signature", _BYTES, _SIGNATURE),),
    RevealRequest: (
        ("survivors", _SET, ""),
        ("dropped", _SET, ""),
        ("signatures", _TABLE, _SIGNATURE),
    ),
    RevealedShares: (("seeds", _TABLE, _SHARE), ("keys", _TABLE, _SHARE)),
}
_KINDS = list(_FORMS)
OneMessage = TypeVar("OneMessage", bound=AnyMessage)


def encode(session: Session, place: int, message: AnyMessage) -> bytes:
    """Return the message as bytes.

    Args:
        session: to which it belongs.
        place: of the client that sends or receives it.
        message: what is told.

    Example:
        >>> session = Session(run="demo", round_index=0, num_clients=4, size=2, threshold=3)
        >>> hashes = {place: bytes(32) for place in (0, 1, 3)}
        >>> sealed = SealedShares(bytes(32), {0: bytes(82), 3: bytes(82)}, hashes)
        >>> data = encode(session, 1, sealed)
        >>> len(data) == encoded_size(session, SealedShares, 2, 3)
        True
        >>> place, message = decode(session, data, SealedShares)
        >>> place, sorted(message.boxes)
        (1, [0, 3])
    """
    kind = type(message)
    body = b"".join(
        _field_bytes(session, getattr(message, name), form, entry)
        for name, form, entry in _FORMS[kind]
    )
    length = _HEADER.size + len(body) + _CHECKSUM.size
    header = _HEADER.pack(MAGIC, VERSION, _KINDS.index(kind), place, length, session.identity)
    return b"".join((header, body, _CHECKSUM.pack(zlib.crc32(body, zlib.crc32(header)))))


def encoded_size(session: Session, kind: type[AnyMessage], *entries: int) -> int:
    """Return the length of a message in bytes, without one.

    Args:
        session: to which it belongs.
        kind: of the message.
        entries: how many each of its tables has, in order.
    """
    counts = iter(entries)
    size = _HEADER.size + _CHECKSUM.size
    for _, form, entry in _FORMS[kind]:
        if form in (_SET, _TABLE):
            size += packed_size(session.num_clients, 1)
        if form == _VECTOR:
            size += session.ring.packed_size(session.length)
        if form in (_BYTES, _TABLE):
            size += _entry_size(session, entry) * (next(counts) if form == _TABLE else 1)
    return size


def decode(session: Session, data: bytes, kind: type[OneMessage]) -> tuple[int, OneMessage]:
    """Return the place of the client that sent or receives it, and the message.

    Args:
        session: to which it must belong.
        data: from a stranger.
        kind: what it must be.

    Raises:
        DecodeError: if the bytes are not exactly what `encode` returns for such a message.
    """
    reader = Reader(data)
    size = reader.left
    magic, version, found, place, length, identity = reader.fields(_HEADER, "header")
    if magic != MAGIC or version != VERSION:
        raise DecodeError(f"no message of version {VERSION} of a secure sum")
    if length != size:
        raise DecodeError(f"the message has {size} bytes and says it has {length}")
    (checksum,) = _CHECKSUM.unpack_from(data, size - _CHECKSUM.size) if size > 4 else (None,)
    if zlib.crc32(memoryview(data)[: -_CHECKSUM.size]) != checksum:
        raise DecodeError("the checksum is wrong: the message was damaged on its way")
    if identity != session.identity:
        raise DecodeError("the message is of another run, another round or other settings")
    if found >= len(_KINDS) or _KINDS[found] is not kind:
        told = _KINDS[found].__name__ if found < len(_KINDS) else f"an unknown kind, {found},"
        raise DecodeError(f"{told} instead of {kind.__name__}")
    if place >= session.num_clients:
        raise DecodeError(f"place {place} of {session.num_clients} clients")
    fields = [_read_field(session, reader, name, form, e) for name, form, e in _FORMS[kind]]
    if reader.left != _CHECKSUM.size:
        raise DecodeError(f"{reader.left - _CHECKSUM.size} bytes follow the message")
    return place, kind(*fields)


def places_as_bits(session: Session, places: Places) -> bytes:
    """Return a map of n bits, the first in the lowest bit."""
    bits = np.zeros(session.num_clients, np.uint8)
    bits[list(places)] = 1
    return np.packbits(bits, bitorder="little").tobytes()


def _field_bytes(session: Session, value: Any, form: int, entry: str) -> bytes:
    if form == _SET:
        return places_as_bits(session, value)
    if form == _VECTOR:
        return session.ring.pack(value)
    wanted = _entry_size(session, entry)
    entries = [value] if form == _BYTES else [value[place] for place in sorted(value)]
    if any(len(each) != wanted for each in entries):
        raise ValueError(f"an entry for {entry} must have {wanted} bytes")
    table: Mapping[int, bytes] = {} if form == _BYTES else value
    front = b"" if form == _BYTES else places_as_bits(session, frozenset(table))
    return front + b"".join(entries)


def _read_field(session: Session, reader: Reader, name: str, form: int, entry: str) -> Any:
    if form == _SET:
        return _read_places(session, reader, name)
    if form == _VECTOR:
        packed = reader.take(session.ring.packed_size(session.length), name)
        return session.ring.unpack(packed, session.length)
    size = _entry_size(session, entry)
    if form == _BYTES:
        return reader.take(size, name).tobytes()
    places = sorted(_read_places(session, reader, name))
    entries = reader.take(size * len(places), name).tobytes()
    table: Table = {place: entries[at * size :][:size] for at, place in enumerate(places)}
    return table


def _read_places(session: Session, reader: Reader, name: str) -> Places:
    raw = reader.array(packed_size(session.num_clients, 1), name)
    bits = np.unpackbits(raw, bitorder="little")
    if bits[session.num_clients :].any():
        raise DecodeError(f"{name}: places beyond the last client")
    return frozenset(np.flatnonzero(bits).tolist())


def _entry_size(session: Session, entry: str) -> int:
    signature = SIGNATURE_SIZE if session.active else 0
    return {
        _KEYS: 2 * KEY_SIZE,
        _SIGNATURE: signature,
        _KEYS + _SIGNATURE: 2 * KEY_SIZE + signature,
        _BOX: 2 * SHARE_SIZE + TAG_SIZE,
        _SHARE: SHARE_SIZE,
        _COMMITMENT: COMMITMENT_SIZE,
        _HASHES: HASHES_SIZE,
    }[entry]
