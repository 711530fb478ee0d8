"""A message of ours as Flower carries it. Light, as the apps are that import it."""

from __future__ import annotations

from fl_lightning.core.errors import ConfigurationError

try:
    from flwr.app import Array, ArrayRecord, RecordDict
except ImportError as error:
    raise ConfigurationError("a network needs Flower: install fl-lightning[flower]") from error

# Array.stype: whatever reads it as numbers will refuse it
STYPE = "fl_lightning.message.v1"
_KEY = "message"


def packed(message: bytes) -> RecordDict:
    """Return a message as Flower carries it: an array, which travels in pieces.

    Args:
        message: its bytes.
    """
    array = Array(dtype="uint8", shape=(len(message),), stype=STYPE, data=message)
    return RecordDict({_KEY: ArrayRecord({_KEY: array})})


def unpacked(content: RecordDict) -> bytes | None:
    """Return the message that Flower has carried, None if it is none of ours.

    Args:
        content: of Flower's message.
    """
    record = content.get(_KEY)
    if not isinstance(record, ArrayRecord) or set(record) != {_KEY}:
        return None
    array = record[_KEY]
    return bytes(array.data) if array.stype == STYPE else None
