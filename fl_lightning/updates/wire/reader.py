"""Reading bytes from strangers: never past the end, never more than is there."""

from __future__ import annotations

import struct
from typing import Any

import numpy as np

from fl_lightning.updates.wire.bit_packing import Bytes


class DecodeError(ValueError):
    """Bytes that are no valid message, or not the one that is expected; says why."""


class Reader:
    """Goes through some bytes from front to back without copying them.

    Example:
        >>> reader = Reader(b"abc")
        >>> reader.take(2, "two letters").tobytes()
        b'ab'
        >>> reader.take(2, "two more")
        Traceback (most recent call last):
        ...
        fl_lightning.updates.wire.reader.DecodeError: two more: 2 bytes expected, 1 left
    """

    def __init__(self, data: bytes | bytearray | memoryview) -> None:
        self._data = memoryview(data).cast("B")
        self._at = 0

    @property
    def left(self) -> int:
        """How many bytes have not been read."""
        return len(self._data) - self._at

    def take(self, size: int, what: str) -> memoryview:
        """Return the next bytes.

        Raises:
            DecodeError: if there are not so many.
        """
        if size > self.left:
            raise DecodeError(f"{what}: {size} bytes expected, {self.left} left")
        self._at += size
        return self._data[self._at - size : self._at]

    def array(self, size: int, what: str) -> Bytes:
        """Return the next bytes as an array, which cannot be written to."""
        return np.frombuffer(self.take(size, what), np.uint8)

    def fields(self, form: struct.Struct, what: str) -> tuple[Any, ...]:
        """Return the next fields of a fixed form."""
        return form.unpack(self.take(form.size, what))

    def text(self, form: struct.Struct, what: str) -> str:
        """Return the next text, UTF-8 after its length in bytes."""
        (size,) = self.fields(form, what)
        try:
            return str(self.take(size, what), "utf-8")
        except UnicodeDecodeError as error:
            raise DecodeError(f"{what}: no UTF-8, {error.reason}") from None
