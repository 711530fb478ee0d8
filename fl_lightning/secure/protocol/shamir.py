"""Shamir's secret sharing: t of n shares determine the secret, t - 1 reveal nothing of it.

    share_x = s + a_1 x + … + a_{t-1} x^{t-1}  mod p        s = Σ_x share_x Π_{z≠x} z / (z - x)  mod p

p = 2^256 + 297 is the smallest prime above all secrets of 32 bytes; a share has 33 bytes. Source: Shamir
1979, *How to share a secret*. The time of operations on Python's integers depends on their values: there is no
protection from an attacker who can measure single operations on the client.

Clients commit to their secrets and shares by hashes:

    C = SHA-256("seed", session, u, b_u)        c_v = first 16 bytes of SHA-256("share", session, u, v, share)

The public key is the commitment to the private key. Nobody can guess a share, so its hash reveals nothing. 16
bytes are enough for shares: a client that finds two shares with one hash can only cause another client to be
blamed, because the reconstructed secret is checked again. The pad of a seed depends on the session, so that a
repeated seed, of a client whose randomness repeats, gives another pad.
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
    """Split a secret into a share for each place: ``threshold`` shares determine it, fewer reveal nothing.

    Args:
        secret: 32 bytes.
        places: points at which the polynomial is evaluated, distinct and ≥ 1.
        threshold: t ≥ 1, the number of shares that determine the secret.
        entropy: source of the coefficients.

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
    """Reconstruct a secret from at least ``threshold`` shares.

    Args:
        shares: shares by place, at least ``threshold``.
        threshold: t.

    Raises:
        ValueError: if there are fewer shares, if the first t and the last t give different secrets, or if
            the result is no secret. With exactly t shares, a false one is not found.
    """
    if len(shares) < threshold:
        raise ValueError(
            f"{len(shares)} shares of the {threshold} needed to reconstruct the secret"
        )
    places = tuple(sorted(shares))
    secret = _at_zero(shares, places[:threshold])
    # with fewer than 2t shares, the first t and the last t together contain every share
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
HASHES_SIZE = 2 * SHARE_HASH_SIZE  # hash of the share of the key, then of the seed
_PLACES = struct.Struct("<2I")


def seed_commitment(session: Session, place: int, seed: bytes) -> bytes:
    """Return the hash by which a client commits to the seed of its own pad, 32 bytes."""
    return _hash("seed", session, place, place, seed)


def seed_pad_key(session: Session, place: int, seed: bytes) -> bytes:
    """Return the key of a client's own pad, derived from the client's seed, 32 bytes."""
    return _hash("own pad", session, place, place, seed)


def share_hash(session: Session, what: str, dealer: int, holder: int, share: bytes) -> bytes:
    """Return the hash of one share of a secret, which the client with the secret (the dealer) publishes.

    Args:
        session: session of the secret.
        what: kind of the secret, ``"keys"`` or ``"seeds"``.
        dealer: place of the client with the secret.
        holder: place of the client that gets the share.
        share: `SHARE_SIZE` bytes.
    """
    return _hash(f"share of {what}", session, dealer, holder, share)[:SHARE_HASH_SIZE]


def share_hashes(session: Session, dealer: int, holder: int, shares: bytes) -> bytes:
    """Return the hashes of the two shares, of key and of seed, that one client (the dealer) gives to another."""
    parts = (("keys", shares[:SHARE_SIZE]), ("seeds", shares[SHARE_SIZE:]))
    return b"".join(share_hash(session, what, dealer, holder, share) for what, share in parts)


def _hash(what: str, session: Session, dealer: int, holder: int, content: bytes) -> bytes:
    front = b"fl_lightning secure sum, " + what.encode() + b"\0" + session.identity
    return sha256(front + _PLACES.pack(dealer, holder) + content).digest()
