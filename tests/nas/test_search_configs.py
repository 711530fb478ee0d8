"""Every search in configs/nas runs a round over a space, over clients and without, and retrains."""

import re
import sys
from pathlib import Path

import pytest
import yaml
from toys import ACCELERATOR

from fl_lightning.cli import main

CONFIGS = Path(__file__).parents[2] / "configs"
SPACES = [CONFIGS / "nas" / "space" / name for name in ("darts.yaml", "nas_bench_201.yaml")]
OF_SIZES = {
    "ofa.yaml",
    "ofa_published.yaml",
    "bignas.yaml",
    "attentive_nas.yaml",
}  # test_one_shot_configs runs them
LAYERS = {"cifar10_images.yaml", "transfer.yaml"}  # over a search, or over what it has found
METHODS = {
    "darts": ["darts.yaml"],
    "second order": ["darts.yaml", "darts_second_order.yaml"],
    "zero-cost start": ["darts.yaml", "zero_cost_start.yaml"],
    "gdas": ["gdas.yaml"],
    "pc_darts": ["pc_darts.yaml"],
    "enas": ["enas.yaml"],
    "proxyless": ["proxyless.yaml"],
    "fbnet": ["fbnet.yaml"],
}
SMALL = {
    "--model.init_args.alpha_every": "1",
    "--model.init_args.channels": "4",
    "--data.init_args.num_clients": "2",
    "--trainer.max_epochs": "1",
    "--trainer.devices": "1",
    "--trainer.accelerator": ACCELERATOR,
    "--trainer.enable_progress_bar": "false",
    "--report": "false",
    "--trainer.enable_model_summary": "false",
    "--trainer.num_sanity_val_steps": "0",
    "--trainer.limit_val_batches": "1",
    "--test_after_fit": "false",
}
OVER_CLIENTS = {"--federation.local_steps": "1"}
CENTRAL = {"--federation": "null", "--trainer.limit_train_batches": "1"}

pytestmark = [
    pytest.mark.filterwarnings("ignore:The number of training batches"),
    pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step"),
]


@pytest.fixture(autouse=True)
def _folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["fl-lightning"])


def run(*files, **options):
    layers = [word for file in files for word in ("--config", str(file))]
    main(["fit", *layers, *(word for pair in options.items() for word in pair)])


def found():
    [file] = Path("runs").rglob("architecture.yaml")
    return yaml.safe_load(file.read_text())["architecture"]


def slow_if(case, is_slow):
    return pytest.param(*case, marks=pytest.mark.slow) if is_slow else pytest.param(*case)


# the commands of the pages run the other methods over clients
LAYERED = CONFIGS / "nas" / "space" / "mobilenet_layers.yaml"
CASES = [
    slow_if(
        (space, method, over),
        (space.stem, method, over) != ("nas_bench_201", "pc_darts", "clients"),
    )
    for space in SPACES
    for method in METHODS
    for over in ("clients", "central")
]
CASES.append(pytest.param(LAYERED, "fbnet", "clients", marks=pytest.mark.slow))


@pytest.mark.parametrize(("space", "method", "over"), CASES)
def test_every_search_runs_a_round(space, method, over):
    files = [CONFIGS / "nas" / name for name in METHODS[method]]
    small = {**SMALL, "--model.init_args.channels": "8"} if space == LAYERED else SMALL
    run(space, *files, **small, **(OVER_CLIENTS if over == "clients" else CENTRAL))
    assert "|" in found() or "Genotype" in found()
    names = {path.name for path in Path("runs").rglob("*")}
    assert {"cell.png", "cell.svg", "retrain.yaml"} <= names
    assert any(name.endswith(".ckpt") for name in names)


def test_the_report_shows_what_was_found():
    options = {**SMALL, **OVER_CLIENTS, "--report": "true", "--trainer.max_epochs": "2"}
    run(CONFIGS / "nas" / "space" / "nas_bench_201.yaml", CONFIGS / "nas" / "darts.yaml", **options)
    [page] = [path.read_text() for path in Path("runs").rglob("report.html")]
    [section] = [path.read_text() for path in Path("runs").rglob("sections/search.html")]
    assert section in page
    cell = yaml.safe_load(next(Path("runs").rglob("architecture.yaml")).read_text())["architecture"]
    assert f"{cell}" in section
    assert "multiply-adds" in section
    probabilities = re.findall(r"edge cell (\d→\d), operation (\w+): ([\d.]+)", section)
    assert len(probabilities) == 30
    assert sum(float(share) for *_, share in probabilities) == pytest.approx(6, abs=1e-2)
    assert [float(x) for x in re.findall(r"none, round (\d)", section)] == [1, 2]


def test_a_method_is_a_small_diff_that_says_how_to_run_it():
    for path in (CONFIGS / "nas").glob("*.yaml"):
        if "quickstart" in path.stem or path.stem == "imagenet":  # of their own
            continue
        content, text = yaml.safe_load(path.read_text()), path.read_text()
        assert f"--config configs/nas/{path.name}" in text
        assert content.keys() <= {"model", "data", "trainer"}
        assert "space" not in content["model"]["init_args"]
        searches = {name for names in METHODS.values() for name in names}
        assert path.name in searches | OF_SIZES | LAYERS
