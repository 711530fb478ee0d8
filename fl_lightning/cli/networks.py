"""What commands of architectures share: which networks they are about, and the files that they write.

Files and folders are looked at before time is spent on results that cannot be saved.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NoReturn

import torch
from jsonargparse import ArgumentParser
from jsonargparse.typing import PositiveInt

from fl_lightning.core.errors import ConfigurationError
from fl_lightning.nas.spaces.cells import CellSpace
from fl_lightning.nas.spaces.named import NAMES, named_space
from fl_lightning.nas.spaces.space import SearchSpace


@dataclass(frozen=True)
class Networks:
    """Which networks.

    Attributes:
        space: of the networks.
        side: of the images, in pixels.
        options: of the space's `build`.
    """

    space: SearchSpace
    side: int
    options: dict[str, Any]


def add_networks(parser: ArgumentParser, *, required: bool = True) -> None:
    """Give a parser the options.

    Args:
        parser: of a command.
        required: whether there is no other way to name networks.
    """
    parser.add_argument(
        "--space",
        type=str if required else str | None,
        **({"required": True} if required else {"default": None}),
        help=f"One of {', '.join(NAMES)}, a class of your own, or a YAML file with class_path and "
        "init_args.",
    )
    for name, default, what in (
        ("side", 32, "Pixels of an image's side."),
        ("in_channels", 3, "Channels of an image."),
        ("num_classes", 10, "Classes to tell apart."),
    ):
        parser.add_argument(f"--{name}", type=PositiveInt, default=default, help=what)
    for name, what in (("channels", "of the first cells"), ("cells", "how many, or each stage")):
        parser.add_argument(
            f"--{name}",
            type=PositiveInt | None,
            default=None,
            help=f"In spaces of cells: {what}. As the space has them if null.",
        )
    parser.add_argument(
        "--num_threads", type=PositiveInt | None, default=None, help="Threads on a CPU."
    )


def networks_of(given: Any) -> Networks:
    """Return the networks that parsed options mean, and set the threads.

    Raises:
        ConfigurationError: if the space is none, or has no cells to set.
    """
    space = named_space(given.space)
    options = {name: int(given[name]) for name in ("in_channels", "num_classes")}
    for name in ("channels", "cells"):
        if given[name] is not None:
            if not isinstance(space, CellSpace):
                raise ConfigurationError(
                    f"{name}: {space.name} is not made of cells; its sizes are settings of the space"
                )
            options[name] = int(given[name])
    if given.num_threads is not None:
        torch.set_num_threads(given.num_threads)
    return Networks(space, int(given.side), options)


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
