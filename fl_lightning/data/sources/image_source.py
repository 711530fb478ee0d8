"""Image data sets as Lightning data modules that serve whole batches.

A source has three sets of images: training (augmented), validation and test (not augmented). It can
train a model centrally, and a federation divides its training set among clients.

Reading a batch example by example costs more than the local step itself for small models. So a set of
images returns a whole batch for a list of indices: `gather(indices)` is one `index_select` and one pass
of the pixel pipeline. Loaders use this as well (`batch_size=None` and a `BatchSampler`), so that worker
processes would have nothing to do. `ImageTensors` keeps the bytes in memory,
`fl_lightning.data.sources.image_folder.ImageFiles` decodes files on access.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Self, final

import torch
from lightning.pytorch import LightningDataModule
from torch import Tensor
from torch.utils.data import BatchSampler, DataLoader, Dataset, RandomSampler, SequentialSampler

from fl_lightning.core.errors import ConfigurationError
from fl_lightning.core.seeds import derive_seed, run_seed, torch_generator
from fl_lightning.data.partitions.partition import stratified_split
from fl_lightning.data.transforms import PixelPipeline

MOST_PIXELS = 16_384  # of a side
TEST_FRACTION = 0.2  # held out of sets that come without a test set

BatchLoader = DataLoader[tuple[Tensor, Tensor]]


@dataclass(frozen=True)
class LoadedImages:
    """The images of a source; a set that is None is held out from the training images."""

    train: ImageSet
    class_names: tuple[str, ...]
    test: ImageSet | None = None
    val: ImageSet | None = None


class ImageSource(LightningDataModule, ABC):
    """Base of all image sources: settings, split, loaders. `Digits` is an example.

    Args:
        batch_size: examples per batch; the last batch of a pass may be smaller.
        augment: whether training images are cropped and flipped at random, as suits the set.
        image_size: height and width of the model's inputs, in pixels; None for the stored size.
        val_fraction: fraction of the training images, of every class equally, held out for validation,
            in [0, 1). Ignored if the set has validation images of its own.
        classes: numbers of the classes whose images are kept, in all three sets; None keeps all.
            Labels and the held-out images of a class do not change, so that models of different classes
            fit together.
        seed: seed of the held-out images and the order of central training; the run's seed if None.

    Attributes:
        train_set: training images, after `setup`.
        val_set: validation images, after `setup`.
        test_set: test images, after `setup`.
        class_names: names of the classes in the order of their numbers, after `setup`.
        num_classes: number of classes, after `setup`.

    Raises:
        ConfigurationError: if a setting is out of its range.
    """

    train_set: ImageSet
    val_set: ImageSet
    test_set: ImageSet
    class_names: tuple[str, ...]
    num_classes: int

    def __init__(
        self,
        *,
        batch_size: int = 64,
        augment: bool = True,
        image_size: int | None = None,
        val_fraction: float = 0.1,
        classes: list[int] | None = None,
        seed: int | None = None,
    ) -> None:
        issues = []
        if batch_size < 1:
            issues.append(f"batch_size must be >= 1 example, got {batch_size}")
        if image_size is not None and not 1 <= image_size <= MOST_PIXELS:
            issues.append(
                f"image_size must be from 1 to {MOST_PIXELS} pixels, got {image_size}: null is off"
            )
        if not 0 <= val_fraction < 1:
            issues.append(f"val_fraction must be in [0, 1), got {val_fraction}: 0 holds out none")
        if classes is not None and (not classes or len(set(classes)) < len(classes)):
            issues.append(f"classes must be different numbers, at least one, got {list(classes)}")
        if issues:
            raise ConfigurationError("; ".join(issues))
        super().__init__()
        self.batch_size = batch_size
        self.augment = augment
        self.image_size = image_size
        self.val_fraction = val_fraction
        self.classes = classes
        self.seed = seed

    @abstractmethod
    def load(self) -> LoadedImages:
        """Read the images; called once, by `setup`."""

    def setup(self, stage: str | None = None) -> None:
        """Load and split the images, the first time; later calls do nothing."""
        if hasattr(self, "train_set"):
            return
        loaded = self.load()
        seed = run_seed(self.seed)
        train, test, val = loaded.train, loaded.test, loaded.val
        if test is None:
            train, test = _hold_out(train, TEST_FRACTION, derive_seed(seed, "test split"))
        if val is None:
            train, val = _hold_out(train, self.val_fraction, derive_seed(seed, "val split"))
        self.class_names = loaded.class_names
        self.num_classes = len(loaded.class_names)
        self.val_set, self.test_set = (
            self._chosen(val).evaluation(),
            self._chosen(test).evaluation(),
        )
        self.train_set = self._chosen(train)

    def _chosen(self, images: ImageSet) -> ImageSet:
        """Select the images of `classes`, after the split, so that the split does not depend on them."""
        if self.classes is None:
            return images
        unknown = sorted(set(self.classes) - set(range(self.num_classes)))
        if unknown:
            raise ConfigurationError(
                f"classes must be numbers from 0 to {self.num_classes - 1}, got {unknown}: "
                f"the classes are {', '.join(self.class_names)}, in this order"
            )
        kept = torch.isin(images.targets, torch.tensor(list(self.classes)))
        return images.select(kept.nonzero().flatten())

    def training_pipeline(self, pipeline: PixelPipeline) -> PixelPipeline:
        """Return a set's pipeline with the image size and the augmentation of the settings."""
        sized = replace(pipeline, image_size=self.image_size)
        return sized if self.augment else sized.evaluation()

    def train_dataloader(self) -> BatchLoader:
        """Return batches of the augmented training images, in a new order each pass."""
        generator = torch_generator(run_seed(self.seed), "centralized")
        return self._batches(self.train_set, RandomSampler(self.train_set, generator=generator))

    def val_dataloader(self) -> BatchLoader | list[BatchLoader]:
        """Return batches of the validation images in order, or no loader if there are none."""
        return self._in_order(self.val_set) if len(self.val_set) else []

    def test_dataloader(self) -> BatchLoader:
        """Return batches of the test images, in order."""
        return self._in_order(self.test_set)

    def predict_dataloader(self) -> BatchLoader:
        """Return batches of the test images, in order."""
        return self._in_order(self.test_set)

    def _in_order(self, images: ImageSet) -> BatchLoader:
        return self._batches(images, SequentialSampler(images))

    def _batches(self, images: ImageSet, order: RandomSampler | SequentialSampler) -> BatchLoader:
        batches: Any = BatchSampler(order, self.batch_size, drop_last=False)
        return DataLoader(images, batch_size=None, sampler=batches)


def _hold_out(images: ImageSet, fraction: float, seed: int) -> tuple[ImageSet, ImageSet]:
    kept, held_out = stratified_split(images.targets, fraction, seed=seed)
    return images.select(kept), images.select(held_out)


class ImageSet(Dataset[tuple[Tensor, Tensor]], ABC):
    """Labelled images of one size with a pixel pipeline; see `ImageTensors` for an example.

    Attributes:
        targets: the class of each image, int64, shape (N,).
        pipeline: transforms of a batch.
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
        """True if `gather` always returns the same batch, i.e. without augmentation."""
        return self.pipeline == self.pipeline.evaluation()

    def gather(self, indices: Tensor) -> tuple[Tensor, Tensor]:
        """Return a batch: images (B, C, h, w) in float32 and labels (B,) in int64.

        Args:
            indices: indices of the examples, int64 of shape (B,), each in [0, N).
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
