"""Interface of a channel between server and sites, and the socket protocol of a site's resident process.

The client app, which Flower starts for every message, asks the resident process over a Unix socket that only its
owner can open. The app needs only the standard library.

A message is a kind and a content, in the frames of `multiprocessing.connection`. An asker sends an order or a
request for the status. Before the answer to an order, the resident process sends `BUSY` every `HEARTBEAT`
seconds: if these messages stop, the process has died or hangs.
"""

from __future__ import annotations

import json
import logging
import os
import queue
import socket
import stat
import struct
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from hashlib import sha256
from multiprocessing.connection import Client, Connection
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol, get_args

from fl_lightning.core.errors import ConfigurationError

if TYPE_CHECKING:
    from flwr.app import RecordDict

log = logging.getLogger(__name__)
Category = Literal[
    "not there",
    "busy with an earlier order",
    "no answer in time",
    "its process died",
    "its process is silent",
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


ORDER, STATUS, BUSY, ANSWER, LOST = b"O", b"S", b"B", b"A", b"L"
HEARTBEAT = 2.0
LARGEST = 2**33
# sun_path of the system's sockaddr_un: 108 bytes on Linux, 104 on macOS, one of them the zero
_LONGEST_PATH = 103
SILENCE = 60.0  # without a heartbeat: the process hangs
_PATIENCE = 30.0  # for a process that is being restarted
_PAUSE = 0.2
_DEATH = 1.0  # seconds: the socket of a dying process may still be open
_STATUS_SECONDS = 10.0


def ask(
    path: Path,
    order: bytes,
    seconds: float,
    *,
    silence: float = SILENCE,
    patience: float = _PATIENCE,
) -> bytes | Lost:
    """Send an order to a resident process, and return the answer.

    A process that dies while it works gets the order once more when it is back: a repeated order has the
    same answer.

    Args:
        path: path of the socket.
        order: bytes of the order.
        seconds: seconds after which an answer is useless.
        silence: seconds without a message after which the process counts as hanging.
        patience: seconds to wait for a process that is not there.
    """
    until = time.monotonic() + seconds
    for _ in range(2):
        try:
            with _connected(path, min(until, time.monotonic() + patience)) as connection:
                limit_silence(connection, min(seconds, silence))
                send(connection, ORDER, order)
                return _answer(connection, until, silence)
        except BlockingIOError:  # in the middle of a frame
            return Lost("its process is silent")
        except TimeoutError:
            return Lost("no answer in time" if time.monotonic() >= until else "not there")
        except (EOFError, OSError):
            time.sleep(_DEATH)
    return Lost("its process died")


def status(path: Path) -> dict[str, Any] | None:
    """Return the status of a resident process; None without an answer.

    Args:
        path: path of the socket.
    """
    try:
        with _connected(path, time.monotonic()) as connection:
            limit_silence(connection, _STATUS_SECONDS)
            send(connection, STATUS, b"")
            kind, content = receive(connection)
            told = json.loads(content) if kind == STATUS else None
    except (EOFError, OSError, ValueError) as error:
        log.warning("no status from %s: %r", path, error)
        return None
    return told if isinstance(told, dict) else None


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


def limit_silence(connection: Connection, seconds: float) -> None:
    """Make reads and writes of a connection raise BlockingIOError after this time without a byte."""
    limit = struct.pack("@ll", int(seconds), int(seconds % 1 * 1e6))
    with socket.socket(fileno=os.dup(connection.fileno())) as plain:
        for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
            plain.setsockopt(socket.SOL_SOCKET, option, limit)


def _answer(connection: Connection, until: float, silence: float) -> bytes | Lost:
    """Wait for the answer, which comes after any number of `BUSY` messages."""
    while (left := until - time.monotonic()) > 0 and connection.poll(min(left, silence)):
        kind, content = receive(connection)
        if kind == ANSWER:
            return content
        if kind == LOST:
            category = content.decode()
            return Lost(category) if category in CATEGORIES else Lost("its process failed")  # type: ignore[arg-type]
        if kind != BUSY:
            raise ConnectionError(f"no answer: kind {kind!r}")
    late = time.monotonic() >= until
    return Lost("no answer in time" if late else "its process is silent")


def send(to: Connection, kind: bytes, content: bytes) -> None:
    """Send a message; two frames, so that a large content is not copied."""
    to.send_bytes(kind)
    to.send_bytes(content)


def receive(source: Connection) -> tuple[bytes, bytes]:
    """Return the kind and content of a message; a content above `LARGEST` bytes is not read.

    Raises:
        EOFError: if the other side has closed the connection.
        OSError: if the other side does not send such messages.
    """
    return source.recv_bytes(1), source.recv_bytes(LARGEST)


def check_socket_path(path: Path) -> None:
    """Raise if a path is too long for a Unix socket.

    Raises:
        ConfigurationError: with both lengths.
    """
    size = len(os.fsencode(path))
    if size > _LONGEST_PATH:
        raise ConfigurationError(
            f"socket: {path} has {size} bytes, but the system allows {_LONGEST_PATH} in the path of a "
            "socket: give a shorter one, such as /run/fl_lightning/site.sock"
        )


def bind_socket(path: Path) -> socket.socket:
    """Return a socket that listens at a path which only its owner can open.

    Args:
        path: path of the socket; its folder is made if it does not exist.

    Raises:
        ConfigurationError: if others could reach it.
    """
    check_socket_path(path)
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    folder = path.parent.stat()
    if folder.st_uid != os.geteuid() or stat.S_IMODE(folder.st_mode) & 0o077:
        raise ConfigurationError(
            f"socket: others can open the folder {path.parent}: give one of your own, chmod 700"
        )
    listening = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    path.unlink(missing_ok=True)
    listening.bind(str(path))
    path.chmod(0o600)
    listening.listen()
    return listening


class LoopbackChannel:
    """Channel to sites on the same machine over their sockets, for tests; each order has a thread.

    Args:
        sites: path of the socket of each site, by name.
    """

    def __init__(self, sites: Mapping[str, Path]) -> None:
        self._paths = dict(sites)
        self._came: queue.SimpleQueue[tuple[str, bytes | Lost]] = queue.SimpleQueue()
        self._waiting: set[str] = set()
        self._doubtful: set[str] = set()  # may still be busy with an order that is lost

    def sites(self) -> list[str]:
        """Return the names of the sites that are present and idle."""
        return sorted(name for name in self._paths if self._is_free(name))

    def send(self, site: str, message: bytes, ttl: float) -> None:
        """Send an order; `receive` returns the answer or a `Lost`.

        Args:
            site: name of the site.
            message: bytes of the order.
            ttl: seconds after which an answer is useless.
        """
        if site not in self._paths:
            self._came.put((site, Lost("not there")))
        elif site in self._waiting:
            self._came.put((site, Lost("busy with an earlier order")))
        else:
            self._waiting.add(site)
            threading.Thread(target=self._ask, args=[site, message, ttl], daemon=True).start()

    def receive(self, seconds: float) -> list[tuple[str, bytes | Lost]]:
        """Return answers to orders, or losses, with their sites, after at most this many seconds."""
        until = time.monotonic() + seconds
        came: list[tuple[str, bytes | Lost]] = []
        while True:
            try:
                # the first is waited for, others are taken if they are there
                left = 0.0 if came else max(0.0, until - time.monotonic())
                came.append(self._came.get(block=left > 0, timeout=left or None))
            except queue.Empty:
                return came

    def _ask(self, site: str, message: bytes, ttl: float) -> None:
        if site in self._doubtful and self._is_busy_with_another(site, message):
            outcome: bytes | Lost = Lost("busy with an earlier order")
        else:
            outcome = ask(self._paths[site], message, ttl)
        (self._doubtful.add if isinstance(outcome, Lost) else self._doubtful.discard)(site)
        self._waiting.discard(site)
        self._came.put((site, outcome))

    def _is_busy_with_another(self, site: str, message: bytes) -> bool:
        told = status(self._paths[site])
        return told is not None and told["order"] not in ("", sha256(message).hexdigest())

    def _is_free(self, name: str) -> bool:
        if name in self._waiting:
            return False
        told = status(self._paths[name])
        return told is not None and told.get("state") == "idle"


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
