"""Ciphertexts of CKKS as numbers, which are added without TenSEAL and without a key.

    c = (c0, c1), two polynomials of N coefficients modulo each of P primes; sums of ciphertexts are sums of these

The server that adds them has no key, and parses nothing with a library. The form is that of SEAL 4 in TenSEAL:
polynomial by polynomial, prime by prime.

Tags of ciphertexts add up as well, and show that a sum is that of all named senders and of nothing else:

    t_i = Σ_j r_j c_ij + b_i  modulo each prime        Σ_i t_i = Σ_j r_j (Σ_i c_ij) + Σ_i b_i

r and the pads b_i are derived from a key that the server does not have, b_i also from the sender. A server that
adds, omits or changes a ciphertext has to guess the tags: r has 24 bits and there are four tags, so one change in
2^96 passes. Source: Agrawal and Boneh 2009 (ACNS), homomorphic MACs, section 4.
Differs: r is short, so that products fit into 64 bits, and there are several tags for that.

Parameters of CKKS must be safe, and large enough for a sum:

    log2 Q = Σ coefficient bits ≤ the most that N carries at 128 bits of security

Ciphertexts are not multiplied, so their modulus has to hold only the sum and the scale. A larger scale means a
smaller error of CKKS, and less noise to hide it, see `flooded`.

Source of the limits: the Homomorphic Encryption Security Standard (Albrecht et al. 2018), table 1,
classical attackers, ternary secrets. Scheme: Cheon, Kim, Kim, Song 2017 (ASIACRYPT).
"""

from __future__ import annotations

import hmac
import struct
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt

from fl_lightning.core.plain_json import MessageError
from fl_lightning.secure.entropy import keystream

Numbers = npt.NDArray[np.uint64]  # shape (P, 2 N)
_HEADER = struct.Struct("<HBBBBHQ")  # magic, its size, version (2), compression, reserved, length
_MAGIC, _UNCOMPRESSED = 0xA15E, 0


MOST_BITS = {1024: 27, 2048: 54, 4096: 109, 8192: 218, 16384: 438, 32768: 881}


@dataclass(frozen=True, kw_only=True)
class CKKSParameters:
    """Parameters of CKKS that all parties agree on.

    Args:
        degree: N, a power of two from 1024 to 32768; a ciphertext has N / 2 numbers.
        coefficient_bits: bits of each prime of the modulus, from 20 to 60. The last prime is for keys only;
            ciphertexts are modulo the others.
        scale_bits: numbers are multiplied by 2^scale_bits and rounded.

    Raises:
        ValueError: if the parameters are unsafe, or leave no room for a sum.

    Example:
        >>> CKKSParameters().slots
        4096
        >>> CKKSParameters(coefficient_bits=(60, 60, 60, 60))
        Traceback (most recent call last):
        ...
        ValueError: coefficient_bits sum to 240, but degree 8192 carries at most 218 with 128 bits \
of security: use fewer or smaller primes, or degree 16384
    """

    degree: int = 8192
    coefficient_bits: tuple[int, ...] = (60, 40, 40)
    scale_bits: int = 80

    def __post_init__(self) -> None:
        if self.degree not in MOST_BITS:
            raise ValueError(f"degree must be one of {list(MOST_BITS)}, got {self.degree}")
        bits, most = sum(self.coefficient_bits), MOST_BITS[self.degree]
        if bits > most:
            larger = next((d for d, carried in MOST_BITS.items() if carried >= bits), None)
            raise ValueError(
                f"coefficient_bits sum to {bits}, but degree {self.degree} carries at most {most} "
                "with 128 bits of security: use fewer or smaller primes"
                + (f", or degree {larger}" if larger else "")
            )
        if not all(20 <= each <= 60 for each in self.coefficient_bits):
            raise ValueError(f"coefficient_bits must be from 20 to 60, got {self.coefficient_bits}")
        if len(self.coefficient_bits) < 2:
            raise ValueError(
                f"coefficient_bits must be at least two, got {self.coefficient_bits}: one for the "
                "sum, and the last for keys"
            )
        if not 10 <= self.scale_bits <= self._sum_bits - 4:
            raise ValueError(
                f"scale_bits must be from 10 to {self._sum_bits - 4}, four below all primes but the "
                f"last, which hold the sum, got {self.scale_bits}"
            )

    @property
    def slots(self) -> int:
        """Number of values that one ciphertext encrypts."""
        return self.degree // 2

    @property
    def largest(self) -> float:
        """Bound below which values to encrypt and their sum must stay, in absolute value."""
        return 2.0 ** (self._sum_bits - self.scale_bits - 3)

    @property
    def _sum_bits(self) -> int:
        return sum(self.coefficient_bits[:-1])


def library() -> Any:
    """Import TenSEAL, and return the module.

    Raises:
        ImportError: naming the extra to install, if TenSEAL is missing.
    """
    try:
        import tenseal
    except ImportError as error:
        raise ImportError("CKKS needs TenSEAL: pip install 'fl-lightning[he]'") from error
    return tenseal


@cache
def primes_of(parameters: CKKSParameters) -> tuple[int, ...]:
    """Return the primes whose product is the modulus of ciphertexts."""
    library()
    from tenseal import sealapi

    made = sealapi.CoeffModulus.Create(parameters.degree, list(parameters.coefficient_bits))
    return tuple(int(prime.value()) for prime in made)[:-1]


class Packed:
    """Converts a ciphertext's numbers to bytes and back, each number in as many bytes as its prime has.

    Args:
        parameters: parameters of CKKS.
    """

    def __init__(self, parameters: CKKSParameters) -> None:
        self._length = 2 * parameters.degree
        self._widths = [-(-bits // 8) for bits in parameters.coefficient_bits[:-1]]
        self._parameters = parameters

    @property
    def num_bytes(self) -> int:
        """Number of bytes of one ciphertext."""
        return self._length * sum(self._widths)

    @property
    def primes(self) -> Numbers:
        """Primes of the ciphertexts' modulus, shape (P, 1)."""
        return np.array(primes_of(self._parameters), np.uint64)[:, None]

    def write(self, numbers: Numbers) -> bytes:
        """Convert a ciphertext's numbers to bytes."""
        planes = zip(numbers.astype("<u8"), self._widths, strict=True)
        return b"".join(
            row.view(np.uint8).reshape(-1, 8)[:, :width].tobytes() for row, width in planes
        )

    def read(self, data: bytes) -> Numbers:
        """Convert bytes back to a ciphertext's numbers.

        Raises:
            MessageError: if the length is wrong, or a number is not below its prime.
        """
        if len(data) != self.num_bytes:
            raise MessageError(f"no ciphertext of {self.num_bytes} bytes: it has {len(data)}")
        numbers, at = np.zeros((len(self._widths), self._length), np.uint64), 0
        for row, width in zip(numbers, self._widths, strict=True):
            end = at + self._length * width
            part = np.frombuffer(data[at:end], np.uint8).reshape(-1, width)
            row.view(np.uint8).reshape(-1, 8)[:, :width] = part
            at = end
        if not (numbers < self.primes).all():
            raise MessageError("not a valid ciphertext: a number is not below its modulus")
        return numbers

    def sum(self, one: Numbers, other: Numbers) -> Numbers:
        """Return the sum of two ciphertexts, number by number modulo the primes."""
        total = one + other  # below 2^61
        return np.where(total < self.primes, total, total - self.primes)


def numbers_of(ciphertext: Any) -> Numbers:
    """Return the numbers (coefficients modulo each prime) of a SEAL ciphertext with two polynomials."""
    num_primes, degree = ciphertext.coeff_modulus_size(), ciphertext.poly_modulus_degree()
    length = 2 * num_primes * degree
    numbers = np.fromiter(map(ciphertext.__getitem__, range(length)), np.uint64, length)
    return numbers.reshape(2, num_primes, degree).swapaxes(0, 1).reshape(num_primes, -1)


def vector_bytes(numbers: Numbers, like: Any) -> bytes:
    """Return a ciphertext's numbers in the format of TenSEAL, as the bytes of an encrypted vector.

    Args:
        numbers: ciphertext of a sum.
        like: TenSEAL vector with the size, scale and parameters of the sum.
    """
    [model], message = like.ciphertext(), bytes(like.serialize())
    at = (
        2 + message[1]
    )  # behind the sizes, field 1, stands the ciphertext, field 2, and behind it the rest
    length, begin = _varint(message, at + 1)
    version = message[begin + 3 : begin + 5]
    num_primes = len(numbers)
    degree = numbers.shape[1] // 2
    values = numbers.reshape(num_primes, 2, degree).swapaxes(0, 1).astype("<u8").tobytes()
    head = struct.pack("<4Q", *model.parms_id())
    head += struct.pack("<?QQQdQ", True, 2, degree, num_primes, model.scale, 1)
    array = _framed(struct.pack("<Q", numbers.size) + values, version)
    inner = _framed(head + array, version)
    return message[: at + 1] + _as_varint(len(inner)) + inner + message[begin + length :]


def _framed(content: bytes, version: bytes) -> bytes:
    size = _HEADER.size
    head = _HEADER.pack(_MAGIC, size, *version, _UNCOMPRESSED, 0, size + len(content))
    return head + content


def _varint(data: bytes, at: int) -> tuple[int, int]:
    """Read a variable-length integer of protobuf; return its value, and the position after it."""
    value = shift = 0
    while True:
        value |= (data[at] & 127) << shift
        shift, at = shift + 7, at + 1
        if data[at - 1] < 128:
            return value, at


def _as_varint(value: int) -> bytes:
    parts = []
    while value > 127:
        parts.append(value & 127 | 128)
        value >>= 7
    return bytes([*parts, value])


NUM_TAGS, NONCE_SIZE = 4, 16
_FACTOR_BITS, _HALF_BITS, _BLOCK = 24, 30, 512  # 24 + 30 + 9 bits: a block's sum fits into 64
_PAD_BYTES = 16
Tags = npt.NDArray[np.uint64]  # shape (NUM_TAGS, P)


@dataclass(frozen=True)
class Sender:
    """Sender of an encrypted update: client id, nonce, and the fewest clients that a sum with it must have.

    Args:
        client: id of the client.
        nonce: 16 random bytes, new for every message.
        fewest: smallest number of clients in a sum with this message.
    """

    client: int
    nonce: bytes
    fewest: int = 2

    def __post_init__(self) -> None:
        if self.client < 0 or len(self.nonce) != NONCE_SIZE or self.fewest < 2:
            raise MessageError(
                f"a sender is a client, its nonce of {NONCE_SIZE} bytes and the fewest clients of its "
                f"sums, got {self}"
            )

    @property
    def identity(self) -> bytes:
        """Bytes that identify a sender's message, from which pads of its tags are derived."""
        return f"{self.client} {self.nonce.hex()} {self.fewest}".encode()


class LinearTags:
    """Makes tags of ciphertexts (homomorphic MACs), and checks by tags of whose ciphertexts a sum is.

    Args:
        key: 32 bytes that the server does not have.
        context: identity of the layout, on which all senders agree.
        primes: primes of ciphertexts.
        length: number of coefficients of a ciphertext per prime.
    """

    def __init__(self, key: bytes, context: bytes, primes: Iterable[int], length: int) -> None:
        self._key, self._context, self._primes = key, context, list(primes)
        stream = keystream(self._secret(b"factors"))
        words = np.frombuffer(stream(4 * NUM_TAGS * len(self._primes) * length), "<u4")
        factors = (words & np.uint32((1 << _FACTOR_BITS) - 1)).astype(np.uint64)
        self._factors = factors.reshape(NUM_TAGS, len(self._primes), -1, min(_BLOCK, length))

    def of(self, ciphertexts: Iterable[Numbers], sender: Sender) -> list[Tags]:
        """Return the tags of a sender's ciphertexts, one array for each ciphertext."""
        parts = list(ciphertexts)
        pads = self._pads(sender, len(parts))
        return [
            self._reduced(self._products(part) + pad) for part, pad in zip(parts, pads, strict=True)
        ]

    def are_of_sum(
        self, ciphertexts: Iterable[Numbers], tags: Iterable[Tags], senders: Iterable[Sender]
    ) -> bool:
        """Return True if the tags show that ciphertexts are the sums of all senders' ciphertexts, and nothing else."""
        parts, given = list(ciphertexts), list(tags)
        pads = np.zeros((len(parts), NUM_TAGS, len(self._primes)), object)
        for sender in senders:
            pads += self._pads(sender, len(parts))
        expected = [self._reduced(self._products(p) + b) for p, b in zip(parts, pads, strict=True)]
        pairs = zip(expected, given, strict=True)
        return all(hmac.compare_digest(one.tobytes(), other.tobytes()) for one, other in pairs)

    def _secret(self, purpose: bytes) -> bytes:
        return hmac.digest(self._key, purpose + b" " + self._context, "sha256")

    def _pads(self, sender: Sender, count: int) -> npt.NDArray[np.object_]:
        """Return the pads that hide tags of a sender's ``count`` ciphertexts: integers, shape (count, NUM_TAGS, P)."""
        stream = keystream(self._secret(b"pads " + sender.identity))
        size = count * NUM_TAGS * len(self._primes)
        numbers = [int.from_bytes(stream(_PAD_BYTES), "little") for _ in range(size)]
        return np.array(numbers, object).reshape(count, NUM_TAGS, len(self._primes))

    def _products(self, numbers: Numbers) -> npt.NDArray[np.object_]:
        """Return the secret combinations Σ_j r_j c_j of a ciphertext's numbers, which tags hide: shape (NUM_TAGS, P)."""
        blocks = numbers.reshape(len(self._primes), -1, self._factors.shape[-1])
        low, high = (
            (self._factors * half).sum(-1, dtype=np.uint64).astype(object).sum(-1)
            for half in (blocks & np.uint64((1 << _HALF_BITS) - 1), blocks >> np.uint64(_HALF_BITS))
        )
        product: npt.NDArray[np.object_] = low + (high << _HALF_BITS)
        return product

    def _reduced(self, numbers: npt.NDArray[np.object_]) -> Tags:
        reduced: Tags = (numbers % np.array(self._primes, object)).astype(np.uint64)
        return reduced
