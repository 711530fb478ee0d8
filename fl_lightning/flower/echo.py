"""A site that only sends orders back: to try a network before there is a model."""

from __future__ import annotations

import os
import time
from pathlib import Path

from fl_lightning.flower.resident import log_to, serve


def echo(order: bytes) -> bytes:
    """Return an order.

    Some are acted on: ``sleep SECONDS``, ``fail`` raises, ``die`` ends the process at once.

    Args:
        order: what is returned.

    Example:
        >>> echo(b"hello")
        b'hello'
    """
    word, _, rest = order.partition(b" ")
    if word == b"sleep":
        time.sleep(float(rest))
    elif word == b"fail":
        raise RuntimeError("asked to fail")
    elif word == b"die":
        os._exit(1)
    return order


def serve_echo(path: str, log: str) -> None:
    """Be such a site until SIGTERM.

    Args:
        path: of its socket.
        log: its log's file.
    """
    log_to(Path(log))
    serve(Path(path), lambda: echo)
