"""Where files are kept that spare the next run some work and that nobody misses."""

from __future__ import annotations

import os
from pathlib import Path


def cache_folder() -> Path:
    """Return the package's folder in the user's cache, which need not exist yet.

    Example:
        >>> cache_folder().name
        'fl_lightning'
    """
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "fl_lightning"
