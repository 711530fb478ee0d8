"""What clients and the server tell each other in a secure sum.

    stage      up                    down, to each client that has answered so far
    ADVERTISE  `Advertisement`       `Roster`         public keys
    SHARE      `SealedShares`        `Mailbox`        shares that only their holder can read
    MASK       `MaskedVector`        `Survivors`      only against an active server
    AGREE      `SignedSurvivors`
    REVEAL     `RevealedShares`      `RevealRequest`  before it

Sets are of places, tables go from a place to bytes of a fixed length.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from fl_lightning.secure.ring import RingIntegers

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
