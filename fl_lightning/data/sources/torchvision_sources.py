"""CIFAR-10, CIFAR-100, MNIST and Fashion-MNIST, from the files torchvision reads.

torchvision finds, checks, downloads and parses the files; the images then live in memory as
bytes. Means and standard deviations are those of the training pixels in [0, 1].
"""

from __future__ import annotations

from abc import ABC
from typing import Any, ClassVar, final

import torch

from fl_lightning.core.errors import ConfigurationError
from fl_lightning.data.sources.image_source import ImageSource, ImageTensors
from fl_lightning.data.sources.source import Loaded
from fl_lightning.data.transforms import PixelPipeline


class TorchvisionSource(ImageSource, ABC):
    """Base of data sets that torchvision can read under the same class name, e.g. `CIFAR10`.

    Args:
        root: folder of the files.
        download: whether `prepare_data` downloads missing files.
        batch_size: examples per batch; the last batch of a pass may be smaller.
        augment: whether training images are cropped and flipped at random, as suits the set.
        image_size: height and width of the model's inputs, in pixels; None for the stored size.
        val_fraction: fraction of the training images, of every class equally, held out for validation,
            in [0, 1).
        classes: numbers of the classes whose images are kept, in all sets; labels do not change. None
            keeps all.
        seed: seed of the held-out images and the order of central training; the run's seed if None.
    """

    pipeline: ClassVar[PixelPipeline]
    files: ClassVar[str]

    def __init__(
        self,
        root: str = "data",
        *,
        download: bool = False,
        batch_size: int = 64,
        augment: bool = True,
        image_size: int | None = None,
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
        self.root = root
        self.download = download

    def prepare_data(self) -> None:
        """Download missing files if `download` is set."""
        if self.download:
            self._read(train=True, download=True)

    def load(self) -> Loaded:
        """Read training and test images into memory.

        Raises:
            ConfigurationError: if files are missing or damaged.
        """
        train, test = self._read(train=True), self._read(train=False)
        return Loaded(
            self._images(train), test=self._images(test), class_names=tuple(train.classes)
        )

    def _images(self, data_set: Any) -> ImageTensors:
        pixels = torch.as_tensor(data_set.data)  # (N, H, W), or with colours (N, H, W, 3)
        pixels = pixels.unsqueeze(1) if pixels.ndim == 3 else pixels.permute(0, 3, 1, 2)
        targets = torch.as_tensor(data_set.targets)
        pipeline = self.training_pipeline(self.pipeline)
        return ImageTensors(pixels.contiguous(), targets, pipeline)

    def _read(self, *, train: bool, download: bool = False) -> Any:
        import torchvision  # a second to import, and only needed here

        name = next(
            kind.__name__
            for kind in type(self).__mro__
            if hasattr(torchvision.datasets, kind.__name__)
        )
        try:
            return getattr(torchvision.datasets, name)(self.root, train=train, download=download)
        except (RuntimeError, OSError) as error:  # OSError: no network, no right to write
            failed = "could not be downloaded" if download else "are missing or damaged"
            raise ConfigurationError(
                f"{name}: the files under root={self.root!r} {failed}. Set download: true of this "
                "source (--data...download true) if there is a network, or put there "
                f"{self.files}. torchvision says: {error}"
            ) from error


@final
class CIFAR10(TorchvisionSource):
    """60,000 colour photographs of 32x32 pixels in 10 classes, 10,000 of them for the test.

    Augmentation is a random crop after padding by 4 pixels, and a random horizontal flip.
    Source: Krizhevsky 2009, *Learning multiple layers of features from tiny images*.

    Example:
        >>> CIFAR10("nowhere").setup()  # doctest: +ELLIPSIS
        Traceback (most recent call last):
        ...
        fl_lightning.core.errors.ConfigurationError: CIFAR10: the files under root='nowhere' are \
missing or damaged. Set download: true ...
    """

    files: ClassVar = "the folder cifar-10-batches-py, unpacked from cifar-10-python.tar.gz"
    pipeline: ClassVar = PixelPipeline(
        mean=(0.4914, 0.4822, 0.4465),
        std=(0.2470, 0.2435, 0.2616),
        crop_padding=4,
        horizontal_flip=True,
    )


@final
class CIFAR100(TorchvisionSource):
    """60,000 colour photographs of 32x32 pixels in 100 classes, 10,000 of them for the test.

    Augmentation and source as for `CIFAR10`; the labels are the 100 fine ones.
    """

    files: ClassVar = "the folder cifar-100-python, unpacked from cifar-100-python.tar.gz"
    pipeline: ClassVar = PixelPipeline(
        mean=(0.5071, 0.4865, 0.4409),
        std=(0.2673, 0.2564, 0.2762),
        crop_padding=4,
        horizontal_flip=True,
    )


_IDX_FILES = (
    "train-images-idx3-ubyte, train-labels-idx1-ubyte, t10k-images-idx3-ubyte and "
    "t10k-labels-idx1-ubyte"
)


@final
class MNIST(TorchvisionSource):
    """70,000 handwritten digits of 28x28 pixels in grey, 10,000 of them for the test.

    Augmentation is a random shift by up to 2 pixels; a mirrored digit is not a digit.
    Source: LeCun et al. 1998, *Gradient-based learning applied to document recognition*.
    """

    files: ClassVar = f"MNIST/raw/ with {_IDX_FILES}"
    pipeline: ClassVar = PixelPipeline(mean=(0.1307,), std=(0.3081,), crop_padding=2)


@final
class FashionMNIST(TorchvisionSource):
    """70,000 articles of clothing of 28x28 pixels in grey, 10,000 of them for the test.

    Augmentation is a random shift by up to 2 pixels, and a random horizontal flip.
    Source: Xiao et al. 2017 (1708.07747).
    """

    files: ClassVar = f"FashionMNIST/raw/ with {_IDX_FILES}"
    pipeline: ClassVar = PixelPipeline(
        mean=(0.2860,), std=(0.3530,), crop_padding=2, horizontal_flip=True
    )
