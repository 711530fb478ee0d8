"""How many slots are fastest: found by trying, and remembered for the next run.

What is best depends on the model, the batch and the cache of the processor. Every trial costs a
compilation, so only long runs try, and what they find is kept in a file of the user's cache folder.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Callable
from pathlib import Path

from fl_lightning.core.user_cache import cache_folder


def fastest(ratio: Callable[[int, int], float], start: int, most: int) -> int:
    """Return the number of slots that takes the least time.

    Goes down from the start by halves while that helps, and up by doubling, at last to the largest.

    Args:
        ratio: measures one number of slots against another, and returns how many times the other's
            time it takes.
        start: where to begin, ≥ 1.
        most: the largest number.

    Example:
        >>> fastest(lambda slots, other: (abs(slots - 9) + 1) / (abs(other - 9) + 1), 4, most=32)
        8
    """
    best = start
    for up in (False, True):
        current = start
        while True:
            candidate = min(2 * current, most) if up else max(current // 2, 1)
            if candidate == current or ratio(candidate, current) >= 1:
                break
            current = candidate
        if current != start and (best == start or ratio(current, best) < 1):
            best = current
    return best


class Remembered:
    """Numbers of slots by what they were found for, in a small file.

    A file that cannot be read or written is as good as none.

    Args:
        path: of the file; in the user's cache folder if None.
    """

    def __init__(self, path: Path | None = None) -> None:
        self._path = path or cache_folder() / "slots.json"

    def get(self, key: str) -> int | None:
        """Return what was found for a key, if anything was."""
        found = self._read().get(key)
        return found if isinstance(found, int) and found >= 1 else None

    def put(self, key: str, num_slots: int) -> None:
        """Keep what was found."""
        content = self._read() | {key: num_slots}
        with contextlib.suppress(OSError):
            self._path.parent.mkdir(parents=True, exist_ok=True)
            new = self._path.with_suffix(f".{os.getpid()}")
            new.write_text(json.dumps(content, indent=1))
            new.replace(self._path)

    def _read(self) -> dict[str, int]:
        with contextlib.suppress(OSError, ValueError):
            content = json.loads(self._path.read_text())
            if isinstance(content, dict):
                return content
        return {}
