"""Shamir's secret sharing: t of n shares tell the secret, t - 1 tell nothing.

    share_x = s + a_1 x + … + a_{t-1} x^{t-1}  mod p        s = Σ_x share_x Π_{z≠x} z / (z - x)  mod p

p = 2^256 + 297 is the smallest prime that holds every secret of 32 bytes in one piece; a share has
33 bytes. Source: Shamir 1979, *How to share a secret*. Python's integers take a time that depends
on their values: an attacker who can measure single operations on the client is not kept out.

What a client is bound to before anybody trusts it: its secrets and their shares, as hashes.

    C = SHA-256("seed", session, u, b_u)        c_v = first 16 bytes of SHA-256("share", session, u, v, share)

The seed b_u is committed to in full; the public key is the commitment to the private one. A share is
of a number that nobody can guess, so that its hash tells nothing of it. 16 bytes are enough for
shares: who finds two shares with one hash can only have another client named, because the secret that
comes out is checked again. The pad of a seed is of the session too: a seed that is used again, by a
client whose randomness repeats, gives another pad.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Mapping
from functools import lru_cache
from hashlib import sha256

from fl_lightning.secure.entropy import Entropy
from fl_lightning.secure.protocol.session import Session

PRIME = 2**256 + 297
SECRET_SIZE = 32
SHARE_SIZE = 33


def split(secret: bytes, places: Iterable[int], threshold: int, entropy: Entropy) -> dict[int, int]:
    """Return a share for each place.

    Args:
        secret: 32 bytes.
        places: where the polynomial is evaluated, distinct and ≥ 1.
        threshold: t ≥ 1, how many shares tell the secret.
        entropy: of the coefficients.

    Raises:
        ValueError: if there are fewer places than ``threshold``, or a place is outside its range.

    Example:
        >>> from fl_lightning.secure.entropy import system_entropy
        >>> shares = split(b"s" * 32, range(1, 6), threshold=3, entropy=system_entropy)
        >>> del shares[2], shares[4]
        >>> combine(shares, threshold=3)
        b'ssssssssssssssssssssssssssssssss'
    """
    places = list(places)
    if len(secret) != SECRET_SIZE:
        raise ValueError(f"secret must have {SECRET_SIZE} bytes, got {len(secret)}")
    if len(set(places)) < len(places) or not all(1 <= place < PRIME for place in places):
        raise ValueError("places must be distinct and from 1 on: at 0 stands the secret")
    if not 1 <= threshold <= len(places):
        raise ValueError(
            f"threshold must be from 1 to the number of shares, {len(places)}, got {threshold}"
        )
    # 64 bytes modulo p: within 2^-255 of uniform
    coefficients = [int.from_bytes(entropy(64), "little") % PRIME for _ in range(threshold - 1)]
    coefficients.append(int.from_bytes(secret, "little"))  # of the power 0, evaluated last
    return {place: _evaluated(coefficients, place) for place in places}


def combine(shares: Mapping[int, int], threshold: int) -> bytes:
    """Return the secret.

    Args:
        shares: by place, at least ``threshold``.
        threshold: t.

    Raises:
        ValueError: if there are fewer shares, or if the first t and the last t tell different
            secrets, or a number that is none. Exactly t shares hide a false one.
    """
    if len(shares) < threshold:
        raise ValueError(f"{len(shares)} shares of the {threshold} that tell the secret")
    places = tuple(sorted(shares))
    secret = _at_zero(shares, places[:threshold])
    # the last t are others where there are more: below 2t shares, every one is looked at
    if secret >> 8 * SECRET_SIZE or _at_zero(shares, places[-threshold:]) != secret:
        raise ValueError("the shares do not belong together: at least one is false")
    return secret.to_bytes(SECRET_SIZE, "little")


def _evaluated(coefficients: list[int], place: int) -> int:
    value = 0
    for coefficient in coefficients:  # the highest power's first
        value = (value * place + coefficient) % PRIME
    return value


def _at_zero(shares: Mapping[int, int], places: tuple[int, ...]) -> int:
    factors = _lagrange(places)
    return (
        sum(shares[place] * factor for place, factor in zip(places, factors, strict=True)) % PRIME
    )


@lru_cache(maxsize=4096)
def _lagrange(places: tuple[int, ...]) -> tuple[int, ...]:
    factors = []
    for place in places:
        above = below = 1
        for other in places:
            if other != place:
                above = above * other % PRIME
                below = below * (other - place) % PRIME
        factors.append(above * pow(below, -1, PRIME) % PRIME)
    return tuple(factors)


COMMITMENT_SIZE = 32
SHARE_HASH_SIZE = 16
HASHES_SIZE = 2 * SHARE_HASH_SIZE  # of the share of a key, then of the seed
_PLACES = struct.Struct("<2I")


def seed_commitment(session: Session, place: int, seed: bytes) -> bytes:
    """Commitment to a client's seed, which it publishes, 32 bytes."""
    return _hash("seed", session, place, place, seed)


def seed_pad_key(session: Session, place: int, seed: bytes) -> bytes:
    """Return the key of a client's own pad, 32 bytes."""
    return _hash("own pad", session, place, place, seed)


def share_hash(session: Session, what: str, dealer: int, holder: int, share: bytes) -> bytes:
    """Return the hash of one secret share, which its dealer publishes.

    Args:
        session: of the secret.
        what: ``"keys"`` or ``"seeds"``, of which it is a share.
        dealer: whose secret it is.
        holder: who is given the share.
        share: `SHARE_SIZE` bytes.
    """
    return _hash(f"share of {what}", session, dealer, holder, share)[:SHARE_HASH_SIZE]


def share_hashes(session: Session, dealer: int, holder: int, shares: bytes) -> bytes:
    """Hashes of the two shares that one holder gets, which their dealer publishes."""
    parts = (("keys", shares[:SHARE_SIZE]), ("seeds", shares[SHARE_SIZE:]))
    return b"".join(share_hash(session, what, dealer, holder, share) for what, share in parts)


def _hash(what: str, session: Session, dealer: int, holder: int, content: bytes) -> bytes:
    front = b"fl_lightning secure sum, " + what.encode() + b"\0" + session.identity
    return sha256(front + _PLACES.pack(dealer, holder) + content).digest()
