"""Your own images: a folder of folders, one for each class.

    root/train/<class>/*.jpg      root/test/<class>/*.jpg

The classes are numbered in the order of their sorted names. Files deeper down count too; what
counts as an image goes by the extension.
"""

from __future__ import annotations

from pathlib import Path
from typing import final

import torch

from fl_lightning.core.errors import ConfigurationError
from fl_lightning.data.sources.image_files import ImageFiles
from fl_lightning.data.sources.image_source import ImageSource, LoadedImages
from fl_lightning.data.sources.images import ImageSet
from fl_lightning.data.transforms import PaddingMode, PixelPipeline

EXTENSIONS = frozenset({".bmp", ".jpeg", ".jpg", ".png", ".ppm", ".tif", ".tiff", ".webp"})

_IMAGENET_MEAN = (0.485, 0.456, 0.406)
_IMAGENET_STD = (0.229, 0.224, 0.225)


@final
class ImageFolder(ImageSource):
    """Images from ``root/<train or test>/<class>/``, as RGB squares.

    Augmentation is a random crop after padding by an eighth of `image_size` (4 pixels at 32, as
    usual for CIFAR), and a random horizontal flip.

    Args:
        root: the folder that holds the others.
        image_size: height and width in pixels; the shorter side is resized to it and the centre kept.
        train: name of the folder of training images.
        test: name of the folder of test images, with the same classes. None holds a fifth of the
            training images out instead.
        val: name of the folder of validation images. None holds out `val_fraction` instead.
        in_memory: decode all files once, in ``3 image_size²`` bytes each; False decodes a file
            whenever it is needed.
        mean: mean of red, green and blue in [0, 1]; by default ImageNet's.
        std: standard deviation of red, green and blue; by default ImageNet's.
        padding_mode: with what images are padded before a crop: zeros (``constant``), or themselves
            mirrored at the edges (``reflect``).
        batch_size: examples a batch; the last batch of a pass may be smaller.
        augment: whether training images are cropped and flipped at random.
        val_fraction: part of the training images held out for validation, in [0, 1), of every
            class alike; 0 for none.
        classes: numbers of the classes whose images are kept, in all sets; labels stay as they are.
            None keeps all.
        seed: decides which images are held out and the order of central training. None takes the
            run's seed.

    Raises:
        ConfigurationError: if a setting is out of its range.

    Example:
        >>> ImageFolder("nowhere", image_size=32).setup()
        Traceback (most recent call last):
        ...
        fl_lightning.core.errors.ConfigurationError: root: there is no folder nowhere/train. \
Expected are images as nowhere/train/<class>/<name>.jpg, with one folder for each class
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
        batch_size: int = 64,
        augment: bool = True,
        val_fraction: float = 0.1,
        classes: list[int] | None = None,
        seed: int | None = None,
    ) -> None:
        super().__init__(
            batch_size=batch_size,
            augment=augment,
            image_size=image_size,
            val_fraction=val_fraction,
            classes=classes,
            seed=seed,
        )
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

    def setup(self, stage: str | None = None) -> None:
        """List and split the files and, for a set in memory, decode those that are used."""
        if hasattr(self, "train_set"):
            return
        super().setup(stage)
        if self.in_memory:
            for name in ("train_set", "val_set", "test_set"):
                setattr(self, name, getattr(self, name).in_memory())

    def load(self) -> LoadedImages:
        """List the files.

        Raises:
            ConfigurationError: if a folder or its images are missing, or classes differ.
        """
        train, test, val = self.folders
        class_names = _class_names(self.root / train)
        return LoadedImages(
            train=self._read(train, class_names),
            class_names=class_names,
            test=None if test is None else self._read(test, class_names),
            val=None if val is None else self._read(val, class_names),
        )

    def _read(self, name: str, class_names: tuple[str, ...]) -> ImageSet:
        folder = self.root / name
        _require_same_classes(folder, _class_names(folder), class_names)
        paths, targets = [], []
        for target, class_name in enumerate(class_names):
            found = _image_paths(folder / class_name)
            paths += found
            targets += [target] * len(found)
        pipeline = self.training_pipeline(self.pipeline)
        return ImageFiles(paths, torch.tensor(targets), pipeline, image_size=self.stored_size)


def _class_names(folder: Path) -> tuple[str, ...]:
    """Return the sorted names of the folders inside ``folder``, without hidden ones."""
    found = folder.is_dir()
    inside = [path for path in folder.iterdir() if path.is_dir()] if found else []
    names = sorted(path.name for path in inside if not path.name.startswith("."))
    if not names:
        problem = f"{folder} has no folders in it" if found else f"there is no folder {folder}"
        raise ConfigurationError(
            f"root: {problem}. Expected are images as {folder}/<class>/<name>.jpg, "
            "with one folder for each class"
        )
    return tuple(names)


def _require_same_classes(folder: Path, found: tuple[str, ...], expected: tuple[str, ...]) -> None:
    if found != expected:
        missing = sorted(set(expected) - set(found))
        unknown = sorted(set(found) - set(expected))
        raise ConfigurationError(
            f"root: {folder} must have the classes of the training images; missing: {missing}, "
            f"not among them: {unknown}. Add or remove these folders"
        )


def _image_paths(folder: Path) -> list[Path]:
    """Return the image files below ``folder``, sorted."""
    paths = sorted(path for path in folder.rglob("*") if path.suffix.lower() in EXTENSIONS)
    if not paths:
        raise ConfigurationError(
            f"root: {folder} holds no image; add some or remove the folder. "
            f"Extensions read: {', '.join(sorted(EXTENSIONS))}"
        )
    return paths
