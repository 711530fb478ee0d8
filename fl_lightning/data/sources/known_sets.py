"""Data sources of well-known sets: digits and iris of scikit-learn, CIFAR, MNIST and others of torchvision.

The sets of scikit-learn need no download. torchvision finds, checks, downloads and parses files; the images
then live in memory as bytes. Means and standard deviations are those of the training pixels in [0, 1].

Sources: Alpaydin and Kaynak 1998, *Optical recognition of handwritten digits*, UCI Machine Learning
Repository (scikit-learn has its test part); Fisher 1936, *The use of multiple measurements in taxonomic
problems*, Annals of Eugenics 7.
"""

from __future__ import annotations

import json
import string
from abc import ABC
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any, ClassVar, final

import numpy as np
import torch
from torch import Tensor
from typing_extensions import override

from fl_lightning.core.errors import ConfigurationError
from fl_lightning.data.sources.image_source import ImageSource, ImageTensors
from fl_lightning.data.sources.rows import TensorRows
from fl_lightning.data.sources.source import Loaded, Source
from fl_lightning.data.transforms import PixelPipeline


@final
class Digits(ImageSource):
    """The 1,797 handwritten digits of scikit-learn: 8x8 pixels, 16 grey levels, 10 classes.

    A fifth is the test set, `val_fraction` of the rest the validation set, of every class equally and
    drawn by `seed`.

    Args:
        augment: whether training digits are shifted at random by up to one pixel. Off by default:
            these digits are centred, and a pixel is an eighth of one. After 30 epochs a small CNN,
            perceptron and transformer have a test accuracy of 98.5, 98.0 and 92.0 % without it and
            98.1, 93.2 and 84.0 % with it (means of three seeds).
        options: those of `ImageSource`.

    Example:
        >>> digits = Digits(batch_size=32)
        >>> digits.setup()
        >>> len(digits.train_set), len(digits.val_set), len(digits.test_set), digits.num_classes
        (1294, 144, 359, 10)
        >>> images, labels = next(iter(digits.train_dataloader()))
        >>> images.shape, images.dtype, labels.shape
        (torch.Size([32, 1, 8, 8]), torch.float32, torch.Size([32]))
    """

    pipeline: ClassVar = PixelPipeline(mean=(0.3053,), std=(0.3760,), crop_padding=1)

    def __init__(self, *, augment: bool = False, **options: Any) -> None:
        super().__init__(augment=augment, **options)

    @override
    def load(self) -> Loaded:
        table = _table("digits.csv.gz")  # a row has 64 grey levels and the digit
        pixels = table[:, :64].view(-1, 1, 8, 8).mul(255 / 16).round().to(torch.uint8)
        images = ImageTensors(pixels, table[:, 64], self.pipeline)
        return Loaded(images, class_names=tuple("0123456789"))


@final
class Iris(Source):
    """The 150 iris flowers: four features in centimetres, and the species, 0 to 2.

    Args:
        batch_size: flowers per batch.
        val_fraction: fraction for validation, in [0, 1), of the flowers that are not for the test.
        options: those of `Source`.

    Example:
        >>> iris = Iris(seed=0)
        >>> iris.setup("fit")
        >>> features, species = next(iter(iris.val_dataloader()))
        >>> features.shape, species.bincount()
        (torch.Size([24, 4]), tensor([8, 8, 8]))
    """

    def __init__(self, *, batch_size: int = 150, val_fraction: float = 0.2, **options: Any) -> None:
        super().__init__(batch_size=batch_size, val_fraction=val_fraction, **options)

    @override
    def load(self) -> Loaded:
        table = _table("iris.csv", skiprows=1)  # a row has four lengths and the species
        rows = TensorRows([table[:, :4].float(), table[:, 4].long()])
        return Loaded(rows, class_names=("setosa", "versicolor", "virginica"))


def _table(file: str, *, skiprows: int = 0) -> Tensor:
    """Read a data file of the scikit-learn package as a table, without the slow import of scikit-learn."""
    scikit_learn = find_spec("sklearn")
    assert scikit_learn is not None  # a dependency of this package
    assert scikit_learn.origin is not None
    path = Path(scikit_learn.origin).parent / "datasets" / "data" / file
    return torch.from_numpy(np.loadtxt(path, delimiter=",", skiprows=skiprows))


class TorchvisionSource(ImageSource, ABC):
    """Base of data sets that torchvision can read under the same class name, e.g. `CIFAR10`.

    Args:
        root: folder of the files.
        download: whether `prepare_data` downloads missing files.
        options: those of `ImageSource`.
    """

    pipeline: ClassVar[PixelPipeline]
    files: ClassVar[str]

    def __init__(self, root: str = "data", *, download: bool = False, **options: Any) -> None:
        super().__init__(test_fraction=0.0, **options)  # these data sets have test sets
        self.root, self.download = root, download

    def prepare_data(self) -> None:
        """Download the data set's missing files if the option `download` is set."""
        if self.download:
            self._read(train=True, download=True)

    def torchvision_options(self) -> dict[str, Any]:
        """Return further keyword arguments for torchvision's data set class; none by default."""
        return {}

    @override
    def load(self) -> Loaded:
        train, test = self._read(train=True), self._read(train=False)
        return Loaded(
            self._images(train), test=self._images(test), class_names=tuple(train.classes)
        )

    def _images(self, data_set: Any) -> ImageTensors:
        pixels = torch.as_tensor(data_set.data)  # (N, H, W), or with colours (N, H, W, 3)
        pixels = pixels.unsqueeze(1) if pixels.ndim == 3 else pixels.permute(0, 3, 1, 2)
        targets = torch.as_tensor(data_set.targets)
        return ImageTensors(pixels.contiguous(), targets, self.pipeline)

    def _read(self, *, train: bool, download: bool = False) -> Any:
        import torchvision  # a second to import, and only needed here

        name = next(
            kind.__name__
            for kind in type(self).__mro__
            if hasattr(torchvision.datasets, kind.__name__)
        )
        try:
            return getattr(torchvision.datasets, name)(
                self.root, train=train, download=download, **self.torchvision_options()
            )
        except (RuntimeError, OSError) as error:  # OSError: no network, no right to write
            failed = "could not be downloaded" if download else "are missing or damaged"
            raise ConfigurationError(
                f"{name}: the files under root={self.root!r} {failed}. Set this source's option "
                f"download: true if there is a network, or put there {self.files}. torchvision says: {error}"
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
missing or damaged. Set this source's option download: true ...
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


@final
class EMNIST(TorchvisionSource):
    """Handwritten letters and digits of NIST, in the format of MNIST: 28x28 pixels in grey.

    Augmentation is a random shift by up to 2 pixels.
    Source: Cohen et al. 2017, *EMNIST: an extension of MNIST to handwritten letters* (1702.05373).

    Args:
        root: folder of the files.
        split: selection of images: ``balanced`` (131,600 images in 47 classes), ``byclass`` (814,255 in
            62), ``bymerge`` (814,255 in 47), ``letters`` (145,600; its 26 classes are 1 to 26), ``digits``
            (280,000) or ``mnist`` (70,000).
        options: those of `TorchvisionSource`.
    """

    files: ClassVar = (
        "EMNIST/raw/ with the files of gzip.zip, e.g. emnist-balanced-train-images-idx3-ubyte"
    )
    pipeline: ClassVar = PixelPipeline(mean=(0.1751,), std=(0.3332,), crop_padding=2)

    def __init__(self, root: str = "data", *, split: str = "balanced", **options: Any) -> None:
        self.split = split
        super().__init__(root, **options)

    @override
    def issues(self) -> Iterator[str]:
        yield from super().issues()
        if self.split not in _EMNIST_SPLITS:
            yield f"split must be one of {', '.join(_EMNIST_SPLITS)}, got {self.split!r}"

    @override
    def torchvision_options(self) -> dict[str, Any]:
        return {"split": self.split}

    @override
    def _images(self, data_set: Any) -> ImageTensors:
        data_set.data = data_set.data.transpose(1, 2)  # its files hold columns first
        return super()._images(data_set)


_EMNIST_SPLITS = ("balanced", "byclass", "bymerge", "letters", "digits", "mnist")
_CHARACTERS = tuple(string.digits + string.ascii_uppercase + string.ascii_lowercase)


@final
class FEMNIST(Source):
    """Handwritten characters of 28x28 pixels with their writers, from the files of LEAF's scripts.

    A batch is images (B, 1, 28, 28) in [0, 1] (ink is 0, paper 1) and the class, 0 to 61: digits, then
    upper case, then lower case. ``NaturalPartition("writers")`` makes each writer a client. Writers of the
    test files are no clients; if there are none, `test_fraction` of all images is held out.

    Sources: Caldas et al. 2018, *LEAF: a benchmark for federated settings* (1812.01097).

    Args:
        root: the folder ``data`` of LEAF's FEMNIST, with ``train/*.json`` and perhaps ``test/*.json``.
        options: those of `Source`.

    Raises:
        ConfigurationError: if a setting is out of range; at `setup` if files are missing or no LEAF files.
    """

    def __init__(self, root: str, **options: Any) -> None:
        super().__init__(**options)
        self.root = root

    @override
    def load(self) -> Loaded:
        train, test = (
            self._rows(sorted(Path(self.root, kind).glob("*.json"))) for kind in ("train", "test")
        )
        if train is None:
            raise ConfigurationError(
                f"FEMNIST: there is no file {self.root}/train/*.json: create the files with LEAF's "
                "data/femnist/preprocess.sh"
            )
        return Loaded(train, test=test, class_names=_CHARACTERS)

    def _rows(self, files: list[Path]) -> TensorRows | None:
        images: list[Tensor] = []
        labels: list[int] = []
        writers: list[str] = []
        for file in files:
            try:
                users = json.loads(file.read_text(encoding="utf-8"))["user_data"]
                for writer, examples in users.items():
                    pixels = torch.tensor(examples["x"]).view(-1, 1, 28, 28)
                    images.append(pixels.mul(255).round().to(torch.uint8))
                    labels += examples["y"]
                    writers += [writer] * len(pixels)
            except Exception as error:  # of any other content
                raise ConfigurationError(f"FEMNIST: {file} is no file of LEAF: {error}") from error
        if not images:
            return None
        parts = [torch.cat(images), torch.tensor(labels)]
        return TensorRows(parts, {"writers": writers}, pixels=True)
