"""The one batch that a proxy sees: noise, or images of a folder."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from fl_lightning.core.errors import ConfigurationError
from fl_lightning.core.seeds import torch_generator

if TYPE_CHECKING:
    from torchvision.datasets import ImageFolder


def noise_batch(
    batch_size: int, *, side: int, in_channels: int, num_classes: int, seed: int
) -> tuple[Tensor, Tensor]:
    """Return images of Gaussian noise with random labels: for a proxy where there is no data.

    Args:
        batch_size: how many.
        side: of the images, in pixels.
        in_channels: of the images.
        num_classes: of the labels.
        seed: of the draws.
    """
    generator = torch_generator(seed, "proxy batch")
    images = torch.randn(batch_size, in_channels, side, side, generator=generator)
    return images, torch.randint(num_classes, (batch_size,), generator=generator)


def folder_batch(
    folder: str | Path,
    batch_size: int,
    *,
    side: int,
    in_channels: int,
    num_classes: int,
    seed: int,
) -> tuple[Tensor, Tensor]:
    """Return random images of a folder, one sub-folder a class, of mean 0 and deviation 1.

    Args:
        folder: of the sub-folders.
        batch_size: how many.
        side: to resize them to, in pixels.
        in_channels: 1 or 3.
        num_classes: of the networks, no fewer than the folder has.
        seed: of the draws.

    Raises:
        ConfigurationError: if there is no such folder, it does not fit the networks, or one of the
            images cannot be read.
    """
    from torchvision.datasets import ImageFolder
    from torchvision.transforms import v2

    steps = [v2.PILToTensor(), v2.Grayscale(in_channels), v2.Resize((side, side), antialias=True)]
    if in_channels == 3:
        del steps[1]
    if in_channels not in (1, 3):
        raise ConfigurationError(
            f"images: in_channels must be 1 or 3 for images, got {in_channels}"
        )
    try:
        data = ImageFolder(str(folder), v2.Compose(steps))
    except (OSError, RuntimeError) as error:
        raise ConfigurationError(f"images {folder}: {str(error).splitlines()[0]}") from None
    if len(data.classes) > num_classes:
        raise ConfigurationError(
            f"images {folder}: {len(data.classes)} classes, and num_classes is {num_classes}: raise it"
        )
    generator = torch_generator(seed, "proxy batch")
    chosen = torch.randperm(len(data), generator=generator)[:batch_size].tolist()
    images, labels = zip(*(_read(data, number) for number in chosen), strict=True)
    batch = torch.stack(images).float()
    return (batch - batch.mean()) / batch.std().clamp_min(1e-6), torch.tensor(labels)


def _read(data: ImageFolder, number: int) -> tuple[Tensor, int]:
    try:
        image, label = data[number]
    except (OSError, SyntaxError, ValueError) as error:  # Pillow's, of broken files
        raise ConfigurationError(
            f"images: {data.samples[number][0]} cannot be read ({type(error).__name__}): replace it or "
            "remove it"
        ) from error
    return image, label
