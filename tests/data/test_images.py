"""Pixels in memory and the pipeline: crops, flips, scaling, indexing."""

import pytest
import torch
from torch.nn import functional

from fl_lightning.core.errors import ConfigurationError
from fl_lightning.data.partitions.partition import stratified_split
from fl_lightning.data.sources.image_source import ImageTensors
from fl_lightning.data.transforms import PixelPipeline, crop, mirror, pad

RGB = {"mean": (0.5, 0.4, 0.3), "std": (0.2, 0.3, 0.4)}


def random_pixels(num_images=40, channels=3, height=9, width=7):
    shape = (num_images, channels, height, width)
    return torch.randint(0, 256, shape, dtype=torch.uint8, generator=torch.Generator())


def image_tensors(**augmentation):
    images = random_pixels()
    return ImageTensors(images, torch.arange(len(images)) % 5, PixelPipeline(**RGB, **augmentation))


def test_augmentation_equals_a_loop_over_examples_given_the_same_draws():
    images, padding = random_pixels(), 3
    pipeline = PixelPipeline(**RGB, crop_padding=padding, horizontal_flip=True)
    torch.manual_seed(7)
    found = pipeline.augment(images)
    torch.manual_seed(7)
    tops, lefts = torch.randint(0, 2 * padding + 1, (2, len(images))).tolist()
    flips = (torch.rand(len(images)) < 0.5).tolist()
    expected = []
    for image, top, left, flip in zip(images, tops, lefts, flips, strict=True):
        padded = functional.pad(image, (padding,) * 4)
        window = padded[:, top : top + image.shape[1], left : left + image.shape[2]]
        expected.append(window.flip(-1) if flip else window)
    assert found.dtype == torch.uint8
    assert torch.equal(found, torch.stack(expected))
    assert not torch.equal(pipeline.augment(images), found)  # other draws


def test_a_centred_crop_and_no_flip_change_nothing():
    images = random_pixels()
    centre = torch.full((len(images),), 2)
    assert torch.equal(crop(images, centre, centre, padding=2), images)
    assert torch.equal(crop(images, centre, centre, padding=2, mode="reflect"), images)
    assert torch.equal(mirror(images, torch.zeros(len(images), dtype=torch.bool)), images)


@pytest.mark.parametrize("mode", ["constant", "reflect"])
@pytest.mark.parametrize("padding", [1, 3])
def test_bytes_are_padded_as_pytorch_pads_numbers(mode, padding):
    images = random_pixels()
    expected = functional.pad(images.float(), (padding,) * 4, mode=mode)
    assert torch.equal(pad(images, padding, mode), expected.to(torch.uint8))


def test_without_augmentation_the_pipeline_is_deterministic_and_draws_nothing():
    images = image_tensors(crop_padding=2, horizontal_flip=True).evaluation()
    state = torch.get_rng_state()
    first, second = (images.gather(torch.arange(40))[0] for _ in range(2))
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.equal(first, second)
    assert images.is_deterministic
    mean, std = (torch.tensor(RGB[name]).view(3, 1, 1) for name in ("mean", "std"))
    torch.testing.assert_close(first, (random_pixels().float() / 255 - mean) / std)
    chosen = image_tensors(crop_padding=1).select(torch.tensor([7, 2]))
    assert torch.equal(chosen.images, images.images[[7, 2]])
    assert (len(chosen), chosen.targets.tolist()) == (2, [2, 2])
    assert chosen.pipeline == PixelPipeline(**RGB, crop_padding=1)


def test_resize_is_antialiased_and_leaves_the_right_size_alone():
    pixels = random_pixels(height=8, width=8)
    plain = PixelPipeline(**RGB)(pixels)
    assert torch.equal(PixelPipeline(**RGB, image_size=8)(pixels), plain)
    halved = PixelPipeline(**RGB, image_size=4)(pixels)
    assert halved.shape == (40, 3, 4, 4)
    expected = functional.interpolate(plain, (4, 4), mode="bilinear", antialias=True)
    assert torch.equal(halved, expected)
    assert PixelPipeline(**RGB, image_size=12)(random_pixels()).shape == (40, 3, 12, 12)


def test_one_index_gives_an_example_and_many_give_a_batch():
    images = image_tensors()
    batch, labels = images[[3, 8, 3]]
    assert (batch.shape, batch.dtype) == ((3, 3, 9, 7), torch.float32)
    assert (labels.tolist(), labels.dtype) == ([3, 3, 3], torch.int64)
    assert torch.equal(images[torch.tensor([3, 8, 3])][0], batch)
    image, label = images[8]
    assert torch.equal(image, batch[1])
    assert (label.shape, label.item()) == ((), 3)
    assert torch.equal(images[torch.tensor(8)][0], image)
    assert torch.equal(images[-1][0], images[39][0])
    assert images[[]][0].shape == (0, 3, 9, 7)
    with pytest.raises(IndexError):
        images[40]


def pipeline(**settings):
    return lambda: PixelPipeline(**RGB | settings)


def tensors(*shape, dtype=torch.uint8, num_targets=4):
    images, targets = torch.zeros(shape, dtype=dtype), torch.zeros(num_targets)
    return lambda: ImageTensors(images, targets, PixelPipeline(**RGB))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (pipeline(mean=(0.5,)), "one number per channel"),
        (pipeline(std=(0.2, 0.0, 0.4)), "std must be > 0"),
        (pipeline(crop_padding=-1), "crop_padding must be >= 0"),
        (pipeline(padding_mode="edge"), "padding_mode must be constant or reflect, got 'edge'"),
        (pipeline(image_size=0), "image_size must be >= 1"),
        (tensors(4, 3, 2, 2, dtype=torch.float32), "images must be uint8"),
        (tensors(4, 3, 2), "images must be uint8"),
        (tensors(4, 3, 2, 2, num_targets=5), "targets must have shape"),
        (tensors(4, 1, 2, 2), "3 channels, the images 1"),
    ],
)
def test_what_makes_no_images_is_refused(make, message):
    with pytest.raises(ConfigurationError, match=message):
        make()


@pytest.mark.parametrize("fraction", [0.0, 0.1, 0.25, 0.37, 1.0])
def test_stratified_split_is_a_cover_with_every_class_within_one(fraction):
    targets = torch.randint(0, 7, (503,), generator=torch.Generator()) ** 2
    kept, held_out = stratified_split(targets, fraction, seed=3)
    assert torch.cat([kept, held_out]).sort().values.tolist() == list(range(503))
    assert len(held_out) == round(503 * fraction)
    for label in targets.unique():
        exact = fraction * (targets == label).sum()
        assert abs((targets[held_out] == label).sum() - exact) < 1
