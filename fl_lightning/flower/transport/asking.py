"""Asking a site's resident process, from another process of the same machine.

No more than the standard library is needed: the thin app that Flower starts for every message does it.
"""

from __future__ import annotations

import json
import logging
import socket
import time
from pathlib import Path
from typing import Any

from fl_lightning.flower.channel import CATEGORIES, Lost
from fl_lightning.flower.transport.frames import (
    ANSWER,
    BUSY,
    LOST,
    ORDER,
    STATUS,
    FrameError,
    receive_frame,
    send_frame,
)

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
