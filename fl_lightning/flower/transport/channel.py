"""How the server reaches its sites, whatever carries orders and answers; and a site's resident process.

That process is asked from another one of the same machine, over a Unix socket that only its owner can open. No
more than the standard library is needed: the thin app that Flower starts for every message does it.

Each message is a kind and a content, in the frames of `multiprocessing.connection`. An asker sends an order or
asks for the status. The answer to an order comes after any number of `BUSY` messages, one every `HEARTBEAT`
seconds: silence means that nobody is there any more.
"""

from __future__ import annotations

import json
import logging
import os
import queue
import socket
import stat
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
        category: why.

    Example:
        >>> Lost("not there").category
        'not there'
    """

    category: Category


class Channel(Protocol):
    """The way to the sites.

    Every order that is sent has exactly one outcome, an answer or a `Lost`. A site has one order at a
    time: until it is known to be free again, it is not among `sites`, and what is sent to it is lost.
    """

    def sites(self) -> list[str]:
        """Return the names of the sites that are there now and could take an order."""

    def send(self, site: str, message: bytes, ttl: float) -> None:
        """Send an order; `receive` returns its answer or its loss.

        Args:
            site: its name.
            message: the order.
            ttl: seconds after which its answer is of no use.
        """

    def receive(self, seconds: float) -> list[tuple[str, bytes | Lost]]:
        """Answers to orders, or their loss, site by site, after at most this many seconds."""


ORDER, STATUS, BUSY, ANSWER, LOST = b"O", b"S", b"B", b"A", b"L"
HEARTBEAT = 2.0
LARGEST = 2**33
# sun_path of the system's sockaddr_un: 108 bytes on Linux, 104 on macOS, one of them the zero
_LONGEST_PATH = 103
SILENCE = 60.0  # without a heartbeat: the process hangs
_PATIENCE = 30.0  # for a process that is being restarted
_PAUSE = 0.2
_DEATH = 1.0  # takes some time: a socket of a dying process may still be open
_STATUS_SECONDS = 10.0


def ask(
    path: Path,
    order: bytes,
    seconds: float,
    *,
    silence: float = SILENCE,
    patience: float = _PATIENCE,
) -> bytes | Lost:
    """Answer of the process behind a socket to an order.

    A process that dies over an order gets it once more when it is back: an order that comes again has
    the same answer.

    Args:
        path: of the socket.
        order: to be answered.
        seconds: after which its answer is of no use.
        silence: seconds without a sign of life that mean it hangs.
        patience: seconds in which it may come back.
    """
    until = time.monotonic() + seconds
    for _ in range(2):
        try:
            with _connected(path, min(until, time.monotonic() + patience)) as connection:
                send(connection, ORDER, order)
                return _answer(connection, until, silence)
        except TimeoutError:
            return Lost("no answer in time" if time.monotonic() >= until else "not there")
        except (EOFError, OSError):
            time.sleep(_DEATH)
    return Lost("its process died")


def status(path: Path) -> dict[str, Any] | None:
    """Status of the process behind a socket, None without an answer.

    Args:
        path: of the socket.
    """
    try:
        with _connected(path, time.monotonic()) as connection:
            send(connection, STATUS, b"")
            if not connection.poll(_STATUS_SECONDS):
                raise TimeoutError("it says nothing")
            kind, content = receive(connection)
            told = json.loads(content) if kind == STATUS else None
    except (EOFError, OSError, ValueError) as error:
        log.warning("no status from %s: %r", path, error)
        return None
    return told if isinstance(told, dict) else None


def _connected(path: Path, until: float) -> Connection:
    """Return a connection; waits for somebody to listen.

    Raises:
        TimeoutError: if nobody does.
    """
    while True:
        try:
            return Client(str(path), "AF_UNIX")
        except OSError:
            if time.monotonic() >= until:
                raise TimeoutError(f"nobody listens at {path}") from None
            time.sleep(_PAUSE)


def _answer(connection: Connection, until: float, silence: float) -> bytes | Lost:
    """Return the answer that follows signs of life."""
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


def receive(source: Connection, largest: int = LARGEST) -> tuple[bytes, bytes]:
    """Return a message's kind and content, for which nothing is allocated if it is larger than allowed.

    Raises:
        EOFError: if the other side is gone.
        OSError: if it does not send messages.
    """
    return source.recv_bytes(1), source.recv_bytes(largest)


def check_socket_path(path: Path) -> None:
    """Refuse a path that the system cannot give to a socket.

    Raises:
        ConfigurationError: if it is too long.
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
        path: of the socket; its folder is made if it is not there.

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
    """Reaches sites on the same machine over their sockets, a thread for each order: for trials.

    Args:
        sites: the socket of each, by name.
    """

    def __init__(self, sites: Mapping[str, Path]) -> None:
        self._paths = dict(sites)
        self._came: queue.SimpleQueue[tuple[str, bytes | Lost]] = queue.SimpleQueue()
        self._waiting: set[str] = set()
        self._doubtful: set[str] = set()  # may still be busy with an order that is lost

    def sites(self) -> list[str]:
        """Return the names of the sites that are there now and could take an order."""
        return sorted(name for name in self._paths if self._is_free(name))

    def send(self, site: str, message: bytes, ttl: float) -> None:
        """Send an order; what becomes of it, `receive` says.

        Args:
            site: its name.
            message: the order.
            ttl: seconds after which its answer is of no use.
        """
        if site not in self._paths:
            self._came.put((site, Lost("not there")))
        elif site in self._waiting:
            self._came.put((site, Lost("busy with an earlier order")))
        else:
            self._waiting.add(site)
            threading.Thread(target=self._ask, args=[site, message, ttl], daemon=True).start()

    def receive(self, seconds: float) -> list[tuple[str, bytes | Lost]]:
        """Return the answers to orders, or their loss, site by site, after at most so many seconds."""
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


# Array.stype: whatever reads it as numbers will refuse it
STYPE = "fl_lightning.message.v1"
_KEY = "message"


def packed(message: bytes) -> RecordDict:
    """Return a message as Flower carries it: an array, which travels in pieces.

    Args:
        message: its bytes.
    """
    from flwr.app import Array, ArrayRecord, RecordDict

    array = Array(dtype="uint8", shape=(len(message),), stype=STYPE, data=message)
    return RecordDict({_KEY: ArrayRecord({_KEY: array})})


def unpacked(content: RecordDict) -> bytes | None:
    """Return the message that Flower has carried, None if it is none of ours.

    Args:
        content: of Flower's message.
    """
    from flwr.app import ArrayRecord

    record = content.get(_KEY)
    if not isinstance(record, ArrayRecord) or set(record) != {_KEY}:
        return None
    array = record[_KEY]
    return bytes(array.data) if array.stype == STYPE else None
