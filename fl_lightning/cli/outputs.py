"""Files and folders that a command is to write: looked at before time is spent on what cannot be kept."""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NoReturn

from fl_lightning.core.errors import ConfigurationError


def check_file(option: str, path: Path) -> None:
    """Refuse a file that cannot be written; nothing is left behind.

    Args:
        option: that names it.
        path: of the file; folders above it may be missing.

    Raises:
        ConfigurationError: with the reason.
    """
    if path.is_dir():
        _refuse(option, path, "it is a folder")
    _check_folder(option, path, path.parent)


def check_folder(option: str, path: Path) -> None:
    """Refuse a folder in which nothing can be written; nothing is left behind.

    Args:
        option: that names it.
        path: of the folder; it and folders above it may be missing.

    Raises:
        ConfigurationError: with the reason.
    """
    _check_folder(option, path, path)


def _check_folder(option: str, path: Path, folder: Path) -> None:
    try:
        there = next(one for one in (folder, *folder.parents) if one.exists())
        if not there.is_dir():
            _refuse(option, path, f"{there} is a file")
        with TemporaryDirectory(dir=there):
            pass
    except OSError as error:
        _refuse(option, path, str(error.strerror))


def _refuse(option: str, path: Path, reason: str) -> NoReturn:
    raise ConfigurationError(f"{option}: {path} cannot be written: {reason}")
