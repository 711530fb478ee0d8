"""Every config of a one-shot network runs a round on small data."""

from pathlib import Path

import pytest
from small_sets import write_folder
from toys import SHORT_FIT

from fl_lightning.cli import main

CONFIGS = Path(__file__).parents[2] / "configs" / "nas"
SMALL = {
    "mobilenet": "{widths: [8, 8, 8, 16, 32, 32], strides: [1, 2, 2], squeeze: [false, false, true], "
    "swish: [false, true, true], kernels: [3, 5], depths: [1, 2]}",
    "resnet": "{stem: 8, channels: [16, 32], strides: [1, 2], stem_strides: [1, 1], "
    "depths: [[1, 2], [1, 2]]}",
    "vit": "{patch: 8, features: [16, 24], heads: [1, 2], depths: [1, 2], head_features: 8}",
}


@pytest.mark.usefixtures("in_an_empty_folder")
@pytest.mark.parametrize(
    ("space", "methods"),
    [
        ("mobilenet", ["ofa"]),
        ("mobilenet", ["ofa", "ofa_published"]),
        ("resnet", ["bignas"]),
        ("vit", ["attentive_nas"]),
        ("mobilenet", []),
    ],
)
def test_a_method_runs_over_a_space(tmp_path, space, methods):
    names = [f"class {i}" for i in range(10)]
    write_folder(tmp_path / "images", "train", names, 12, size=(32, 32))
    write_folder(tmp_path / "images", "test", names, 2, size=(32, 32))
    files = [f"space/{space}.yaml", *(f"{method}.yaml" for method in methods)]
    words = [f"--config={CONFIGS / file}" for file in files]
    if "ofa_published" in methods:  # fewer options
        words += ["--model.init_args.method.init_args.rates=[1, 0.4, 0.1, 0.1, 0.1]"]
    words += ["--model.init_args.space.init_args", SMALL[space]]
    source = "--data.init_args.source.init_args"
    main(["fit", *words, *SHORT_FIT, f"{source}.root=images", f"{source}.batch_size=8"])
    assert list(tmp_path.rglob("last.ckpt"))
