"""Handwritten digits that need no download: the set of quick starts, notebooks and tests.

Source: Alpaydin and Kaynak 1998, *Optical recognition of handwritten digits*, UCI Machine Learning
Repository; scikit-learn carries its test part.
"""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import ClassVar, final

import numpy as np
import torch

from fl_lightning.data.sources.image_source import ImageSource, LoadedImages
from fl_lightning.data.sources.images import ImageTensors
from fl_lightning.data.transforms import PixelPipeline


@final
class Digits(ImageSource):
    """The 1,797 digits of scikit-learn: 8x8 pixels, 16 grey levels, 10 classes.

    A fifth is the test set, `val_fraction` of the rest the validation set, both of every class
    alike and chosen by `seed`.

    Args:
        batch_size: examples a batch; the last batch of a pass may be smaller.
        augment: whether training digits are shifted at random by up to one pixel. Off by default:
            these digits are already centred, and a pixel is an eighth of one. After 30 epochs a
            small CNN, perceptron and transformer have 98.5, 98.0 and 92.0 % of the test digits
            right without it and 98.1, 93.2 and 84.0 % with it (means of three seeds).
        image_size: height and width the model sees, in pixels; None for 8.
        val_fraction: part of the training digits held out for validation, in [0, 1); 0 for none.
        classes: numbers of the classes whose images are kept, in all sets; labels stay as they are.
            None keeps all.
        seed: decides which digits are held out and the order of central training. None takes the
            run's seed.

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

    def __init__(
        self,
        *,
        batch_size: int = 64,
        augment: bool = False,
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

    def load(self) -> LoadedImages:
        """Read the digits out of the installed scikit-learn, scaled to 0..255."""
        # its file, because importing it takes a second: a row is 64 grey levels and the digit
        scikit_learn = find_spec("sklearn")
        assert scikit_learn is not None  # a dependency of this package
        assert scikit_learn.origin is not None
        path = Path(scikit_learn.origin).parent / "datasets" / "data" / "digits.csv.gz"
        table = torch.from_numpy(np.loadtxt(path, delimiter=","))
        pixels = table[:, :64].view(-1, 1, 8, 8).mul(255 / 16).round().to(torch.uint8)
        images = ImageTensors(pixels, table[:, 64].long(), self.training_pipeline(self.pipeline))
        return LoadedImages(images, tuple("0123456789"))
