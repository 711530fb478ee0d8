"""Keep memory that a training step frees in the process, for the next step.

The GNU C library returns freed memory to the system: blocks of more than 32 MB at once, others as soon as
some tens of megabytes are free at the end of its heap. A step frees everything it has computed, so the next
step gets the same memory again, page by page, each cleared by the system first: to subtract two vectors of
11 million numbers then takes three times as long.
"""

from __future__ import annotations

import ctypes
import os

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
    if not _is_glibc() or any(name.startswith(_VARIABLES) for name in os.environ):
        return False
    library = ctypes.CDLL(None)
    settings = ((_M_MMAP_MAX, 0), (_M_TRIM_THRESHOLD, MOST_KEPT))  # no block comes from the system
    return all(library.mallopt(option, value) for option, value in settings)


def _is_glibc() -> bool:
    try:
        return (os.confstr("CS_GNU_LIBC_VERSION") or "").startswith("glibc")
    except (AttributeError, ValueError):  # Windows; other systems
        return False
