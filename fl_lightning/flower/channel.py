"""STUB until the real one lands."""

from __future__ import annotations
import queue, threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True)
class Lost:
    category: str


class Channel(Protocol):
    def sites(self) -> list[str]: ...
    def send(self, site: str, message: bytes, ttl: float) -> None: ...
    def receive(self, seconds: float) -> list[tuple[str, bytes | Lost]]: ...


class DirectChannel:
    """To sites in this process, a thread each; for tests."""

    def __init__(self, handlers: Mapping[str, Callable[[bytes], bytes]]) -> None:
        self._handlers = dict(handlers)
        self._answers: queue.SimpleQueue = queue.SimpleQueue()

    def sites(self) -> list[str]:
        return sorted(self._handlers)

    def send(self, site: str, message: bytes, ttl: float) -> None:
        threading.Thread(
            target=lambda: self._answers.put((site, self._handlers[site](message))), daemon=True
        ).start()

    def receive(self, seconds: float):
        try:
            return [self._answers.get(timeout=seconds)]
        except queue.Empty:
            return []
