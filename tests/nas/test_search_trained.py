"""`fl-lightning search` of a trained supernet: scores, what is exported, what is refused."""

import csv
import sys
from pathlib import Path

import pytest
import torch
import yaml
from readme import ROOT
from toys import SHORT_FIT

from fl_lightning.cli import main

ONE_SHOT = str(ROOT / "configs/nas/one_shot_quickstart.yaml")
CELLS = str(ROOT / "configs/nas/quickstart.yaml")
SHORT = [*SHORT_FIT, "--data.init_args.num_clients=3", "--trainer.limit_val_batches=3"]


pytestmark = [
    pytest.mark.filterwarnings("ignore:The number of training batches"),
    pytest.mark.filterwarnings("ignore:Total length of `list` across ranks is zero"),
]


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """A run of each kind of supernet, and the folder that they lie in."""
    folder = tmp_path_factory.mktemp("trained")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setattr(sys, "argv", ["fl-lightning"])
        few = ["--model.init_args.recalibration_examples=128", "--federation.local_steps=1"]
        main(["fit", "--config", ONE_SHOT, *SHORT, *few])
        main(["fit", "--config", CELLS, *SHORT, *few[1:], "--model.init_args.channels=4"])
    return folder


@pytest.fixture(autouse=True)
def _here(runs, monkeypatch):
    monkeypatch.chdir(runs)
    monkeypatch.setattr(sys, "argv", ["fl-lightning"])


def run_of(kind):
    return Path("runs", kind, "version_0")


def checkpoint(kind):
    return str(run_of(kind) / "checkpoints/last.ckpt")


def search(kind, *words):
    main(["search", "--ckpt_path", checkpoint(kind), *words])


def scores(out):
    with Path(out, "evaluated.csv").open() as file:
        return {row["architecture"]: float(row["score"]) for row in csv.DictReader(file)}


def logged(kind, capsys):
    """Return the metrics that `validate` prints."""
    words = ["--config", str(run_of(kind) / "config.yaml"), f"--ckpt_path={checkpoint(kind)}"]
    words += ["--trainer.logger=false", f"--trainer.default_root_dir={kind}"]
    capsys.readouterr()
    main(["validate", *words])
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    return {line[0]: float(line[1]) for line in lines if line and line[0].startswith("val/")}


def test_scores_are_those_that_validate_logs(capsys):
    expected = logged("one_shot_quickstart", capsys)
    for network, bound, name in [
        ("w1:e1-e1|w1:e1-e1", "params>=29250", "val/accuracy"),
        ("w0.5:e0.5|w0.5:e0.5", "params<=2082", "val/smallest_accuracy"),
    ]:
        only = [f"--constraint={bound}", "--strategy=random", "--budget=2", "--out=ends"]
        search("one_shot_quickstart", *only)
        # three decimals are printed
        assert scores("ends")[network] == pytest.approx(expected[name], abs=5.1e-4)


def test_a_search_leaves_its_results_alone_and_they_begin_with_the_weights_or_from_scratch(capsys):
    """It leaves no trace in the run."""
    before = {path: path.stat().st_mtime_ns for path in run_of("one_shot_quickstart").rglob("*")}
    words = ["--constraint=params<=4000", "--budget=6", "--out=few", "--export=few/best.yaml"]
    search("one_shot_quickstart", *words)
    assert "| accuracy | flops" in capsys.readouterr().out
    assert {path.name for path in Path("few").iterdir()} == {
        *("best.yaml", "evaluated.csv", "front.png", "front.svg", "report.html")
    }
    after = {path: path.stat().st_mtime_ns for path in run_of("one_shot_quickstart").rglob("*")}
    assert after == before
    assert not Path("config.yaml").exists()
    best = yaml.safe_load(Path("few/best.yaml").read_text())
    network = best["model"]["init_args"]["network"]["init_args"]
    assert network["weights"] == checkpoint("one_shot_quickstart")
    stay = ["--model.init_args.optimizer.init_args.lr=1e-6"]
    supernet = torch.load(checkpoint("one_shot_quickstart"), weights_only=True)["state_dict"]
    del network["weights"]
    Path("scratch.yaml").write_text(yaml.safe_dump(best))
    for name, file in (("kept", "few/best.yaml"), ("fresh", "scratch.yaml")):
        logger = f"--trainer.logger.init_args.name={name}"
        main(["fit", "--config", file, *SHORT, *stay, logger])
        trained = torch.load(checkpoint(name), weights_only=True)["state_dict"]
        stem = trained["network.network.stem.0.weight"]
        same = torch.allclose(stem, supernet["network.stem.0.weight"], atol=1e-4)
        assert same == (name == "kept")
    with pytest.raises(SystemExit, match=r"OneShot or Supernet, .* got ImageClassifier"):
        search("fresh")  # a plain network has no sub-networks


def test_cells_are_scored_by_the_shared_weights_and_trained_from_scratch():
    words = ["--constraint=flops<=60000", "--budget=4", "--out=cells", "--export=cell.yaml"]
    search("nas_quickstart", *words)
    best = yaml.safe_load(Path("cell.yaml").read_text())
    assert "weights" not in best["model"]["init_args"]["network"]["init_args"]
    assert best["data"]["init_args"]["search_fraction"] == 0.0
    main(["fit", "--config", "cell.yaml", *SHORT, "--trainer.logger.init_args.name=cell"])
    assert Path(checkpoint("cell")).exists()


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--ckpt_path=none.ckpt"], "there is no file 'none.ckpt'"),
        (["--ckpt_path=none.ckpt", "--config", ONE_SHOT], "there is no file 'none.ckpt'"),
        (["--config", ONE_SHOT], "give --ckpt_path as well"),
        (
            ["--ckpt_path=ONE", "--space=darts"],
            "space: with --ckpt_path, the supernet's configuration sets it",
        ),
        (["--ckpt_path=ONE", "--score=synflow"], "synflow needs untrained networks"),
        (["--ckpt_path=ONE", "--config=no.yaml"], "no.yaml"),
        (["--ckpt_path=ONE", "--config", CELLS], "another search space (model.class_path"),
        (["--ckpt_path=ONE", "--constraint=joules<=1"], "Costs are flops, params, activations"),
        (["--ckpt_path=ONE", "--constraint=params<=1"], "the closest has params"),
        (
            ["--ckpt_path=ONE", "--", "--data.init_args.source.init_args.val_fraction=0"],
            "a search needs validation examples, but there are none",
        ),
        (["--ckpt_path=moved.ckpt", "--config", CELLS], "belongs to another model or space"),
        (["--ckpt_path=moved.ckpt"], "there is no config.yaml in the folder above"),
        (["--ckpt_path=nan.ckpt", "--config", ONE_SHOT], "is not finite"),
        (["--space=darts", "--", "--trainer.devices=1"], "give --ckpt_path as well"),
        ([], "space must be one of"),
    ],
)
def test_a_mistake_is_told_in_a_sentence(words, says, capsys, tmp_path):
    content = torch.load(checkpoint("one_shot_quickstart"), weights_only=True)
    torch.save(content, tmp_path / "moved.ckpt")
    content["state_dict"]["network.stem.0.weight"][0] = torch.nan
    torch.save(content, tmp_path / "nan.ckpt")
    words = [
        word.replace("=ONE", f"={checkpoint('one_shot_quickstart')}")
        .replace("=moved", f"={tmp_path}/moved")
        .replace("=nan", f"={tmp_path}/nan")
        for word in words
    ]
    with pytest.raises(SystemExit) as end:
        main(["search", *words])
    said = f"{end.value.code} {capsys.readouterr().err}"
    assert says in said
    assert "Traceback" not in said
