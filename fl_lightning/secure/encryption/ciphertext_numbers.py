"""The numbers that a ciphertext of CKKS consists of: added without the library, and without a key.

    c = (c0, c1), two polynomials of N coefficients modulo each of P primes; sums of ciphertexts are sums of these

Who adds has nothing to decrypt with, and reads nothing that a library would have to parse. The form is that
of SEAL 4 in TenSEAL: polynomial by polynomial, prime by prime.
"""

from __future__ import annotations

import struct
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt

from fl_lightning.secure.encryption.ckks_parameters import CKKSParameters
from fl_lightning.updates.wire.coding import DecodeError

Numbers = npt.NDArray[np.uint64]  # shape (P, 2 N)
_HEADER = struct.Struct("<HBBBBHQ")  # magic, its size, version (2), compression, reserved, length
_MAGIC, _UNCOMPRESSED = 0xA15E, 0


def library() -> Any:
    """Return TenSEAL, which is imported only where it is used.

    Raises:
        ImportError: saying what to install, if it is not there.
    """
    try:
        import tenseal
    except ImportError as error:
        raise ImportError("CKKS needs TenSEAL: pip install 'fl-lightning[he]'") from error
    return tenseal


@cache
def primes_of(parameters: CKKSParameters) -> tuple[int, ...]:
    """Return the primes that ciphertexts are modulo of."""
    library()
    from tenseal import sealapi

    made = sealapi.CoeffModulus.Create(parameters.degree, list(parameters.coefficient_bits))
    return tuple(int(prime.value()) for prime in made)[:-1]


class Packed:
    """Ciphertexts as bytes: as many for each number as its prime needs.

    Args:
        parameters: of the scheme.
    """

    def __init__(self, parameters: CKKSParameters) -> None:
        self._length = 2 * parameters.degree
        self._widths = [-(-bits // 8) for bits in parameters.coefficient_bits[:-1]]
        self._parameters = parameters

    @property
    def num_bytes(self) -> int:
        """The length of a ciphertext."""
        return self._length * sum(self._widths)

    @property
    def primes(self) -> Numbers:
        """The primes, shape (P, 1)."""
        return np.array(primes_of(self._parameters), np.uint64)[:, None]

    def write(self, numbers: Numbers) -> bytes:
        """Return a ciphertext's bytes."""
        planes = zip(numbers.astype("<u8"), self._widths, strict=True)
        return b"".join(
            row.view(np.uint8).reshape(-1, 8)[:, :width].tobytes() for row, width in planes
        )

    def read(self, data: bytes) -> Numbers:
        """Return a ciphertext's numbers.

        Raises:
            DecodeError: if it has another length, or a number that is not below its prime.
        """
        if len(data) != self.num_bytes:
            raise DecodeError(f"no ciphertext of {self.num_bytes} bytes: it has {len(data)}")
        numbers, at = np.zeros((len(self._widths), self._length), np.uint64), 0
        for row, width in zip(numbers, self._widths, strict=True):
            end = at + self._length * width
            part = np.frombuffer(data[at:end], np.uint8).reshape(-1, width)
            row.view(np.uint8).reshape(-1, 8)[:, :width] = part
            at = end
        if not (numbers < self.primes).all():
            raise DecodeError("no ciphertext: a number is not below its prime")
        return numbers

    def sum(self, one: Numbers, other: Numbers) -> Numbers:
        """Return the sum of two ciphertexts."""
        total = one + other  # below 2^61
        return np.where(total < self.primes, total, total - self.primes)


def numbers_of(ciphertext: Any) -> Numbers:
    """Return the numbers of a ciphertext of SEAL's that has two polynomials."""
    num_primes, degree = ciphertext.coeff_modulus_size(), ciphertext.poly_modulus_degree()
    length = 2 * num_primes * degree
    numbers = np.fromiter(map(ciphertext.__getitem__, range(length)), np.uint64, length)
    return numbers.reshape(2, num_primes, degree).swapaxes(0, 1).reshape(num_primes, -1)


def vector_bytes(numbers: Numbers, like: Any) -> bytes:
    """Return what TenSEAL reads as an encrypted vector with these numbers.

    Args:
        numbers: of a sum.
        like: a vector of TenSEAL's with the sum's size, scale and parameters.
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
    """Return a number of protobuf's, and where it ends."""
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
