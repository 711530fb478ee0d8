"""Who signs what in a session, so that a server cannot invent clients or tell them different sets.

Everyone's public signing key is known to everyone beforehand, from a source other than the server.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from fl_lightning.secure.protocol.keys import check_signature
from fl_lightning.secure.protocol.session import Session


@dataclass(frozen=True)
class Directory:
    """The public signing keys of all clients.

    Args:
        keys: by place, 32 bytes each.

    Example:
        >>> from fl_lightning.secure.protocol.keys import SigningKey
        >>> key = SigningKey(b"k" * 32)
        >>> session = Session(run="demo", round_index=0, num_clients=4, size=1, threshold=3)
        >>> directory = Directory({2: key.public})
        >>> signature = key.sign(signed_content(session, "keys", 2, b"content"))
        >>> directory.check(session, "keys", 2, b"content", signature)
        >>> directory.check(session, "keys", 2, b"another", signature)
        Traceback (most recent call last):
        ...
        fl_lightning.secure.protocol.keys.ForgedError: the signature of client 2's keys is wrong
    """

    keys: Mapping[int, bytes]

    def check(
        self, session: Session, what: str, place: int, content: bytes, signature: bytes
    ) -> None:
        """Raise ForgedError if the client at this place has not signed this content as such."""
        signed = signed_content(session, what, place, content)
        check_signature(self.keys.get(place, b""), signature, signed, f"client {place}'s {what}")


def signed_content(session: Session, what: str, place: int, content: bytes) -> bytes:
    """Return the bytes under a signature, which fits nowhere else."""
    return (
        b"fl_lightning "
        + what.encode()
        + b"\0"
        + session.identity
        + bytes([0])
        + (place.to_bytes(4, "little") + content)
    )
