"""Small data sets that the tests write, in the formats that users have on disk."""

import colorsys
import pickle

import numpy as np
from PIL import Image

random = np.random.default_rng(0)


def random_bytes(*shape):
    return random.integers(0, 256, shape, dtype=np.uint8)


def write_idx(folder, num_train=40, num_test=20, names=("train", "t10k")):
    folder.mkdir(parents=True)
    stored = {}
    for part, count in zip(names, (num_train, num_test), strict=True):
        pixels, labels = random_bytes(count, 28, 28), (np.arange(count) % 10).astype(np.uint8)
        for array, kind in ((pixels, "images-idx3"), (labels, "labels-idx1")):
            header = bytes([0, 0, 8, array.ndim]) + np.array(array.shape, ">i4").tobytes()
            (folder / f"{part}-{kind}-ubyte").write_bytes(header + array.tobytes())
        stored[part] = pixels
    return stored


def write_pickles(folder, files, label_key, meta, class_names):
    folder.mkdir(parents=True)
    stored = {}
    for name, count in files.items():
        pixels, labels = random_bytes(count, 3072), [i % len(class_names) for i in range(count)]
        (folder / name).write_bytes(pickle.dumps({"data": pixels, label_key: labels}))
        stored[name] = pixels.reshape(-1, 3, 32, 32)
    name, key = meta
    (folder / name).write_bytes(pickle.dumps({key: class_names}))
    return stored


def write_folder(root, part, classes, num_images, *, size=(8, 8), extension="png"):
    """Noise, tinted with the colour of its class, so that there is something to learn."""
    for number, class_name in enumerate(classes):
        folder = root / part / class_name
        folder.mkdir(parents=True)
        tint = 255 * np.array(colorsys.hsv_to_rgb(number / len(classes), 1, 1))
        for i in range(num_images):
            pixels = (random_bytes(size[1], size[0], 3) + tint) / 2
            Image.fromarray(pixels.astype(np.uint8)).save(folder / f"{i:03}.{extension}")
