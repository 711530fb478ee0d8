"""Memory that one training step has freed stays with the process, for the next one.

The GNU C library hands freed memory back to the system as soon as some tens of megabytes are free at
the end of its heap. A step frees all that it has computed, so the next one gets the same memory anew,
page by page, each cleared by the system first.
"""

from __future__ import annotations

import ctypes
import os

# <malloc.h>
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
# The most that the library takes: larger blocks are always the system's own.
_LARGEST_BLOCK = 32 * 2**20
# Beyond this much free memory it is handed back as ever; the most that an int holds.
MOST_KEPT = 2**31 - 1
# By which whoever starts the process says what the library is to do.
_VARIABLES = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "GLIBC_TUNABLES")


def keep_freed_memory() -> bool:
    """Have this process keep up to 2 GB of freed memory, and return whether it will.

    It does not where another C library is, nor where one of its environment variables
    (``MALLOC_TRIM_THRESHOLD_``, ``MALLOC_MMAP_THRESHOLD_``, ``GLIBC_TUNABLES``) says otherwise.

    Example:
        >>> keep_freed_memory() in (True, False)
        True
    """
    if not _is_glibc() or any(name in os.environ for name in _VARIABLES):
        return False
    library = ctypes.CDLL(None)
    # either ends the library's own adjustment of both
    settings = ((_M_MMAP_THRESHOLD, _LARGEST_BLOCK), (_M_TRIM_THRESHOLD, MOST_KEPT))
    return all(library.mallopt(option, value) for option, value in settings)


def _is_glibc() -> bool:
    try:
        return (os.confstr("CS_GNU_LIBC_VERSION") or "").startswith("glibc")
    except (AttributeError, ValueError):  # Windows; other systems
        return False
