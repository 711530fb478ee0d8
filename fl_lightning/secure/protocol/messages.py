"""Messages between clients and server in a secure sum.

    stage      up                    down, to each client that has answered so far
    ADVERTISE  `Advertisement`       `Roster`         public keys
    SHARE      `SealedShares`        `Mailbox`        shares that only their holder can read
    MASK       `MaskedVector`        `Survivors`      only against an active server
    AGREE      `SignedSurvivors`
    REVEAL     `RevealedShares`      `RevealRequest`  before it

Sets contain places; tables map places to bytes of a fixed length.

A message is a container (`fl_lightning.core.container`) whose kind is the class below and whose only field
is the identity of the session. The tensor ``client`` is the place of the client that sends or receives. A set
is a map of n bits; a table is such a map, ``<name>.places``, and the entries in order, of a length that the
session defines; a vector is packed. So the numbers of table entries determine the length of a message.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from fl_lightning.core.container import Form, as_tensor, bytes_of, form_of, read, size_of, write
from fl_lightning.core.plain_json import MessageError
from fl_lightning.secure.protocol.keys import KEY_SIZE, SIGNATURE_SIZE, TAG_SIZE
from fl_lightning.secure.protocol.session import Session
from fl_lightning.secure.protocol.shamir import COMMITMENT_SIZE, HASHES_SIZE, SHARE_SIZE
from fl_lightning.secure.ring import RingIntegers
from fl_lightning.updates.coding import packed_size

Places = frozenset[int]
Table = Mapping[int, bytes]


@dataclass(frozen=True)
class Advertisement:
    """A client's first message: its public keys for this round.

    Attributes:
        keys: public key for sealed shares, then public key for pads.
        signature: signature of the keys; empty unless the session is active.
    """

    keys: bytes
    signature: bytes


@dataclass(frozen=True)
class Roster:
    """The server's answer to public keys: who takes part, and the keys of the receiver and its neighbours.

    Attributes:
        participants: places of all clients that have advertised.
        keys: advertised keys, each followed by its signature.
    """

    participants: Places
    keys: Table


@dataclass(frozen=True)
class SealedShares:
    """A client's message with encrypted shares of its two secrets, and commitments to secrets and shares.

    Attributes:
        commitment: commitment to the seed.
        boxes: encrypted pair of shares for each neighbour.
        hashes: hashes of both shares, by holder, the client itself included.
    """

    commitment: bytes
    boxes: Table
    hashes: Table


@dataclass(frozen=True)
class Mailbox:
    """The server's message that passes other clients' encrypted shares on to one client.

    Attributes:
        sharers: places of all clients that have sent shares; their pads are in the vectors.
        boxes: boxes by sender.
        hashes: hashes of the shares in the boxes, by sender.
    """

    sharers: Places
    boxes: Table
    hashes: Table


@dataclass(frozen=True, eq=False)
class MaskedVector:
    """A client's message with its vector and checksum, hidden by pads: integers of the session's ring."""

    values: RingIntegers


@dataclass(frozen=True)
class Survivors:
    """The server's message that names the clients whose vectors have arrived; the receiver signs this list."""

    survivors: Places


@dataclass(frozen=True)
class SignedSurvivors:
    """A client's signature of the list of survivors, the clients whose vectors have arrived."""

    signature: bytes


@dataclass(frozen=True)
class RevealRequest:
    """The server's request for shares of one secret per client: of a survivor's seed, or of a dropped client's key.

    Attributes:
        survivors: clients whose seeds are requested, to remove their own pads.
        dropped: clients whose keys are requested, to remove their pads with other clients.
        signatures: signatures of the survivors in an active session.
    """

    survivors: Places
    dropped: Places
    signatures: Table


@dataclass(frozen=True)
class RevealedShares:
    """A client's answer to `RevealRequest`: its shares of the requested secrets.

    Attributes:
        seeds: shares of the seeds of survivors among its neighbours, and of its own.
        keys: shares of the keys of neighbours that have dropped out.
    """

    seeds: Table
    keys: Table


Upward = Advertisement | SealedShares | MaskedVector | SignedSurvivors | RevealedShares
Downward = Roster | Mailbox | Survivors | RevealRequest
AnyMessage = Upward | Downward


# fields in order: a set, a vector, bytes, or a table; bytes and table entries name their length
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
OneMessage = TypeVar("OneMessage", bound=AnyMessage)


def encode(session: Session, place: int, message: AnyMessage) -> bytes:
    """Return a message of the protocol as bytes.

    Args:
        session: session of the message.
        place: place of the client that sends or receives the message.
        message: the message.

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
    tensors = {"client": torch.tensor(place)}
    for name, form, entry in _FORMS[type(message)]:
        tensors |= _tensors_of(session, name, getattr(message, name), form, entry)
    return write(type(message).__name__, _fields(session), tensors)


def encoded_size(session: Session, kind: type[AnyMessage], *entries: int) -> int:
    """Return the length of a message in bytes, from the number of entries of its tables.

    Args:
        session: session of the message.
        kind: class of the message.
        entries: number of entries of each table, in order.
    """
    return _size(kind.__name__, tuple(_forms(session, kind, entries).items()))


def decode(session: Session, data: bytes, kind: type[OneMessage]) -> tuple[int, OneMessage]:
    """Decode a message; return the place of the client that sends or receives it, and the message.

    Args:
        session: session to which the message must belong.
        data: untrusted bytes.
        kind: class that the message must have.

    Raises:
        MessageError: if the bytes are not exactly what `encode` returns for such a message.
    """
    fields, tensors = read(data, kind.__name__)
    if fields != _fields(session):
        raise MessageError("the message is of another run, another round or other settings")
    found = {name: form_of(name, tensor) for name, tensor in tensors.items()}
    tables = [name for name, form, _ in _FORMS[kind] if form == _TABLE]
    counts = tuple(found.get(name, ("", (0,)))[1][:1] for name in tables)
    if found != _forms(session, kind, tuple(sum(each) for each in counts)):
        raise MessageError(f"the fields of a {kind.__name__} are not those of this session")
    place = int(tensors["client"])
    if not 0 <= place < session.num_clients:
        raise MessageError(f"place {place} of {session.num_clients} clients")
    return place, kind(*(_read_field(session, tensors, n, form) for n, form, _ in _FORMS[kind]))


def _fields(session: Session) -> dict[str, str]:
    return {"session": session.identity.hex()}


def _forms(session: Session, kind: type[Any], entries: Sequence[int]) -> dict[str, Form]:
    """Return the dtype and shape of each tensor of a message, from the number of entries of its tables."""
    counts = iter(entries)
    places: Form = ("U8", (packed_size(session.num_clients, 1),))
    forms: dict[str, Form] = {"client": ("I64", ())}
    for name, form, entry in _FORMS[kind]:
        if form == _SET:
            forms[name] = places
        elif form == _VECTOR:
            forms[name] = ("U8", (session.ring.packed_size(session.length),))
        elif form == _BYTES:
            forms[name] = ("U8", (_entry_size(session, entry),))
        else:
            forms[f"{name}.places"] = places
            forms[name] = ("U8", (next(counts), _entry_size(session, entry)))
    return forms


@lru_cache(maxsize=1024)
def _size(kind: str, forms: tuple[tuple[str, Form], ...]) -> int:
    """Return the length in bytes of a message whose tensors have these dtypes and shapes."""
    return size_of(kind, {"session": "0" * 64}, dict(forms))


def places_as_bits(session: Session, places: Places) -> bytes:
    """Return a set of clients' places as bytes of n bits, the first place in the lowest bit."""
    bits = np.zeros(session.num_clients, np.uint8)
    bits[list(places)] = 1
    return np.packbits(bits, bitorder="little").tobytes()


def _tensors_of(
    session: Session, name: str, value: Any, form: int, entry: str
) -> dict[str, Tensor]:
    if form == _SET:
        return {name: as_tensor(places_as_bits(session, value))}
    if form == _VECTOR:
        return {name: as_tensor(session.ring.pack(value))}
    wanted = _entry_size(session, entry)
    entries = [value] if form == _BYTES else [value[place] for place in sorted(value)]
    if any(len(each) != wanted for each in entries):
        raise ValueError(f"an entry for {entry} must have {wanted} bytes")
    content = as_tensor(b"".join(entries))
    if form == _BYTES:
        return {name: content}
    places = as_tensor(places_as_bits(session, frozenset(value)))
    return {f"{name}.places": places, name: content.reshape(len(entries), wanted)}


def _read_field(session: Session, tensors: Mapping[str, Tensor], name: str, form: int) -> Any:
    """Decode one field of a message from its tensors, whose shapes were checked."""
    if form == _SET:
        return _read_places(session, tensors[name], name)
    if form == _VECTOR:
        return session.ring.unpack(bytes_of(tensors[name]), session.length)
    if form == _BYTES:
        return bytes_of(tensors[name])
    places = sorted(_read_places(session, tensors[f"{name}.places"], name))
    if len(places) != len(tensors[name]):
        raise MessageError(
            f"{name} has {len(tensors[name])} entries, but must have one for each of {len(places)} clients"
        )
    table: Table = {
        place: bytes_of(each) for place, each in zip(places, tensors[name], strict=True)
    }
    return table


def _read_places(session: Session, raw: Tensor, name: str) -> Places:
    bits = np.unpackbits(raw.numpy(), bitorder="little")
    if bits[session.num_clients :].any():
        raise MessageError(f"{name}: places beyond the last client")
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
