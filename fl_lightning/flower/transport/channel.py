"""Interface of a channel between server and sites, and the asking side of a site's socket.

The client app, which Flower starts for every message, asks the site's resident process over a Unix socket that
only its owner can open. The app needs only the standard library.

A connection has one request and one reply, each a kind and a content in frames of `multiprocessing.connection`.
The request is an order, or asks for the state. The system closes the connections of a process that dies.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from multiprocessing.connection import Client, Connection
from pathlib import Path
from typing import TYPE_CHECKING, Literal, Protocol, get_args

if TYPE_CHECKING:
    from flwr.app import RecordDict

log = logging.getLogger(__name__)
Category = Literal[
    "not there",
    "busy with an earlier order",
    "no answer in time",
    "its process died",
    "its process failed",
    "its app failed",
    "the network lost the message",
]
CATEGORIES: tuple[str, ...] = get_args(Category)


@dataclass(frozen=True)
class Lost:
    """An order that a site will not answer.

    Attributes:
        category: reason of the loss.

    Example:
        >>> Lost("not there").category
        'not there'
    """

    category: Category


class Channel(Protocol):
    """Interface of a channel to the sites.

    Every order has exactly one outcome, an answer or a `Lost`. A site has one order at a time: until it is
    known to be idle again, it is not among `sites`, and orders to it are lost.
    """

    def sites(self) -> list[str]:
        """Return the names of the sites that are present and idle."""

    def send(self, site: str, message: bytes, ttl: float) -> None:
        """Send an order; `receive` returns the answer or a `Lost`.

        Args:
            site: name of the site.
            message: bytes of the order.
            ttl: seconds after which an answer is useless.
        """

    def receive(self, seconds: float) -> list[tuple[str, bytes | Lost]]:
        """Return answers to orders, or losses, with their sites, after at most this many seconds."""


ORDER, STATE, FAILED = b"O", b"S", b"F"
LARGEST = 2**33
_PATIENCE = 30.0  # for a process that is being restarted
_PAUSE = 0.2
_DEATH = 1.0  # seconds: the socket of a dying process may still be open
_STATE_SECONDS = 10.0


def ask(path: Path, order: bytes, seconds: float, *, patience: float = _PATIENCE) -> bytes | Lost:
    """Send an order to a resident process, and return the answer.

    A process that dies while it works gets the order once more when it is back: a repeated order has the
    same answer.

    Args:
        path: path of the socket.
        order: bytes of the order.
        seconds: seconds after which an answer is useless.
        patience: seconds to wait for a process that is not there.
    """
    until = time.monotonic() + seconds
    for _ in range(2):
        try:
            with _connected(path, min(until, time.monotonic() + patience)) as connection:
                send(connection, ORDER, order)
                if not connection.poll(max(0.0, until - time.monotonic())):
                    return Lost("no answer in time")
                kind, content = receive(connection)
                return Lost("its process failed") if kind == FAILED else content
        except TimeoutError:
            return Lost("no answer in time" if time.monotonic() >= until else "not there")
        except (EOFError, OSError):
            time.sleep(_DEATH)
    return Lost("its process died")


def state_of(path: Path) -> str | None:
    """Return the state of a resident process, ``idle`` or ``busy``; None without an answer.

    Args:
        path: path of the socket.
    """
    try:
        with _connected(path, time.monotonic()) as connection:
            send(connection, STATE, b"")
            return receive(connection)[1].decode() if connection.poll(_STATE_SECONDS) else None
    except (EOFError, OSError, ValueError) as error:
        log.warning("no state from %s: %r", path, error)
        return None


def _connected(path: Path, until: float) -> Connection:
    """Connect to a socket, and wait until a process listens.

    Raises:
        TimeoutError: if none does in time.
    """
    while True:
        try:
            return Client(str(path), "AF_UNIX")
        except OSError:
            if time.monotonic() >= until:
                raise TimeoutError(f"nobody listens at {path}") from None
            time.sleep(_PAUSE)


def send(to: Connection, kind: bytes, content: bytes) -> None:
    """Send a request or a reply; two frames, so that a large content is not copied."""
    to.send_bytes(kind)
    to.send_bytes(content)


def receive(source: Connection) -> tuple[bytes, bytes]:
    """Return the kind and content of a request or a reply; a content above `LARGEST` bytes is not read.

    Raises:
        EOFError: if the other side has closed the connection.
        OSError: if the other side does not send such messages.
    """
    return source.recv_bytes(1), source.recv_bytes(LARGEST)


class LoopbackChannel:
    """Channel to sites on the same machine over their sockets; each order has a thread.

    Args:
        sites: path of the socket of each site, by name.
    """

    def __init__(self, sites: Mapping[str, Path]) -> None:
        self._paths = dict(sites)
        self._came: queue.SimpleQueue[tuple[str, bytes | Lost]] = queue.SimpleQueue()
        self._waiting: set[str] = set()

    def sites(self) -> list[str]:
        """Return the names of the sites that are present and idle."""
        free = self._paths.keys() - self._waiting
        return sorted(name for name in free if state_of(self._paths[name]) == "idle")

    def send(self, site: str, message: bytes, ttl: float) -> None:
        """Send an order; `receive` returns the answer or a `Lost`.

        Args:
            site: name of the site.
            message: bytes of the order.
            ttl: seconds after which an answer is useless.
        """
        if site in self._waiting:
            self._came.put((site, Lost("busy with an earlier order")))
        else:
            self._waiting.add(site)
            threading.Thread(target=self._ask, args=[site, message, ttl], daemon=True).start()

    def receive(self, seconds: float) -> list[tuple[str, bytes | Lost]]:
        """Return an answer or a loss with its site, if one comes in this many seconds."""
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
    """Wrap a message for Flower, as an array, which Flower sends in pieces.

    Args:
        message: bytes of the message.
    """
    from flwr.app import Array, ArrayRecord, RecordDict

    array = Array(dtype="uint8", shape=(len(message),), stype=STYPE, data=message)
    return RecordDict({_KEY: ArrayRecord({_KEY: array})})


def unpacked(content: RecordDict) -> bytes | None:
    """Return the message that Flower has delivered; None if it is not one of `packed`.

    Args:
        content: content of Flower's message.
    """
    from flwr.app import ArrayRecord

    record = content.get(_KEY)
    if not isinstance(record, ArrayRecord) or set(record) != {_KEY}:
        return None
    array = record[_KEY]
    return bytes(array.data) if array.stype == STYPE else None
