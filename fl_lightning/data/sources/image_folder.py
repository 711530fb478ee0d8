"""Data source of image files, in one folder per class.

    root/train/<class>/*.jpg      root/test/<class>/*.jpg

The classes are numbered in the order of their sorted names. Files in deeper folders are included;
images are recognised by their extension. Files become RGB of one square size: the shorter side is
resized to it and the centre kept, in one step. Decoding runs in a few threads, because Pillow releases
the GIL while it decodes.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, final

import numpy as np
import torch
from PIL import Image, ImageOps
from torch import Tensor
from typing_extensions import override

from fl_lightning.core.errors import ConfigurationError
from fl_lightning.data.sources.image_source import ImageRows, ImageSource, ImageTensors
from fl_lightning.data.sources.source import Loaded
from fl_lightning.data.transforms import PaddingMode, PixelPipeline

EXTENSIONS = frozenset({".bmp", ".jpeg", ".jpg", ".png", ".ppm", ".tif", ".tiff", ".webp"})

_IMAGENET_MEAN = (0.485, 0.456, 0.406)
_IMAGENET_STD = (0.229, 0.224, 0.225)


@final
class ImageFolder(ImageSource):
    """Reads images from folders ``root/<train or test>/<class>/``, as squares in RGB.

    Augmentation is a random crop after padding by an eighth of `image_size` (4 pixels at 32, as
    usual for CIFAR), and a random horizontal flip.

    Args:
        root: folder that contains the folders of the three sets.
        image_size: height and width in pixels; the shorter side is resized to it and the centre kept.
        train: name of the folder of training images.
        test: name of the folder of test images, with the same classes. None holds out a fifth of the
            training images instead.
        val: name of the folder of validation images. None holds out `val_fraction` instead.
        in_memory: decode all files once, in ``3 image_size²`` bytes each; False decodes a file on each
            access.
        mean: mean of red, green and blue in [0, 1]; by default ImageNet's.
        std: standard deviation of red, green and blue; by default ImageNet's.
        padding_mode: padding of images before a crop: zeros (``constant``), or the image mirrored at
            its edges (``reflect``).
        options: those of `ImageSource`.

    Raises:
        ConfigurationError: if a setting is out of its range.

    Example:
        >>> ImageFolder("nowhere", image_size=32).setup()
        Traceback (most recent call last):
        ...
        fl_lightning.core.errors.ConfigurationError: root: there is no folder nowhere/train. \
Images must be at nowhere/train/<class>/<name>.jpg, with one folder for each class
    """

    def __init__(
        self,
        root: str,
        *,
        image_size: int,
        train: str = "train",
        test: str | None = "test",
        val: str | None = None,
        in_memory: bool = True,
        mean: tuple[float, float, float] = _IMAGENET_MEAN,
        std: tuple[float, float, float] = _IMAGENET_STD,
        padding_mode: PaddingMode = "constant",
        **options: Any,
    ) -> None:
        super().__init__(image_size=image_size, **options)
        self.root = Path(root)
        self.folders = (train, test, val)
        self.in_memory = in_memory
        self.stored_size = image_size
        self.pipeline = PixelPipeline(
            tuple(mean),
            tuple(std),
            crop_padding=image_size // 8,
            padding_mode=padding_mode,
            horizontal_flip=True,
        )

    @override
    def finished(self, examples: ImageRows, *, trains: bool) -> ImageRows:
        rows = super().finished(examples, trains=trains)
        return ImageTensors(rows.images, rows.targets, rows.pipeline) if self.in_memory else rows

    @override
    def load(self) -> Loaded:
        train, test, val = self.folders
        class_names = _class_names(self.root / train)
        return Loaded(
            train=self._read(train, class_names),
            class_names=class_names,
            test=None if test is None else self._read(test, class_names),
            val=None if val is None else self._read(val, class_names),
        )

    def _read(self, name: str, class_names: tuple[str, ...]) -> ImageRows:
        folder = self.root / name
        found = set(_class_names(folder))
        missing, unknown = sorted(set(class_names) - found), sorted(found - set(class_names))
        if missing or unknown:
            raise ConfigurationError(
                f"root: {folder} must have the classes of the training images: add the folders {missing}, "
                f"remove the folders {unknown}"
            )
        paths, targets = [], []
        for target, class_name in enumerate(class_names):
            images = _image_paths(folder / class_name)
            paths += images
            targets += [target] * len(images)
        stored = partial(_decoded, paths, self.stored_size)
        return ImageRows(stored, torch.tensor(targets), self.pipeline)


def _decoded(paths: Sequence[Path], image_size: int, places: Tensor) -> Tensor:
    return decode_images([paths[place] for place in places.tolist()], image_size=image_size)


def _class_names(folder: Path) -> tuple[str, ...]:
    """Return the sorted class names, i.e. the names of the folders inside ``folder`` that are not hidden."""
    found = folder.is_dir()
    inside = [path for path in folder.iterdir() if path.is_dir()] if found else []
    names = sorted(path.name for path in inside if not path.name.startswith("."))
    if not names:
        problem = f"{folder} has no folders in it" if found else f"there is no folder {folder}"
        raise ConfigurationError(
            f"root: {problem}. Images must be at {folder}/<class>/<name>.jpg, with one folder for each class"
        )
    return tuple(names)


def _image_paths(folder: Path) -> list[Path]:
    """Return the sorted paths of all image files below ``folder``."""
    paths = sorted(path for path in folder.rglob("*") if path.suffix.lower() in EXTENSIONS)
    if not paths:
        raise ConfigurationError(
            f"root: {folder} has no image: add images or remove the folder. "
            f"Extensions of images are {', '.join(sorted(EXTENSIONS))}"
        )
    return paths


_NUM_THREADS = min(8, os.cpu_count() or 1)


def decode_images(paths: Sequence[Path], *, image_size: int) -> Tensor:
    """Decode image files to one tensor, uint8 of shape (N, 3, image_size, image_size).

    Raises:
        ConfigurationError: if a file cannot be read as an image.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     path = Path(folder, "red.png")
        ...     Image.new("RGB", (6, 4), "red").save(path)
        ...     decode_images([path], image_size=1).flatten()
        tensor([255,   0,   0], dtype=torch.uint8)
    """
    images = torch.empty(len(paths), 3, image_size, image_size, dtype=torch.uint8)
    array = images.permute(0, 2, 3, 1).numpy()  # the same memory, as Pillow orders it

    def decode_every(start: int) -> None:
        for index in range(start, len(paths), _NUM_THREADS):
            array[index] = _decode(paths[index], image_size)

    with ThreadPoolExecutor(_NUM_THREADS) as threads:
        for done in [threads.submit(decode_every, start) for start in range(_NUM_THREADS)]:
            done.result()
    return images


# errors of files that are cut off, damaged, or too large for the memory
_UNREADABLE = (OSError, ValueError, SyntaxError, Image.DecompressionBombError)


def _decode(path: Path, image_size: int) -> np.ndarray:
    """Decode one image file to an array, uint8 of shape (image_size, image_size, 3)."""
    size = (image_size, image_size)
    try:
        with Image.open(path) as image:
            mode = image.mode
            rgb = image.convert("RGB")
    except _UNREADABLE as error:
        raise ConfigurationError(
            f"{path} cannot be read as an image ({error}): replace or remove the file"
        ) from error
    if mode.startswith(("I", "F")):  # Pillow would clip larger numbers to 255
        raise ConfigurationError(
            f"{path} has pixels of more than 8 bits (mode {mode}): convert it to 8 bits per channel"
        )
    if rgb.size != size:
        rgb = ImageOps.fit(rgb, size, Image.Resampling.BILINEAR)
    return np.asarray(rgb)
