"""Labelled images that hand out whole batches.

A client's local step needs one batch; reading it example by example and stacking the pieces costs
more than the step itself for small models. So a set of images answers a list of indices with a
finished batch: `gather(indices)` is one `index_select` and one pass of the pixel pipeline.

Where the bytes are is the subclass's affair: `ImageTensors` here keeps them in memory,
`fl_lightning.data.sources.image_files.ImageFiles` decodes files when asked.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Self, final

import torch
from torch import Tensor
from torch.utils.data import Dataset

from fl_lightning.core.errors import ConfigurationError
from fl_lightning.data.transforms import PixelPipeline


class ImageSet(Dataset[tuple[Tensor, Tensor]], ABC):
    """Labelled images of one size with a pixel pipeline; see `ImageTensors` for an example.

    Attributes:
        targets: the class of each image, int64, shape (N,).
        pipeline: what is done to a batch on its way out.
    """

    targets: Tensor
    pipeline: PixelPipeline

    @abstractmethod
    def pixels(self, indices: Tensor) -> Tensor:
        """Return the stored images, uint8 of shape (B, C, H, W), for ``indices`` (B,) >= 0."""

    @abstractmethod
    def select(self, indices: Tensor) -> Self:
        """Return the set of these examples only, in this order, with the same pipeline."""

    @abstractmethod
    def evaluation(self) -> Self:
        """Return a view of the same storage whose pipeline does not augment."""

    @property
    def is_deterministic(self) -> bool:
        """Whether `gather` gives the same batch every time: it does without augmentation."""
        return self.pipeline == self.pipeline.evaluation()

    def gather(self, indices: Tensor) -> tuple[Tensor, Tensor]:
        """Return a batch: images (B, C, h, w) in float32 and labels (B,) in int64.

        Args:
            indices: which examples, int64 of shape (B,), each in [0, N).
        """
        return self.pipeline(self.pixels(indices)), self.targets.index_select(0, indices)

    def __len__(self) -> int:
        return len(self.targets)

    def __getitem__(self, index: int | Sequence[int] | Tensor) -> tuple[Tensor, Tensor]:
        """Return (image, label) for a number, a batch for a list or a tensor of them."""
        indices = torch.as_tensor(index, dtype=torch.long)
        if indices.ndim:
            return self.gather(indices)
        position = range(len(self))[int(indices)]  # IndexError past the end, -1 is the last
        images, targets = self.gather(torch.tensor([position]))
        return images[0], targets[0]


@final
class ImageTensors(ImageSet):
    """Images in memory, as bytes.

    Args:
        images: uint8, shape (N, C, H, W). 60,000 CIFAR images take 184 MB.
        targets: the class of each image, whole numbers of shape (N,).
        pipeline: what is done to a batch on its way out, with one mean and std a channel.

    Raises:
        ConfigurationError: if shapes or types do not fit together.

    Example:
        >>> pipeline = PixelPipeline(mean=(0.0,), std=(1.0,))
        >>> pixels = torch.arange(0, 250, 50, dtype=torch.uint8).view(5, 1, 1, 1)
        >>> images = ImageTensors(pixels, torch.tensor([0, 1, 2, 3, 4]), pipeline)
        >>> batch, labels = images.gather(torch.tensor([1, 4]))
        >>> batch.flatten(), labels
        (tensor([0.1961, 0.7843]), tensor([1, 4]))
        >>> image, label = images[-1]
        >>> image.shape, label
        (torch.Size([1, 1, 1]), tensor(4))
    """

    def __init__(self, images: Tensor, targets: Tensor, pipeline: PixelPipeline) -> None:
        if images.dtype != torch.uint8 or images.ndim != 4:
            raise ConfigurationError(
                "images must be uint8 of shape (N, C, H, W), got "
                f"{images.dtype} of shape {tuple(images.shape)}: scale pixels to 0..255"
            )
        if targets.shape != images.shape[:1]:
            raise ConfigurationError(
                f"targets must have shape ({len(images)},), one class an image, "
                f"got {tuple(targets.shape)}"
            )
        if len(pipeline.mean) != images.shape[1]:
            raise ConfigurationError(
                f"mean and std of the pipeline have {len(pipeline.mean)} channels, the images "
                f"{images.shape[1]}: give one number a channel"
            )
        self.images = images
        self.targets = targets.to(torch.long)
        self.pipeline = pipeline

    def pixels(self, indices: Tensor) -> Tensor:
        """Return the stored images, uint8 of shape (B, C, H, W), for ``indices`` (B,) >= 0."""
        return self.images.index_select(0, indices)

    def select(self, indices: Tensor) -> ImageTensors:
        """Return a copy of these examples only, in this order, with the same pipeline."""
        return ImageTensors(self.pixels(indices), self.targets[indices], self.pipeline)

    def evaluation(self) -> ImageTensors:
        """Return a view of the same storage whose pipeline does not augment."""
        return ImageTensors(self.images, self.targets, self.pipeline.evaluation())
