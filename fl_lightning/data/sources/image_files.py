"""Image files decoded into batches of bytes.

Files become RGB of one square size: the shorter side is resized to it and the centre kept, in one
step; square images are simply resized.
Decoding runs in a few threads: Pillow lets go of the interpreter while it decodes.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import final

import numpy as np
import torch
from PIL import Image, ImageOps
from torch import Tensor

from fl_lightning.core.errors import ConfigurationError
from fl_lightning.data.sources.images import ImageSet, ImageTensors
from fl_lightning.data.transforms import PixelPipeline

_NUM_THREADS = min(8, os.cpu_count() or 1)


def decode_images(paths: Sequence[Path], *, image_size: int) -> Tensor:
    """Return the files' pixels, uint8 of shape (N, 3, image_size, image_size).

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


def _decode(path: Path, image_size: int) -> np.ndarray:
    """Return one file's pixels, uint8 of shape (image_size, image_size, 3)."""
    size = (image_size, image_size)
    try:
        with Image.open(path) as image:
            rgb = image.convert("RGB")
    except OSError as error:
        raise ConfigurationError(
            f"{path} cannot be read as an image ({error}): replace or remove the file"
        ) from error
    if rgb.size != size:
        rgb = ImageOps.fit(rgb, size, Image.Resampling.BILINEAR)
    return np.asarray(rgb)


@final
class ImageFiles(ImageSet):
    """Images decoded from their files each time a batch is gathered: for sets beyond the memory.

    Args:
        paths: the files.
        targets: the class of each image, int64 of shape (N,).
        pipeline: what is done to a batch on its way out, for three channels.
        image_size: height and width to decode to, in pixels.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     path = Path(folder, "white.png")
        ...     Image.new("L", (4, 4), 255).save(path)
        ...     pipeline = PixelPipeline((0.0,) * 3, (1.0,) * 3)
        ...     images = ImageFiles([path], torch.tensor([7]), pipeline, image_size=1)
        ...     images[0][0].flatten(), images[[0, 0]][1]
        (tensor([1., 1., 1.]), tensor([7, 7]))
    """

    def __init__(
        self, paths: Sequence[Path], targets: Tensor, pipeline: PixelPipeline, *, image_size: int
    ) -> None:
        self.paths = paths
        self.targets = targets
        self.pipeline = pipeline
        self.image_size = image_size

    def pixels(self, indices: Tensor) -> Tensor:
        """Return the decoded images, uint8 of shape (B, C, H, W), for ``indices`` (B,) >= 0."""
        paths = [self.paths[index] for index in indices.tolist()]
        return decode_images(paths, image_size=self.image_size)

    def select(self, indices: Tensor) -> ImageFiles:
        """Return the set of these files only, in this order, with the same pipeline."""
        paths = [self.paths[index] for index in indices.tolist()]
        return ImageFiles(paths, self.targets[indices], self.pipeline, image_size=self.image_size)

    def evaluation(self) -> ImageFiles:
        """Return a view of the same files whose pipeline does not augment."""
        pipeline = self.pipeline.evaluation()
        return ImageFiles(self.paths, self.targets, pipeline, image_size=self.image_size)

    def in_memory(self) -> ImageTensors:
        """Decode every file once and return the same set in memory."""
        pixels = decode_images(self.paths, image_size=self.image_size)
        return ImageTensors(pixels, self.targets, self.pipeline)
