"""Pixel pipeline: converts a batch of stored images to inputs of a model, with augmentation.

    uint8 pixels -> random crop after padding -> random horizontal flip
                 -> [0, 1] -> (x - mean) / std -> bilinear resize

Crops and flips differ between examples but are computed for the whole batch, on bytes: a batch of 64
CIFAR images takes half a millisecond on two cores.

Crops and flips draw from torch's global CPU generator, like users' augmentation and dropout. The
framework seeds that generator for every client and round, so that the draws are a function of (seed,
round, client); without the framework, call `torch.manual_seed` first.

Source of the recipe (pad by 4, crop, flip): He et al. 2016, CVPR (1512.03385), section 4.2.
Shapes: B images, C channels, H and W pixels.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Literal, get_args

import torch
from torch import Tensor
from torch.nn import functional

from fl_lightning.core.errors import ConfigurationError
from fl_lightning.core.modules import sent

# Padding of an image before a crop: black, or the image mirrored at its edges, with the names of
# torchvision and PyTorch.
PaddingMode = Literal["constant", "reflect"]


@dataclass(frozen=True)
class PixelPipeline:
    """Converts a batch of stored images to inputs of a model: augmented, normalised and resized.

    Args:
        mean: mean of every channel, of pixels in [0, 1].
        std: standard deviation of every channel, greater than 0.
        crop_padding: pixels added on each side before a random crop of the original size; 0 for no
            crop.
        padding_mode: values of these pixels: zeros (``constant``), or the image mirrored at its edges
            (``reflect``).
        horizontal_flip: mirror each image left to right with probability 1/2.
        image_size: height and width after bilinear interpolation with antialiasing; None keeps the
            stored size.

    Raises:
        ConfigurationError: if a setting is out of its range.

    Example:
        >>> pipeline = PixelPipeline(mean=(0.5,), std=(0.25,), image_size=2)
        >>> pipeline(torch.full((1, 1, 4, 4), 255, dtype=torch.uint8))
        tensor([[[[2., 2.],
                  [2., 2.]]]])
    """

    mean: tuple[float, ...]
    std: tuple[float, ...]
    crop_padding: int = 0
    padding_mode: PaddingMode = "constant"
    horizontal_flip: bool = False
    image_size: int | None = None

    def __post_init__(self) -> None:
        issues = []
        if not self.mean or len(self.mean) != len(self.std):
            issues.append(f"mean and std need one number per channel, got {self.mean}, {self.std}")
        if not all(math.isfinite(value) for value in self.mean):
            issues.append(f"mean must be finite numbers, got {self.mean}")
        if not all(0 < value < math.inf for value in self.std):
            issues.append(
                f"std must be > 0 and finite, got {self.std}: use 1.0 to leave a channel's scale"
            )
        if self.crop_padding < 0:
            issues.append(f"crop_padding must be >= 0 pixels, got {self.crop_padding}: 0 is off")
        if self.padding_mode not in get_args(PaddingMode):
            allowed = " or ".join(get_args(PaddingMode))
            issues.append(f"padding_mode must be {allowed}, got {self.padding_mode!r}")
        if self.image_size is not None and self.image_size < 1:
            issues.append(f"image_size must be >= 1 pixel, got {self.image_size}: None is off")
        if issues:
            raise ConfigurationError("; ".join(issues))

    def evaluation(self) -> PixelPipeline:
        """Return the same pipeline without augmentation: a deterministic function of the images.

        Example:
            >>> PixelPipeline((0.5,), (0.5,), crop_padding=4, image_size=8).evaluation()
            PixelPipeline(mean=(0.5,), std=(0.5,), crop_padding=0, padding_mode='constant', \
horizontal_flip=False, image_size=8)
        """
        return replace(self, crop_padding=0, horizontal_flip=False)

    def __call__(self, images: Tensor) -> Tensor:
        """Return float32 images of shape (B, C, h, w) from uint8 ones of shape (B, C, H, W)."""
        return self.resize(self.normalize(self.augment(images)))

    def augment(self, images: Tensor) -> Tensor:
        """Crop and flip each image at random; images keep their shape and the type uint8."""
        num_images = len(images)
        if self.crop_padding:
            offsets = torch.randint(0, 2 * self.crop_padding + 1, (2, num_images))
            padding, mode = self.crop_padding, self.padding_mode
            images = crop(images, offsets[0], offsets[1], padding=padding, mode=mode)
        if self.horizontal_flip:
            images = mirror(images, torch.rand(num_images) < 0.5)
        return images

    def normalize(self, images: Tensor) -> Tensor:
        """Normalise uint8 images: return ``(images / 255 - mean) / std`` in float32."""
        there = (sent(torch.tensor(each), images.device) for each in (self.mean, self.std))
        mean, std = (each.view(-1, 1, 1) for each in there)
        return images.to(torch.float32).div_(255).sub_(mean).div_(std)

    def resize(self, images: Tensor) -> Tensor:
        """Resize float images to `image_size` pixels; unchanged if they have that size."""
        size = self.image_size
        if size is None or images.shape[-2:] == (size, size):
            return images
        return functional.interpolate(images, (size, size), mode="bilinear", antialias=True)


def pad(images: Tensor, padding: int, mode: PaddingMode) -> Tensor:
    """Pad images of any dtype on all sides, to shape (B, C, H + 2 padding, W + 2 padding).

    With ``reflect``, an image must be larger than its padding.

    Example:
        >>> pad(torch.tensor([[[[1, 2, 3]] * 3]]), 1, "reflect")[0, 0, 0]
        tensor([2, 1, 2, 3, 2])
    """
    if mode == "constant":
        return functional.pad(images, (padding,) * 4)
    for axis in (2, 3):  # PyTorch's reflect does not support bytes
        last = images.shape[axis] - 1
        places = torch.arange(-padding, last + padding + 1, device=images.device).abs()
        images = images.index_select(axis, last - (last - places).abs())
    return images


def crop(
    images: Tensor,
    tops: Tensor,
    lefts: Tensor,
    *,
    padding: int,
    mode: PaddingMode = "constant",
) -> Tensor:
    """Pad each image, and crop it to a window of its original size at a given position.

    All possible windows are a view of the padded images; one indexing operation copies one per image.

    Args:
        images: shape (B, C, H, W).
        tops: first row of each window in the padded image, shape (B,), in [0, 2 padding].
        lefts: first column of each window, likewise.
        padding: pixels on each side.
        mode: values of these pixels, see `pad`.

    Example:
        >>> image = torch.tensor([[[[1, 2], [3, 4]]]])
        >>> crop(image, torch.tensor([1]), torch.tensor([2]), padding=1)
        tensor([[[[2, 0],
                  [4, 0]]]])
    """
    batch, _, height, width = images.shape
    windows = pad(images, padding, mode).unfold(2, height, 1).unfold(3, width, 1)
    device = images.device
    return windows[torch.arange(batch, device=device), :, sent(tops, device), sent(lefts, device)]


def mirror(images: Tensor, chosen: Tensor) -> Tensor:
    """Mirror the ``chosen`` images (bool, shape (B,)) left to right.

    Example:
        >>> mirror(torch.tensor([[[[1, 2]]], [[[3, 4]]]]), torch.tensor([True, False])).flatten()
        tensor([2, 1, 3, 4])
    """
    return torch.where(sent(chosen, images.device).view(-1, 1, 1, 1), images.flip(-1), images)
