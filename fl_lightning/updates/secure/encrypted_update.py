"""An update that is encrypted, all of it or its selected coordinates, as one binary message.

"FLHE", u8 version, u64 length of the whole message, u32 ciphertexts, u64 numbers in clear,
u32 length of each ciphertext, ciphertexts, float32 numbers in clear, u32 CRC-32
"""

from __future__ import annotations

import struct
import zlib
from dataclasses import dataclass

import torch
from torch import Tensor

from fl_lightning.updates.reader import DecodeError, Reader

MAGIC, VERSION = b"FLHE", 1
_HEADER = struct.Struct("<4sBQIQ")
_LENGTH = struct.Struct("<I")


@dataclass(frozen=True, eq=False)
class EncryptedUpdate:
    """Ciphertexts, and what is not encrypted.

    Args:
        ciphertexts: of the selected coordinates, in order, so many to each as the scheme holds.
        clear: the other coordinates in order, float32.

    Example:
        >>> update = EncryptedUpdate((b"one", b"two"), torch.tensor([1.0]))
        >>> data = update.encode()
        >>> len(data) == update.num_bytes
        True
        >>> EncryptedUpdate.decode(data, num_ciphertexts=2, num_clear=1).ciphertexts
        (b'one', b'two')
    """

    ciphertexts: tuple[bytes, ...]
    clear: Tensor

    @property
    def num_bytes(self) -> int:
        """The length of the message."""
        inside = sum(_LENGTH.size + len(each) for each in self.ciphertexts)
        return _HEADER.size + inside + 4 * self.clear.numel() + 4

    def encode(self) -> bytes:
        """Return the message."""
        count = len(self.ciphertexts)
        parts = [_HEADER.pack(MAGIC, VERSION, self.num_bytes, count, self.clear.numel())]
        parts += [_LENGTH.pack(len(each)) for each in self.ciphertexts]
        parts += self.ciphertexts
        parts.append(self.clear.float().cpu().numpy().astype("<f4").tobytes())
        body = b"".join(parts)
        return body + _LENGTH.pack(zlib.crc32(body))

    @classmethod
    def decode(cls, data: bytes, *, num_ciphertexts: int, num_clear: int) -> EncryptedUpdate:
        """Return the update.

        Args:
            data: from a stranger.
            num_ciphertexts: that it must have.
            num_clear: numbers in clear that it must have.

        Raises:
            DecodeError: if these bytes are no such message. Ciphertexts are not looked into.
        """
        reader = Reader(data)
        size = reader.left
        magic, version, length, count, clear = reader.fields(_HEADER, "header")
        if magic != MAGIC or version != VERSION or length != size:
            raise DecodeError(f"no encrypted update of version {VERSION} of {size} bytes")
        if (count, clear) != (num_ciphertexts, num_clear):
            raise DecodeError(
                f"{count} ciphertexts and {clear} numbers in clear instead of {num_ciphertexts} "
                f"and {num_clear}"
            )
        lengths = [reader.fields(_LENGTH, "lengths")[0] for _ in range(count)]
        found = tuple(reader.take(each, "ciphertexts").tobytes() for each in lengths)
        numbers = (
            torch.frombuffer(bytearray(reader.take(4 * clear, "numbers")), dtype=torch.float32)
            if clear
            else torch.empty(0)
        )
        (checksum,) = reader.fields(_LENGTH, "checksum")
        if reader.left or checksum != zlib.crc32(memoryview(data)[:-4]):
            raise DecodeError("the checksum is wrong or bytes follow the message")
        if not torch.isfinite(numbers).all():
            raise DecodeError("a number in clear is not finite")
        return cls(found, numbers)
