"""Child processes that end with their parent, folders with one writing process at a time, and whole files.

The system ties a program to its parent (PR_SET_PDEATHSIG, Linux only). A process of `multiprocessing`
may be forked by a server of processes, so it watches its parent itself. A lock is held by the
processes that have its file open: after a kill there is nothing to clean up.

The GNU C library returns freed memory to the system: blocks of more than 32 MB at once, others as soon as
some tens of megabytes are free at the end of its heap. A step frees all that it has computed, so the next
step gets its memory page by page, each cleared by the system first: the subtraction of two vectors of
11 million numbers then takes three times as long. `keep_freed_memory` avoids this.
"""

from __future__ import annotations

import ctypes
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

# Time that a process has to end after SIGTERM before it gets SIGKILL.
SECONDS_TO_END = 3.0
_POLL_SECONDS = 0.1
_TIED = (
    "import ctypes, os, sys\n"
    "if sys.platform == 'linux': ctypes.CDLL(None).prctl(1, 15, 0, 0, 0)\n"
    "if os.getppid() == int(sys.argv[1]): os.execvp(sys.argv[2], sys.argv[2:])\n"
)


def tied(command: Sequence[str]) -> list[str]:
    """Wrap a command so that it gets SIGTERM when the thread that started it ends.

    Args:
        command: program and arguments; started from this process.

    Example:
        >>> import subprocess
        >>> subprocess.run(tied(["echo", "-n", "hello"]), capture_output=True, check=True).stdout
        b'hello'
    """
    return [sys.executable, "-c", _TIED, str(os.getpid()), *command]


def end_with_parent() -> None:
    """End this process of `multiprocessing` when its parent ends: SIGTERM, and SIGKILL 3 s later."""
    parent = multiprocessing.parent_process()
    if parent is None:
        return

    def end() -> None:
        parent.join()
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(SECONDS_TO_END)
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=end, daemon=True, name="follows its parent").start()


def write_whole(path: Path, text: str) -> None:
    """Write a text file atomically, so that no reader sees half of it, even if this process is killed.

    Args:
        path: path of the file; its folder is made if missing. While it is written its name is ``.<name>.unfinished``.
        text: the content.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(f".{path.name}.unfinished")
    unfinished.write_text(text, encoding="utf-8")
    unfinished.replace(path)


@contextmanager
def sole_writer(lock: Path, remedy: str) -> Iterator[int]:
    """Hold a file lock inside the block; yield its file descriptor, which child processes can inherit.

    Args:
        lock: path of the lock, in the folder to write to or beside it.
        remedy: advice for the error while another process holds the lock.

    Raises:
        ConfigurationError: if another process holds the lock, even after its orphans had time to end.
    """
    lock.parent.mkdir(parents=True, exist_ok=True)
    with lock.open("a+") as file:
        until = time.monotonic() + 2 * SECONDS_TO_END
        while not try_lock(file):
            if time.monotonic() > until:
                raise ConfigurationError(
                    f"{lock.parent}: process {holder_of(file)} is writing to this folder: {remedy}"
                )
            time.sleep(_POLL_SECONDS)
        yield file.fileno()


def try_lock(file: TextIO, told: str = "") -> bool:
    """Lock an open file, and write this process's id into it; return False if another process holds the lock.

    Returns True if the file was free.

    Args:
        file: open for reading and writing; closing it releases the lock.
        told: text for other processes, written after the number.
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
    """Return the text in a lock file, which starts with the id of the process that holds the lock."""
    file.seek(0)
    return file.read().strip() or "of another call"


# <malloc.h>
_M_TRIM_THRESHOLD, _M_MMAP_MAX = -1, -4
# Free memory beyond this is returned to the system; the largest value of a C int.
MOST_KEPT = 2**31 - 1
# How environment variables begin by which a user configures the library.
_VARIABLES = ("MALLOC_TRIM_", "MALLOC_MMAP_", "GLIBC_TUNABLES")


def keep_freed_memory() -> bool:
    """Keep up to 2 GB of freed memory in this process; returns whether this worked.

    It does nothing with another C library, or if ``GLIBC_TUNABLES`` or an environment variable such as
    ``MALLOC_TRIM_THRESHOLD_`` is set.

    Example:
        >>> keep_freed_memory() in (True, False)
        True
    """
    try:
        is_glibc = (os.confstr("CS_GNU_LIBC_VERSION") or "").startswith("glibc")
    except (AttributeError, ValueError):  # Windows; other systems
        is_glibc = False
    if not is_glibc or any(name.startswith(_VARIABLES) for name in os.environ):
        return False
    library = ctypes.CDLL(None)
    settings = ((_M_MMAP_MAX, 0), (_M_TRIM_THRESHOLD, MOST_KEPT))  # no block comes from the system
    return all(library.mallopt(option, value) for option, value in settings)
