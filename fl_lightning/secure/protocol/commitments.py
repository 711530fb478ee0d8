"""What a client is bound to before anybody trusts it: its secrets and their shares, as hashes.

    C = SHA-256("seed", session, u, b_u)        c_v = first 16 bytes of SHA-256("share", session, u, v, share)

The seed b_u is committed to in full; the public key is the commitment to the private one. A share is
of a number that nobody can guess, so that its hash tells nothing of it. 16 bytes are enough for
shares: who finds two shares with one hash can only have another client named, because the secret that
comes out is checked again. The pad of a seed is of the session too: a seed that is used again, by a
client whose randomness repeats, gives another pad.
"""

from __future__ import annotations

import struct
from hashlib import sha256

from fl_lightning.secure.protocol.session import Session
from fl_lightning.secure.protocol.shamir import SHARE_SIZE

COMMITMENT_SIZE = 32
SHARE_HASH_SIZE = 16
HASHES_SIZE = 2 * SHARE_HASH_SIZE  # of the share of a key, then of the seed
_PLACES = struct.Struct("<2I")


def seed_commitment(session: Session, place: int, seed: bytes) -> bytes:
    """Return what a client publishes of its seed, 32 bytes."""
    return _hash("seed", session, place, place, seed)


def seed_pad_key(session: Session, place: int, seed: bytes) -> bytes:
    """Return the key of a client's own pad, 32 bytes."""
    return _hash("own pad", session, place, place, seed)


def share_hash(session: Session, what: str, dealer: int, holder: int, share: bytes) -> bytes:
    """Return what a client publishes of one share.

    Args:
        session: of the secret.
        what: ``"keys"`` or ``"seeds"``, of which it is a share.
        dealer: whose secret it is.
        holder: who is given the share.
        share: `SHARE_SIZE` bytes.
    """
    return _hash(f"share of {what}", session, dealer, holder, share)[:SHARE_HASH_SIZE]


def share_hashes(session: Session, dealer: int, holder: int, shares: bytes) -> bytes:
    """Return what a client publishes of the two shares that one holder gets."""
    parts = (("keys", shares[:SHARE_SIZE]), ("seeds", shares[SHARE_SIZE:]))
    return b"".join(share_hash(session, what, dealer, holder, share) for what, share in parts)


def _hash(what: str, session: Session, dealer: int, holder: int, content: bytes) -> bytes:
    front = b"fl_lightning secure sum, " + what.encode() + b"\0" + session.identity
    return sha256(front + _PLACES.pack(dealer, holder) + content).digest()
