"""A site's resident process: it keeps a model warm between the orders that reach it over a Unix socket.

Flower starts a process for every message, which would import PyTorch and build the model each time. The
resident process does so once. It works on one order at a time, and sends a sign of life every two seconds.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import queue
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib import import_module
from logging.handlers import RotatingFileHandler
from multiprocessing.connection import Connection
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn, TextIO

from fl_lightning.core.errors import ConfigurationError, Interrupted
from fl_lightning.core.processes import holder_of, try_lock
from fl_lightning.flower.transport.channel import (
    ANSWER,
    BUSY,
    HEARTBEAT,
    LOST,
    ORDER,
    SILENCE,
    STATUS,
    bind_socket,
    check_socket_path,
    limit_silence,
    receive,
    send,
)

Handler = Callable[[bytes], bytes]

log = logging.getLogger(__name__)
AUDIT, AUDIT_FILE = "fl_lightning.audit", "audit.jsonl"
_POLL_SECONDS = 1.0


@dataclass(eq=False)
class _Job:
    """The work on an order.

    Attributes:
        order: bytes of the order.
        digest: SHA-256 of these bytes.
        askers: number of connections that wait for the answer; work does not begin without any.
        done: set when the work has ended.
        answer: answer to the order; None if the work has failed.
    """

    order: bytes
    digest: str
    askers: int = 0
    done: threading.Event = field(default_factory=threading.Event)
    answer: bytes | None = None


class Resident:
    """Listens at a socket, and has a handler answer orders, one at a time, in threads of its own.

    Args:
        path: path of the socket.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lock = threading.Lock()
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._open: dict[str, _Job] = {}  # jobs that wait or are in work, by digest
        self._state, self._since, self._order = "starting", time.time(), ""
        self._is_closed = threading.Event()
        self._owned = _own(path)
        self._listening = bind_socket(path)
        self._listening.settimeout(_POLL_SECONDS)  # so that the thread sees the end
        threading.Thread(target=self._accept, daemon=True, name="accept").start()

    def begin(self, handler: Handler) -> None:
        """Start to answer orders, first those that are waiting.

        Args:
            handler: returns the answer to an order; an exception is logged, and the asker gets a `Lost`.
        """
        self._set("idle")
        threading.Thread(target=self._work, args=[handler], daemon=True, name="work").start()

    def close(self) -> None:
        """Stop listening; work that has begun is not interrupted."""
        self._is_closed.set()
        self._jobs.put(None)
        self._listening.close()
        self._path.unlink(missing_ok=True)
        self._owned.close()

    def _set(self, state: str, order: str = "") -> None:
        self._state, self._since, self._order = state, time.time(), order

    def _status(self) -> bytes:
        told = {
            "state": self._state,
            "since": self._since,
            "order": self._order,
            "pid": os.getpid(),
            "waiting": len(self._open),
        }
        return json.dumps(told).encode()

    def _accept(self) -> None:
        while not self._is_closed.is_set():
            try:
                connection, _ = self._listening.accept()
            except TimeoutError:
                continue
            except OSError:  # closed
                return
            asker = Connection(connection.detach())
            limit_silence(asker, SILENCE)
            threading.Thread(target=self._serve, args=[asker], daemon=True).start()

    def _serve(self, connection: Connection) -> None:
        """Answer the request of one connection."""
        with connection:
            try:
                kind, content = receive(connection)
                if kind == STATUS:
                    send(connection, STATUS, self._status())
                elif kind == ORDER:
                    self._answer(connection, content)
            except (EOFError, OSError) as error:
                log.warning("an asker is gone: %s", error)

    def _answer(self, connection: Connection, order: bytes) -> None:
        job = self._job(order)
        try:
            while not job.done.wait(HEARTBEAT):
                send(connection, BUSY, b"")
        finally:
            with self._lock:
                job.askers -= 1
        if job.answer is None:
            send(connection, LOST, b"its process failed")
        else:
            send(connection, ANSWER, job.answer)

    def _job(self, order: bytes) -> _Job:
        """Return the job of an order, which equal orders share until there is an answer."""
        digest = hashlib.sha256(order).hexdigest()
        with self._lock:
            if digest not in self._open:
                self._open[digest] = _Job(order, digest)
                self._jobs.put(self._open[digest])
            self._open[digest].askers += 1
            return self._open[digest]

    def _work(self, handler: Handler) -> None:
        while (job := self._jobs.get()) is not None:
            with self._lock:
                if job.askers == 0:
                    del self._open[job.digest]
                    log.info("order %s: nobody waits for it any more", job.digest[:16])
                    continue
            self._set("busy", job.digest)
            begun = time.monotonic()
            try:
                job.answer = handler(job.order)
            except BaseException:  # whatever it says may hold data: the log has it, nobody else
                log.exception("order %s: the handler failed", job.digest[:16])
            took = time.monotonic() - begun
            log.info("order %s: %.1f s", job.digest[:16], took)
            with self._lock:
                del self._open[job.digest]
            self._set("idle")
            job.done.set()


def serve(
    path: Path,
    make_handler: Callable[[], Handler],
    *,
    meanwhile: Callable[[], None] | None = None,
) -> None:
    """Answer orders until SIGTERM or Ctrl-C.

    Args:
        path: path of the socket.
        make_handler: makes the handler of orders; orders wait until it returns.
        meanwhile: function that the main thread runs while another thread handles orders; None to wait.
            When it returns, serving ends.

    Raises:
        ConfigurationError: if the socket cannot be made, or another process serves it.
    """
    with raising_at_signals():
        resident = Resident(path)
        try:
            handler = make_handler()
            resident.begin(handler)
            log.info("ready at %s, process %d", path, os.getpid())
            (meanwhile or threading.Event().wait)()
        except Interrupted as stop:
            log.info("%s", stop)
        finally:
            resident.close()


def _own(path: Path) -> TextIO:
    """Lock a socket for this process, and return the open lock file, which the system closes at the end."""
    check_socket_path(path)
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    file = path.with_name(f"{path.name}.lock").open("a+")
    if not try_lock(file):
        with file:
            raise ConfigurationError(
                f"socket: process {holder_of(file)} serves {path}: end it, or give this site another "
                "socket"
            )
    return file


@contextmanager
def raising_at_signals() -> Iterator[None]:
    """Raise `Interrupted` at the first SIGTERM or Ctrl-C; later ones would disturb the end."""

    def stop(signum: int, frame: FrameType | None) -> NoReturn:
        for one in (signal.SIGTERM, signal.SIGINT):
            signal.signal(one, signal.SIG_IGN)
        raise Interrupted(signum)

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {s: signal.signal(s, stop) for s in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        for signum, handler in before.items():
            signal.signal(signum, handler)


def log_to(file: Path) -> None:
    """Log to a file, and audit orders as JSON lines in `AUDIT_FILE` beside it.

    Args:
        file: path of the log; both files are continued in a new one at a hundred megabytes.
    """
    file.parent.mkdir(parents=True, exist_ok=True)
    for name, path, form in (
        ("fl_lightning", file, "%(asctime)s | %(levelname)s | %(message)s"),
        (AUDIT, file.with_name(AUDIT_FILE), "%(message)s"),
    ):
        handler = RotatingFileHandler(path, maxBytes=100_000_000, backupCount=9)
        handler.setFormatter(logging.Formatter(form))
        logger = logging.getLogger(name)
        logger.addHandler(handler)
        logger.setLevel(logging.INFO)
        logger.propagate = name != AUDIT


def main(words: Sequence[str]) -> None:
    """Run a function as the resident process, such as one that calls `serve`.

    Args:
        words: path of the function, ``module:function``, and its arguments.
    """
    module, _, name = words[0].partition(":")
    function: Any = getattr(import_module(module), name)
    function(*words[1:])


if __name__ == "__main__":
    main(sys.argv[1:])
