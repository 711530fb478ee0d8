"""Asking a site's resident process, from another process of the same machine.

No more than the standard library is needed: the thin app that Flower starts for every message does it.

The bytes between the two are frames over a Unix socket that only its owner can open:

    kind (1 byte) | length (8 bytes, big-endian) | content

An asker sends an order or asks for the status. The answer to an order comes after any number of
`BUSY` frames, one every `HEARTBEAT` seconds: silence means that nobody is there any more.
"""

from __future__ import annotations

import json
import logging
import os
import socket
import stat
import struct
import time
from pathlib import Path
from typing import Any

from fl_lightning.core.errors import ConfigurationError
from fl_lightning.flower.channel import CATEGORIES, Lost

log = logging.getLogger(__name__)
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
    """Return what the process behind a socket answers to an order.

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
                send_frame(connection, ORDER, order)
                return _answer(connection, until, silence)
        except TimeoutError:
            return Lost("no answer in time" if time.monotonic() >= until else "not there")
        except ConnectionError:
            time.sleep(_DEATH)
    return Lost("its process died")


def status(path: Path) -> dict[str, Any] | None:
    """Return what the process behind a socket says of itself, None if it says nothing.

    Args:
        path: of the socket.
    """
    try:
        with _connected(path, time.monotonic()) as connection:
            connection.settimeout(_STATUS_SECONDS)
            send_frame(connection, STATUS)
            kind, content = receive_frame(connection)
            told = json.loads(content) if kind == STATUS else None
    except (OSError, ValueError) as error:
        log.warning("no status from %s: %r", path, error)
        return None
    return told if isinstance(told, dict) else None


def _connected(path: Path, until: float) -> socket.socket:
    """Return a connection; waits for somebody to listen.

    Raises:
        TimeoutError: if nobody does.
    """
    while True:
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            connection.connect(str(path))
        except OSError:
            connection.close()
            if time.monotonic() >= until:
                raise TimeoutError(f"nobody listens at {path}") from None
            time.sleep(_PAUSE)
        else:
            return connection


def _answer(connection: socket.socket, until: float, silence: float) -> bytes | Lost:
    """Return the answer that follows signs of life."""
    while (left := until - time.monotonic()) > 0:
        connection.settimeout(min(left, silence))
        try:
            kind, content = receive_frame(connection)
        except TimeoutError:
            break
        if kind == ANSWER:
            return content
        if kind == LOST:
            category = content.decode()
            return Lost(category) if category in CATEGORIES else Lost("its process failed")  # type: ignore[arg-type]
        if kind != BUSY:
            raise FrameError(f"no answer: kind {kind!r}")
    late = time.monotonic() >= until
    return Lost("no answer in time" if late else "its process is silent")


ORDER, STATUS, BUSY, ANSWER, LOST = b"O", b"S", b"B", b"A", b"L"
HEARTBEAT = 2.0
LARGEST = 2**33
# sun_path of the system's sockaddr_un: 108 bytes on Linux, 104 on macOS, one of them the zero
_LONGEST_PATH = 103
_HEAD = struct.Struct(">cQ")
_PIECE = 2**20


class FrameError(ConnectionError):
    """Raised for bytes that are no frame."""


def send_frame(to: socket.socket, kind: bytes, content: bytes = b"") -> None:
    """Send a frame.

    Args:
        to: a connected socket.
        kind: one of those above.
        content: of the frame.
    """
    to.sendall(_HEAD.pack(kind, len(content)))
    if content:  # else the other side may have answered and gone already
        to.sendall(content)


def receive_frame(source: socket.socket, largest: int = LARGEST) -> tuple[bytes, bytes]:
    """Return a frame's kind and content.

    Args:
        source: a connected socket.
        largest: bytes of a content; nothing is allocated for more.

    Raises:
        FrameError: if the other side is gone, or does not send frames.
        TimeoutError: if the socket's time is over.
    """
    kind, length = _HEAD.unpack(_exactly(source, _HEAD.size))
    if kind not in (ORDER, STATUS, BUSY, ANSWER, LOST) or length > largest:
        raise FrameError(f"no frame: kind {kind!r} of {length} bytes, of at most {largest}")
    return kind, _exactly(source, length)


def _exactly(source: socket.socket, size: int) -> bytes:
    content = bytearray()
    while len(content) < size:
        piece = source.recv(min(_PIECE, size - len(content)))
        if not piece:
            raise FrameError("the other side is gone")
        content += piece
    return bytes(content)


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
