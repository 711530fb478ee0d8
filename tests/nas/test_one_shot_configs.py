"""Every config of a one-shot network runs a round on small data."""

import sys
from pathlib import Path

import pytest
from small_sets import write_folder
from toys import ACCELERATOR

from fl_lightning.cli import main

CONFIGS = Path(__file__).parents[2] / "configs" / "nas"
SMALL = {
    "mobilenet": "{widths: [8, 8, 8, 16, 32, 32], strides: [1, 2, 2], squeeze: [false, false, true], "
    "swish: [false, true, true], kernels: [3, 5], depths: [1, 2]}",
    "resnet": "{stem: 8, channels: [16, 32], strides: [1, 2], stem_strides: [1, 1], "
    "depths: [[1, 2], [1, 2]]}",
    "vit": "{patch: 8, features: [16, 24], heads: [1, 2], depths: [1, 2], head_features: 8}",
}


def run(folder, *words):
    options = ["--trainer.max_epochs=1", f"--trainer.accelerator={ACCELERATOR}"]
    options += ["--trainer.enable_progress_bar=false", "--report=false"]
    main(["fit", *words, *options])
    assert list(folder.rglob("last.ckpt"))


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["fl-lightning"])
    return tmp_path


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
def test_a_method_runs_over_a_space(folder, space, methods):
    names = [f"class {i}" for i in range(10)]
    write_folder(folder / "images", "train", names, 12, size=(32, 32))
    write_folder(folder / "images", "test", names, 2, size=(32, 32))
    files = [f"space/{space}.yaml", *(f"{method}.yaml" for method in methods)]
    layers = [word for file in files for word in ("--config", str(CONFIGS / file))]
    rates = ["--model.init_args.method.init_args.rates=[1, 0.4, 0.1, 0.1, 0.1]"]  # fewer options
    run(
        folder,
        *layers,
        *(rates if "ofa_published" in methods else []),
        "--model.init_args.space.init_args",
        SMALL[space],
        "--data.init_args.source.init_args.root=images",
        "--data.init_args.source.init_args.batch_size=8",
    )
