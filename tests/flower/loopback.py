"""The way to sites on the same machine, straight to their resident processes: for tests and trials."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Mapping
from hashlib import sha256
from pathlib import Path

from fl_lightning.flower.transport.channel import Lost, ask, status


class LoopbackChannel:
    """Reaches sites over their sockets, a thread for each order.

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
        """Return what has become of orders, site by site, after at most so many seconds."""
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
