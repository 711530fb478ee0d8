"""An error on its way from one process to another, by way of a file."""

from __future__ import annotations

import pickle
import traceback
from pathlib import Path


class ProcessTraceback(Exception):  # noqa: N818 - it is the cause of an error, not one itself
    """Where in its process an error was raised, as text; then the same of its cause, None without one."""

    def __str__(self) -> str:
        return f"\n\n{self.args[0]}"


def write_error(error: BaseException, path: Path) -> None:
    """Write an error and its traceback to a file, which then is whole or not there."""
    where, cause = "".join(traceback.format_exception(error)), error.__cause__
    behind = None if cause is None else "".join(traceback.format_exception(cause))
    try:
        content = pickle.dumps((error, where, behind))
        pickle.loads(content)  # some errors can be written but not read
    except Exception:  # noqa: BLE001 - whatever a user's error does when it is pickled
        content = pickle.dumps((RuntimeError(f"{type(error).__name__}: {error}"), where, None))
    unfinished = path.with_name(f"{path.name}.unfinished")
    unfinished.write_bytes(content)
    unfinished.rename(path)


def read_error(path: Path) -> BaseException:
    """Return the error, whose cause tells where it was raised."""
    error, *traces = pickle.loads(path.read_bytes())
    assert isinstance(error, BaseException)
    error.__cause__ = ProcessTraceback(*traces)
    return error
