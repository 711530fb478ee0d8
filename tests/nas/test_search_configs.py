"""Every search in configs/nas runs a round over a space, over clients and without, and retrains."""

import re
from pathlib import Path

import pytest
import yaml
from toys import SHORT_FIT

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
SMALL = (
    *(*SHORT_FIT, "--trainer.limit_val_batches=1", "--data.init_args.num_clients=2"),
    *("--model.init_args.alpha_every=1", "--model.init_args.channels=4"),
)
OVER = {
    "clients": ["--federation.local_steps=1"],
    "central": ["--federation=null", "--trainer.limit_train_batches=1"],
}

pytestmark = [
    pytest.mark.filterwarnings("ignore:The number of training batches"),
    pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step"),
    pytest.mark.usefixtures("in_an_empty_folder"),
]


def run(*files, options):
    main(["fit", *(f"--config={file}" for file in files), *SMALL, *options])


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
    run(space, *files, options=OVER[over] + ["--model.init_args.channels=8"] * (space == LAYERED))
    assert "|" in found() or "Genotype" in found()
    names = {path.name for path in Path("runs").rglob("*")}
    assert {"cell.png", "cell.svg", "retrain.yaml"} <= names
    assert any(name.endswith(".ckpt") for name in names)


def test_the_report_shows_what_was_found():
    options = [*OVER["clients"], "--report=true", "--trainer.max_epochs=2"]
    run(SPACES[1], CONFIGS / "nas" / "darts.yaml", options=options)
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
