"""Channel between the server and its sites, and the client side of a site's socket.

The client app, which Flower starts for every message, asks the site's resident process over a Unix socket that
only its owner can open. The app needs only the standard library.

A connection has one request and one reply, each a kind and a content in frames of `multiprocessing.connection`.
The request is an order, or asks for the state. The system closes the connections of a process that dies.
"""

from __future__ import annotations

import logging
import os
import queue
import socket
import struct
import threading
from collections.abc import Mapping
from multiprocessing.connection import Client, Connection
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from typing_extensions import override

if TYPE_CHECKING:
    from flwr.app import RecordDict

log = logging.getLogger(__name__)


class Channel(Protocol):
    """Interface by which the server sends orders to sites and receives their answers.

    A site works on one order at a time; a new order replaces it. Every order has one outcome: an answer, or
    None if the order is lost. A lost order may be sent again once its site is among `sites`.
    """

    def sites(self) -> list[str]:
        """Return the names of the sites that are connected and idle."""

    def send(self, site: str, message: bytes, ttl: float) -> None:
        """Send an order to a site; `receive` returns the outcome: an answer, or None if the order is lost.

        Args:
            site: name of the site.
            message: bytes of the order.
            ttl: seconds after which an answer is useless.
        """

    def receive(self, seconds: float) -> list[tuple[str, bytes | None]]:
        """Wait at most some seconds, and return the outcomes of orders that have come, each with its site."""


ORDER, STATE, FAILED = b"O", b"S", b"F"
LARGEST = 2**33
SILENCE = 60.0  # seconds without a byte in the middle of a message: the other side hangs
_STATE_SECONDS = 10.0


def ask(path: Path, order: bytes, seconds: float) -> bytes | None:
    """Send an order to a site's resident process, and return the answer; None if none comes in time.

    Args:
        path: path of the socket.
        order: bytes of the order.
        seconds: seconds after which an answer is useless.
    """
    kind, answer = _reply(path, ORDER, order, seconds)
    return answer if kind == ORDER else None


def state_of(path: Path) -> str | None:
    """Return the state of a site's resident process, ``idle`` or ``busy``; None if it does not answer."""
    kind, state = _reply(path, STATE, b"", _STATE_SECONDS)
    return state.decode(errors="replace") if kind == STATE else None


def _reply(path: Path, kind: bytes, content: bytes, seconds: float) -> tuple[bytes, bytes]:
    """Send a request to a resident process, and return its reply's kind and content; `FAILED` if none comes in time."""
    try:
        with Client(str(path), "AF_UNIX") as connection:
            limit_silence(connection, min(seconds, SILENCE))
            send(connection, kind, content)
            return receive(connection) if connection.poll(seconds) else (FAILED, b"")
    except (EOFError, OSError) as error:
        log.warning("no answer from %s: %r", path, error)
        return FAILED, b""


def limit_silence(connection: Connection, seconds: float) -> None:
    """Make reads and writes of a connection raise BlockingIOError after some seconds without a byte."""
    microseconds = max(1, int(seconds * 1e6))  # 0 would be no limit
    limit = struct.pack("@ll", *divmod(microseconds, 1_000_000))
    with socket.socket(fileno=os.dup(connection.fileno())) as plain:
        for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
            plain.setsockopt(socket.SOL_SOCKET, option, limit)


def send(to: Connection, kind: bytes, content: bytes) -> None:
    """Send a request or a reply as two frames, kind and content, so that a large content is not copied."""
    to.send_bytes(kind)
    to.send_bytes(content)


def receive(source: Connection) -> tuple[bytes, bytes]:
    """Receive a request or a reply, and return its kind and content; refuse a content above `LARGEST` bytes.

    Raises:
        EOFError: if the other side has closed the connection.
        OSError: if the other side does not send such messages.
    """
    return source.recv_bytes(1), source.recv_bytes(LARGEST)


class LoopbackChannel(Channel):
    """Channel to sites on the same machine: each order reaches the site's socket in a thread of its own.

    Args:
        sites: path of the socket of each site, by name.
    """

    def __init__(self, sites: Mapping[str, Path]) -> None:
        self._paths = dict(sites)
        self._came: queue.SimpleQueue[tuple[str, bytes | None]] = queue.SimpleQueue()
        self._waiting: set[str] = set()

    @override
    def sites(self) -> list[str]:
        free = self._paths.keys() - self._waiting
        return sorted(name for name in free if state_of(self._paths[name]) == "idle")

    @override
    def send(self, site: str, message: bytes, ttl: float) -> None:
        self._waiting.add(site)
        threading.Thread(target=self._ask, args=[site, message, ttl], daemon=True).start()

    @override
    def receive(self, seconds: float) -> list[tuple[str, bytes | None]]:
        try:
            return [self._came.get(block=seconds > 0, timeout=seconds or None)]
        except queue.Empty:
            return []

    def _ask(self, site: str, message: bytes, ttl: float) -> None:
        outcome = ask(self._paths[site], message, ttl)
        self._waiting.discard(site)
        self._came.put((site, outcome))


# type of the array: code that expects numbers refuses it
STYPE = "fl_lightning.message.v1"
_KEY = "message"


def packed(message: bytes) -> RecordDict:
    """Wrap a message in a Flower array, so that Flower sends it in pieces."""
    from flwr.app import Array, ArrayRecord, RecordDict

    array = Array(dtype="uint8", shape=(len(message),), stype=STYPE, data=message)
    return RecordDict({_KEY: ArrayRecord({_KEY: array})})


def unpacked(content: RecordDict) -> bytes | None:
    """Return the bytes of a message that `packed` has wrapped; None if the content has another form."""
    from flwr.app import ArrayRecord

    record = content.get(_KEY)
    if not isinstance(record, ArrayRecord) or set(record) != {_KEY}:
        return None
    array = record[_KEY]
    return bytes(array.data) if array.stype == STYPE else None
