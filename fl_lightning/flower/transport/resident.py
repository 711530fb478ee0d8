"""A site's resident process: it keeps a model warm between the orders that reach it over a Unix socket.

Flower starts a process for every message, which would import PyTorch and build the model each time. The
resident process does so once. It works on one order at a time; others wait.
"""

from __future__ import annotations

import hashlib
import logging
import os
import signal
import socketserver
import stat
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module
from logging.handlers import RotatingFileHandler
from multiprocessing.connection import Connection
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

from typing_extensions import override

from fl_lightning.core.errors import ConfigurationError, Interrupted
from fl_lightning.core.processes import holder_of, try_lock
from fl_lightning.flower.transport.channel import (
    FAILED,
    ORDER,
    SILENCE,
    STATE,
    limit_silence,
    receive,
    send,
)

Handler = Callable[[bytes], bytes]

log = logging.getLogger(__name__)
AUDIT, AUDIT_FILE = "fl_lightning.audit", "audit.jsonl"
# sun_path of the system's sockaddr_un: 108 bytes on Linux, 104 on macOS, one of them the zero
_LONGEST_PATH = 103


class Resident(socketserver.ThreadingUnixStreamServer):
    """Server at a site's Unix socket, which passes orders to a handler, one at a time.

    Args:
        path: path of the socket, which only its owner can open; its folder is made if it does not exist.
        handler: returns the answer to an order; if it raises, the error is logged and no answer is sent.

    Raises:
        ConfigurationError: if others could reach the socket, or another process serves it.
    """

    daemon_threads = True  # an order does not delay the end of the process

    def __init__(self, path: Path, handler: Handler) -> None:
        self._path, self._handler = path, handler
        self._at_work = threading.Lock()
        _make_folder(path)
        self._owned = path.with_name(f"{path.name}.lock").open("a+")
        if not try_lock(self._owned):
            with self._owned:
                raise ConfigurationError(
                    f"socket: process {holder_of(self._owned)} serves {path}: end it, or give this site "
                    "another socket"
                )
        path.unlink(missing_ok=True)  # of a process that was killed
        super().__init__(str(path), socketserver.BaseRequestHandler)
        threading.Thread(target=self.serve_forever, daemon=True, name="accept").start()

    def close(self) -> None:
        """Stop listening at the socket; an order that has begun is not interrupted."""
        self.shutdown()
        self.server_close()
        self._path.unlink(missing_ok=True)
        self._owned.close()

    @override
    def server_bind(self) -> None:
        super().server_bind()
        self._path.chmod(0o600)  # before anybody can connect

    @override
    def finish_request(self, request: Any, client_address: Any) -> None:
        with Connection(request.detach()) as connection:
            try:
                limit_silence(connection, SILENCE)
                kind, content = receive(connection)
                if kind == STATE:
                    send(connection, STATE, b"busy" if self._at_work.locked() else b"idle")
                elif kind == ORDER:
                    with self._at_work:
                        is_gone = connection.poll()  # a live client app sends nothing more
                        answer = None if is_gone else self._answer(content)
                    send(connection, FAILED if answer is None else ORDER, answer or b"")
            except (EOFError, OSError) as error:
                log.warning(
                    "the client app closed its connection before it had the answer: %s", error
                )

    def _answer(self, order: bytes) -> bytes | None:
        """Return the handler's answer to an order; None if the handler raises."""
        name, begun = hashlib.sha256(order).hexdigest()[:16], time.monotonic()
        try:
            return self._handler(order)
        except BaseException:  # whatever it says may hold data: the log has it, nobody else
            log.exception("order %s: the handler failed", name)
            return None
        finally:
            log.info("order %s: %.1f s", name, time.monotonic() - begun)


def check_socket_path(path: Path) -> None:
    """Raise ConfigurationError if a path is too long for a Unix socket."""
    size = len(os.fsencode(path))
    if size > _LONGEST_PATH:
        raise ConfigurationError(
            f"socket: {path} has {size} bytes, but the system allows {_LONGEST_PATH} in the path of "
            "a socket: give a shorter one, such as /run/fl_lightning/site.sock"
        )


def _make_folder(socket_path: Path) -> None:
    """Make the folder of a socket; raise if other users can open it."""
    check_socket_path(socket_path)
    folder = socket_path.parent
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    found = folder.stat()
    if found.st_uid != os.geteuid() or stat.S_IMODE(found.st_mode) & 0o077:
        raise ConfigurationError(
            f"socket: other users can open the folder {folder}: use a folder of your own, with chmod 700"
        )


def serve(path: Path, handler: Handler, *, meanwhile: Callable[[], None] | None = None) -> None:
    """Answer orders at a Unix socket until SIGTERM or Ctrl-C.

    Args:
        path: path of the socket.
        handler: returns the answer to an order.
        meanwhile: function that the main thread runs while another thread handles orders; None to wait.
            When it returns, serving ends.

    Raises:
        ConfigurationError: if the socket cannot be made, or another process serves it.
    """
    with raising_at_signals():
        resident = Resident(path, handler)
        try:
            log.info("ready at %s, process %d", path, os.getpid())
            (meanwhile or threading.Event().wait)()
        except Interrupted as stop:
            log.info("%s", stop)
        finally:
            resident.close()


@contextmanager
def raising_at_signals() -> Iterator[None]:
    """Raise `Interrupted` at the first SIGTERM or Ctrl-C inside the block, and ignore later signals."""

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
    """Run a function as a site's resident process, such as one that calls `serve`.

    Args:
        words: path of the function, ``module:function``, and its arguments.
    """
    module, _, name = words[0].partition(":")
    function: Any = getattr(import_module(module), name)
    function(*words[1:])


if __name__ == "__main__":
    main(sys.argv[1:])
