"""The benchmark of transfer: it runs on made images; on CIFAR-10, kept weights beat fresh ones.

The second test needs the images: CIFAR10_IMAGES=<folder with train and test>.
"""

import os
from pathlib import Path

import pytest
from small_sets import write_folder

from benchmarks.transfer import results

SOURCE = "--data.init_args.source.init_args."
IMAGES = os.environ.get("CIFAR10_IMAGES")


@pytest.mark.slow
def test_both_halves_of_made_classes(tmp_path):
    names = [f"class {i}" for i in range(10)]
    write_folder(tmp_path / "images", "train", names, 30, size=(16, 16))
    write_folder(tmp_path / "images", "test", names, 4, size=(16, 16))
    options = [f"{SOURCE}root={tmp_path / 'images'}", f"{SOURCE}batch_size=8"]
    settings = {"rounds": 2, "after": [1, 2], "constraint": "flops<=3e6"}
    [result] = results([0], tmp_path, **settings, options=options)
    assert len(result.kept) == len(result.fresh) == 2
    assert all(0 <= accuracy <= 1 for accuracy in [*result.kept, *result.fresh])
    runs = {path.name for path in (tmp_path / "seed_0" / "runs").iterdir()}
    assert runs == {"supernet", "search", "kept_1", "kept_2", "fresh_1", "fresh_2"}


@pytest.mark.slow
@pytest.mark.skipif(not IMAGES, reason="needs CIFAR10_IMAGES, a folder with train and test")
def test_weights_of_half_of_cifar10_help_with_the_other_half(tmp_path):
    options = [f"{SOURCE}root={Path(IMAGES).resolve()}"]
    settings = {"rounds": 20, "after": [2], "constraint": "flops<=4e6"}
    [result] = results([0], tmp_path, **settings, options=options)
    assert result.kept[0] > result.fresh[0] + 0.05
