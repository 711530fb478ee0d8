"""Keys, sealed boxes, signatures and pads of a secure sum.

    secret(u, v, purpose) = HKDF-SHA256(X25519(a_u, A_v), info = purpose, session, u, v, A_u, A_v)

The session's identity depends on run, round and all settings, so that no key is valid in another round
or another protocol. Sources: RFC 7748 (X25519), RFC 5869 (HKDF), RFC 8439 (ChaCha20-Poly1305),
RFC 8032 (Ed25519).

Signatures: a server cannot invent clients, or send different sets to clients. All clients know all public
signing keys beforehand, from a source other than the server.

Pads: one-time keys as long as the vector, made from 32 bytes by ChaCha20.

    pad(key) = keystream of ChaCha20(key, nonce 0, counter 0, 1, …), as integers modulo R

R is a power of two that divides the modulus of the dtype, so that a pad is exactly uniform if the
keystream is. Source: RFC 8439, section 2.4. A key is used for one pad of one round: it comes from a
key agreement whose context has the run, the round and the pair.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from cryptography.exceptions import InvalidSignature, InvalidTag
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms
from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from fl_lightning.secure.protocol.session import Session
from fl_lightning.secure.ring import Ring, RingIntegers

KEY_SIZE = 32
TAG_SIZE = 16
SIGNATURE_SIZE = 64
_PAIR = struct.Struct("<2I")
_NONCE = bytes(12)  # each key of a box is used for one box only


class ForgedError(ValueError):
    """Raised if encrypted shares or a signature are not from the client that they are said to be from."""


@dataclass(frozen=True)
class AgreementKey:
    """A client's key pair for key agreement (X25519).

    Args:
        private: 32 bytes, any.

    Example:
        >>> one, two = AgreementKey(b"1" * 32), AgreementKey(b"2" * 32)
        >>> ours = one.secret_with(two.public, "pads", b"run 1, round 1", me=0, peer=1)
        >>> ours == two.secret_with(one.public, "pads", b"run 1, round 1", me=1, peer=0)
        True
        >>> ours == two.secret_with(one.public, "pads", b"run 1, round 2", me=1, peer=0)
        False
    """

    private: bytes

    def __repr__(self) -> str:
        return f"AgreementKey(public={self.public.hex()})"

    @cached_property
    def public(self) -> bytes:
        """Public half of the key, 32 bytes."""
        return self._own.public_key().public_bytes_raw()

    @cached_property
    def _own(self) -> X25519PrivateKey:
        return X25519PrivateKey.from_private_bytes(self.private)

    def secret_with(
        self, public: bytes, purpose: str, context: bytes, *, me: int, peer: int
    ) -> bytes:
        """Return a secret of 32 bytes that only this client and one other client can compute.

        Args:
            public: public key of the peer.
            purpose: purpose of the secret.
            context: identity of the session.
            me: place of this party.
            peer: place of the peer.

        Raises:
            ValueError: if the peer's key is of low order, with which everybody knows the secret.
        """
        try:
            shared = self._own.exchange(X25519PublicKey.from_public_bytes(public))
        except ValueError:
            raise ValueError(f"the public key of client {peer} is of low order") from None
        places = sorted(((me, self.public), (peer, public)))
        pair = _PAIR.pack(places[0][0], places[1][0]) + places[0][1] + places[1][1]
        info = b"fl_lightning secure sum, " + purpose.encode() + b"\0" + context + pair
        return HKDF(algorithm=SHA256(), length=KEY_SIZE, salt=None, info=info).derive(shared)


def seal(key: bytes, content: bytes, context: bytes, *, sender: int, receiver: int) -> bytes:
    """Encrypt and authenticate content for one receiver; the result is `TAG_SIZE` bytes longer.

    A pair has one key, from which a key for each direction is derived.

    Example:
        >>> box = seal(b"k" * 32, b"a share", b"round 1", sender=0, receiver=1)
        >>> unseal(b"k" * 32, box, b"round 1", sender=0, receiver=1)
        b'a share'
        >>> unseal(b"k" * 32, box, b"round 1", sender=1, receiver=0)
        Traceback (most recent call last):
        ...
        fl_lightning.secure.protocol.keys.ForgedError: the box from client 1 to client 0 is forged, or one \
of them was told other keys of the other
    """
    pair = _PAIR.pack(sender, receiver)
    return ChaCha20Poly1305(_direction(key, pair)).encrypt(_NONCE, content, context + pair)


def unseal(key: bytes, box: bytes, context: bytes, *, sender: int, receiver: int) -> bytes:
    """Verify and decrypt content that `seal` has encrypted.

    Raises:
        ForgedError: if this sender has not sealed the box for this receiver in this session.
    """
    pair = _PAIR.pack(sender, receiver)
    try:
        return ChaCha20Poly1305(_direction(key, pair)).decrypt(_NONCE, box, context + pair)
    except InvalidTag:
        raise ForgedError(
            f"the box from client {sender} to client {receiver} is forged, or one of them was told "
            "other keys of the other"
        ) from None


def _direction(key: bytes, pair: bytes) -> bytes:
    return HKDF(algorithm=SHA256(), length=KEY_SIZE, salt=None, info=b"box" + pair).derive(key)


class Signatures:
    """Makes and verifies the signatures of a secure sum; all are empty if the session is not active.

    Args:
        session: session of the messages.
        directory: public keys (Ed25519) of all clients by place, 32 bytes each; needed in an active session.
        own: private key of a client, needed there as well; None at the server.

    Raises:
        ValueError: if the session is active and has no directory.

    Example:
        >>> own = Ed25519PrivateKey.from_private_bytes(b"k" * 32)
        >>> session = Session(run="demo", round_index=0, num_clients=4, size=1, threshold=3, active=True)
        >>> signatures = Signatures(session, {2: own.public_key().public_bytes_raw()}, own)
        >>> signature = signatures.sign("keys", 2, b"content")
        >>> signatures.check("keys", 2, b"content", signature)
        >>> signatures.check("keys", 2, b"another", signature)
        Traceback (most recent call last):
        ...
        fl_lightning.secure.protocol.keys.ForgedError: the signature of client 2's keys is wrong
    """

    def __init__(
        self,
        session: Session,
        directory: Mapping[int, bytes] | None,
        own: Ed25519PrivateKey | None = None,
    ) -> None:
        if session.active and directory is None:
            raise ValueError("active: true needs directory, by which clients recognise each other")
        self._session, self._directory, self._own = session, directory or {}, own

    def sign(self, what: str, place: int, content: bytes) -> bytes:
        """Return a signature of content for one use, 64 bytes; empty if the session is not active."""
        if not self._session.active or self._own is None:
            return b""
        return self._own.sign(self._signed(what, place, content))

    def check(self, what: str, place: int, content: bytes, signature: bytes) -> None:
        """Raise ForgedError if the client at a place has not made this signature of content for this use."""
        if not self._session.active:
            return
        try:
            key = Ed25519PublicKey.from_public_bytes(self._directory.get(place, b""))
            key.verify(signature, self._signed(what, place, content))
        except (InvalidSignature, ValueError):
            raise ForgedError(f"the signature of client {place}'s {what} is wrong") from None

    def _signed(self, what: str, place: int, content: bytes) -> bytes:
        """Return the bytes to sign: content, its use, the session's identity and the client's place."""
        use = b"fl_lightning " + what.encode() + b"\0"
        return use + self._session.identity + b"\0" + place.to_bytes(4, "little") + content


CHUNK = 1 << 16  # bytes at a time, which fit into the cache
_ZEROS = bytes(CHUNK)


def add_pad(total: RingIntegers, key: bytes, ring: Ring, *, subtract: bool = False) -> None:
    """Add to integers the one-time pad made from a key, in place; the caller reduces them by `Ring.reduced`.

    Args:
        total: integers of the ring's dtype, shape (k,).
        key: 32 bytes.
        ring: ring of the integers.
        subtract: subtract the pad instead.

    Example:
        >>> total = np.zeros(3, np.uint8)
        >>> add_pad(total, bytes(32), Ring(8))  # RFC 8439, appendix A.1, test vector 1
        >>> total
        array([118, 184, 224], dtype=uint8)
    """
    keystream = Cipher(algorithms.ChaCha20(key, bytes(16)), mode=None).encryptor()
    buffer = bytearray(CHUNK)
    step = CHUNK // ring.dtype.itemsize
    pad = np.frombuffer(buffer, ring.dtype)
    combine = np.subtract if subtract else np.add
    for start in range(0, len(total), step):
        part = total[start : start + step]
        size = part.nbytes
        keystream.update_into(_ZEROS[:size] if size < CHUNK else _ZEROS, buffer)
        combine(part, pad[: len(part)], out=part)
