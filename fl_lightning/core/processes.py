"""Processes that end with the one that started them, and folders that one process at a time writes into.

A program is tied to its parent by the system (PR_SET_PDEATHSIG, which Linux has). A process of
`multiprocessing` may be forked by a server of processes, and watches the one that it works for. A lock
belongs to the processes that have it open: nobody has to clean up after one that was killed.
"""

from __future__ import annotations

import fcntl
import multiprocessing
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TextIO

from fl_lightning.core.errors import ConfigurationError

# How long a process may take to end once it is asked to; then the system ends it.
SECONDS_TO_END = 3.0
_POLL_SECONDS = 0.1
_TIED = (
    "import ctypes, os, sys\n"
    "if sys.platform == 'linux': ctypes.CDLL(None).prctl(1, 15, 0, 0, 0)\n"
    "if os.getppid() == int(sys.argv[1]): os.execvp(sys.argv[2], sys.argv[2:])\n"
)


def tied(command: Sequence[str]) -> list[str]:
    """Command that gets SIGTERM when the thread that starts it ends, however that ends.

    Args:
        command: to start from this process.

    Example:
        >>> import subprocess
        >>> subprocess.run(tied(["echo", "-n", "hello"]), capture_output=True, check=True).stdout
        b'hello'
    """
    return [sys.executable, "-c", _TIED, str(os.getpid()), *command]


def end_with_parent() -> None:
    """Tie this process of `multiprocessing` to the one that started it: SIGTERM, 3 s later SIGKILL."""
    parent = multiprocessing.parent_process()
    if parent is None:
        return

    def end() -> None:
        parent.join()
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(SECONDS_TO_END)
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=end, daemon=True, name="follows its parent").start()


@contextmanager
def sole_writer(lock: Path, remedy: str) -> Iterator[int]:
    """Hold a lock inside the block; yields its descriptor, by which child processes hold it as well.

    Args:
        lock: a file in the folder that is written to, or beside it.
        remedy: what to do while another process has it.

    Raises:
        ConfigurationError: if another process has it, and still has when its orphans have ended.
    """
    lock.parent.mkdir(parents=True, exist_ok=True)
    with lock.open("a+") as file:
        until = time.monotonic() + 2 * SECONDS_TO_END
        while not try_lock(file):
            if time.monotonic() > until:
                raise ConfigurationError(
                    f"{lock.parent}: process {holder_of(file)} writes into this folder: {remedy}"
                )
            time.sleep(_POLL_SECONDS)
        yield file.fileno()


def try_lock(file: TextIO, told: str = "") -> bool:
    """Lock an open file if nobody has it, and write into it who does; return whether that worked.

    Args:
        file: open for reading and writing; its end frees the lock.
        told: what others are to know of this process, beside its number.
    """
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    file.truncate(0)
    file.write(f"{os.getpid()}{told}")
    file.flush()
    return True


def holder_of(file: TextIO) -> str:
    """Text in a locked file, which begins with the number of the process that has locked it.

    Args:
        file: open for reading.
    """
    file.seek(0)
    return file.read().strip() or "of another call"
