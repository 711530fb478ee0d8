"""Base of image sources, and data sets of images with a pixel pipeline.

Training images may be augmented; those for validation and test are not. A batch, `gather(indices)`, is one
read of stored bytes and one pass of the pixel pipeline.
"""

from __future__ import annotations

import copy
from abc import ABC
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any, Self, final

import torch
from torch import Tensor
from typing_extensions import override

from fl_lightning.core.errors import ConfigurationError
from fl_lightning.data.sources.rows import StoredRows
from fl_lightning.data.sources.source import Source
from fl_lightning.data.transforms import PixelPipeline

MOST_PIXELS = 16_384  # of a side


class ImageSource(Source, ABC):
    """Base of all image sources: options for size, classes and augmentation.

    Args:
        augment: whether training images are cropped and flipped at random, as suits the set.
        image_size: height and width of the model's inputs, in pixels; None for the stored size.
        classes: numbers of the classes whose images are kept, in all three sets; None keeps all.
            Labels and the held-out images of a class do not depend on it, so that models trained on
            different classes can be combined.
        batch_size: examples per batch; the last batch of a pass may be smaller.
        options: those of `Source`.

    Raises:
        ConfigurationError: if a setting is out of its range.
    """

    def __init__(
        self,
        *,
        augment: bool = True,
        image_size: int | None = None,
        classes: list[int] | None = None,
        batch_size: int = 64,
        **options: Any,
    ) -> None:
        self.augment, self.image_size, self.classes = augment, image_size, classes
        super().__init__(batch_size=batch_size, **options)

    @override
    def issues(self) -> Iterator[str]:
        size, classes = self.image_size, self.classes
        if size is not None and not 1 <= size <= MOST_PIXELS:
            yield f"image_size must be from 1 to {MOST_PIXELS} pixels, got {size}: null is off"
        if classes is not None and (not classes or len(set(classes)) < len(classes)):
            yield f"classes must be at least one number, all different, got {list(classes)}"

    def finished(self, examples: ImageRows, *, trains: bool) -> ImageRows:
        """Return a set's images of the chosen `classes`, to be resized; only training images are augmented.

        Classes are selected after the split, so that the split does not depend on them.
        """
        classes = range(self.num_classes) if self.classes is None else self.classes
        if unknown := sorted(set(classes) - set(range(self.num_classes))):
            raise ConfigurationError(
                f"classes must be numbers from 0 to {self.num_classes - 1}, got {unknown}: "
                f"the classes are {', '.join(self.class_names)}, in this order"
            )
        if self.classes is not None:
            kept = torch.isin(examples.targets, torch.tensor(list(classes)))
            examples = examples.select(kept.nonzero().flatten())
        examples = examples.through(replace(examples.pipeline, image_size=self.image_size))
        return examples if trains and self.augment else examples.evaluation()


class ImageRows(StoredRows):
    """Labelled images of one size, converted to model inputs by a `PixelPipeline`; for example `ImageTensors`.

    Args:
        stored: function from numbers of images, int64 of shape (B,), to their bytes, uint8 of shape
            (B, C, H, W).
        targets: the class of each image, integers of shape (N,).
        pipeline: transforms of a batch.
    """

    def __init__(
        self, stored: Callable[[Tensor], Tensor], targets: Tensor, pipeline: PixelPipeline
    ) -> None:
        super().__init__(len(targets))
        self._stored, self._targets = stored, targets.to(torch.long)
        self.pipeline = pipeline

    @property
    def targets(self) -> Tensor:
        """The class of each image, int64, shape (N,)."""
        return self._targets[self._places]

    @property
    def images(self) -> Tensor:
        """Stored pixels of all images, uint8, shape (N, C, H, W)."""
        return self._stored(self._places)

    def through(self, pipeline: PixelPipeline) -> Self:
        """Return a data set of the same images that another `PixelPipeline` converts to model inputs."""
        other = copy.copy(self)
        other.pipeline = pipeline
        return other

    @override
    def evaluation(self) -> Self:
        return self.through(self.pipeline.evaluation())

    @property
    @override
    def is_deterministic(self) -> bool:
        return self.pipeline == self.pipeline.evaluation()

    @override
    def read(self, places: Tensor) -> tuple[Tensor, Tensor]:
        return self.pipeline(self._stored(places)), self._targets.index_select(0, places)


@final
class ImageTensors(ImageRows):
    """Labelled uint8 images in memory, converted to model inputs by a `PixelPipeline`.

    Args:
        images: uint8, shape (N, C, H, W). 60,000 CIFAR images take 184 MB.
        targets: the class of each image, integers of shape (N,).
        pipeline: transforms of a batch, with one mean and std per channel.

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
                f"targets must have shape ({len(images)},), one class per image, "
                f"got {tuple(targets.shape)}"
            )
        if len(pipeline.mean) != images.shape[1]:
            raise ConfigurationError(
                f"mean and std of the pipeline have {len(pipeline.mean)} channels, the images "
                f"{images.shape[1]}: give one number per channel"
            )
        super().__init__(partial(torch.index_select, images, 0), targets, pipeline)
