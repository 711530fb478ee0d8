"""Whether somebody looks at a stream, and how wide the screen is."""

from __future__ import annotations

import os
from typing import Any

NARROWEST, USUAL = 40, 80


def is_terminal(stream: Any) -> bool:
    """Return whether a stream is a terminal on which the cursor can be moved.

    Example:
        >>> from io import StringIO
        >>> is_terminal(StringIO()), is_terminal(None)
        (False, False)
    """
    try:
        return bool(stream.isatty()) and os.environ.get("TERM", "") != "dumb"
    except (AttributeError, ValueError):  # no stream at all, or a closed one
        return False


def width_of(stream: Any) -> int:
    """Return how many columns a line of a stream may have, 80 if nobody knows.

    Example:
        >>> from io import StringIO
        >>> width_of(StringIO())
        80
    """
    try:
        columns = os.get_terminal_size(stream.fileno()).columns
    except (AttributeError, ValueError, OSError):
        columns = 0
    return max(NARROWEST, columns) if columns else USUAL
