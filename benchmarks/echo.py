"""A site that only sends orders back: to try a network before there is a model."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from pathlib import Path

from fl_lightning.flower.network.folder import SiteFolder
from fl_lightning.flower.transport.channel import Channel
from fl_lightning.flower.transport.resident import log_to, serve


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


def serve_echo(folder: str) -> None:
    """Be such a site until SIGTERM.

    Args:
        folder: of the site.
    """
    site = SiteFolder.read(Path(folder))
    log_to(site.folder / "log" / "resident.log")
    serve(site.socket, echo)


def exchange(
    channel: Channel, options: Mapping[str, bool | int | float | str], folder: Path
) -> None:
    """Send an order to every site, round by round, and print what has become of it.

    Args:
        channel: to the sites.
        options: ``sites``, how many to wait for; ``rounds``; ``order``, what is sent; ``ttl``, seconds.
        folder: of the app.
    """
    while len(names := channel.sites()) < int(options["sites"]):
        time.sleep(0.5)
    print(f"sites: {', '.join(names)}", flush=True)
    for number in range(int(options.get("rounds", 3))):
        begun = time.monotonic()
        order = f"{options.get('order', 'round')} {number}".encode()
        for name in names:
            channel.send(name, order, float(options.get("ttl", 120.0)))
        outcomes: dict[str, bytes | None] = {}
        while len(outcomes) < len(names):
            outcomes |= dict(channel.receive(1.0))
        took = time.monotonic() - begun
        told = [f"{name} {_told(outcomes[name], order)}" for name in names]
        print(f"round {number}: {', '.join(told)} ({took:.1f} s)", flush=True)
    print("all rounds done", flush=True)


def _told(outcome: bytes | None, order: bytes) -> str:
    if outcome is None:
        return "is lost"
    return "answered" if outcome == order else "answered something else"
